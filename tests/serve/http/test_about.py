"""Tests the description of a model: its frontier, its card and example prompts."""

from __future__ import annotations

import shutil

import pytest

from frontiers import AR, frontier_of, point
from mars_autoscale.model.frontier import FRONTIER_FILE, write_frontier
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.examples import write_examples
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_serve.http.endpoints.about import AboutModel
from rest.api_keys import bearer, key_entry
from rest.rest_server import SingleEngineBackend, app_of, client_of, served

# A step takes 1 ms and 0.5 ms for each position.
STEPS = ((0.001, 0.001), (0.051, 0.051))
POINTS = (AR, point("exact", 1.0, 80.0, 2.0, 3.0, 0.0), point("threshold", 0.9, 78.0, 3.0, 4.0))


@pytest.fixture(scope="module")
def measured_dir(mars_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("measured") / "model"
    shutil.copytree(mars_dir, path)
    (path / "README.md").write_text("# A small model")
    write_examples(path, [[{"role": "user", "content": "What is 3 plus 4?"}]])
    write_frontier(path, frontier_of(*POINTS, weights=weights_fingerprint(path), seconds=STEPS))
    return path


@pytest.fixture
def model_at(loops):
    """Make a served model over a directory that holds the weights of an engine that runs."""

    def make(path):
        return served("mars", read_checkpoint(path), SingleEngineBackend(loops["mars"]))

    return make


async def told(*models, name="mars", key=None, **settings):
    async with client_of(app_of(*models, **settings), headers=bearer(key)) as client:
        response = await client.get("/v1/about", params={"model": name})
    assert response.status_code == 200, response.text
    AboutModel.model_validate(response.json())
    return response.json()


async def test_a_measured_model_has_frontier_card_and_examples(measured_dir, model_at):
    about = await told(model_at(measured_dir))
    assert (about["missing"], about["card"]) == ({}, "# A small model")
    assert about["examples"] == [{"messages": [{"role": "user", "content": "What is 3 plus 4?"}]}]
    assert (about["confidence_threshold"], about["block_size"]) == (0.95, 4)
    frontier = about["frontier"]
    assert frontier["batches"] == [1, 2, 4]
    ar, exact, low = frontier["rungs"]
    assert [each["mode"] for each in (ar, exact, low)] == ["ar", "exact", "threshold"]
    assert (ar["loss"], low["loss"]) == (None, {"value": 2.0, "low": 0.0, "high": 4.0})
    assert ar["tokens_per_s"][0] == pytest.approx(1 / 0.0015)
    assert low["tokens_per_s"][0] == pytest.approx(3 / 0.003)
    # alone, mode exact is the fastest without loss: 2 tokens in 2.5 ms
    assert low["gain"][0] == pytest.approx((3 / 3) / (2 / 2.5))
    # 4n positions for 3n tokens beat n positions for n tokens up to 4 requests
    assert low["break_even_batch"] == 3


async def test_what_a_model_lacks_is_explained(mars_dir, plain_dir, model_at, loops):
    plain = served("plain", read_checkpoint(plain_dir), SingleEngineBackend(loops["plain"]))
    models = (model_at(mars_dir), plain)
    about = await told(*models)
    assert about["frontier"] is about["card"] is None
    assert about["file_bytes"] is None
    assert "frontier.json" in about["missing"]["frontier"]
    assert "marsray calibrate" in about["missing"]["frontier"]
    about = await told(*models, name="plain")
    assert about["modes"] == ["ar"]
    assert "mars.json" in about["missing"]["frontier"]


async def test_a_damaged_file_is_one_that_is_missing(measured_dir, model_at, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(measured_dir, path)
    (path / FRONTIER_FILE).write_text("{}")
    (path / "examples.json").write_text("{")
    about = await told(model_at(path))
    assert about["missing"].keys() == {"frontier", "examples"}
    assert about["examples"] == []


async def test_a_link_that_appears_later_shows_nothing_of_the_server(
    measured_dir, model_at, tmp_path
):
    path = shutil.copytree(measured_dir, tmp_path / "model")
    model = model_at(path)
    (path / "README.md").unlink()
    (tmp_path / "secret").write_text("secret")
    (path / "README.md").symlink_to(tmp_path / "secret")
    about = await told(model)
    assert about["card"] is None
    assert about["missing"]["card"].startswith("model: the checkpoint: README.md is a link that")


async def test_no_path_of_the_server_is_told(measured_dir, model_at, tmp_path):
    path = shutil.copytree(measured_dir, tmp_path / "model")
    (path / FRONTIER_FILE).unlink()
    (path / "examples.json").write_text("{")
    model = model_at(path)
    about = await told(model)
    assert about["missing"]["frontier"].startswith("frontier.json: cannot be read")
    assert about["missing"]["examples"].startswith("examples.json: cannot be read")
    async with client_of(app_of(model)) as client:
        listed = (await client.get("/v1/models")).text
    assert str(tmp_path) not in str(about) + listed


async def test_it_says_what_the_key_may_do_and_needs_one(model_at, mars_dir):
    entry = key_entry("key-a", tiers=["flex"], min_confidence_threshold=0.8)
    about = await told(model_at(mars_dir), key="key-a", keys={"entries": [entry]})
    assert about["key"] == {"tiers": ["flex"], "min_confidence_threshold": 0.8, "admin": False}
    app = app_of(model_at(mars_dir), keys={"entries": [entry]})
    async with client_of(app) as client:
        assert (await client.get("/v1/about?model=mars")).status_code == 401


async def test_an_unknown_model_is_named(client):
    response = await client.get("/v1/about?model=none")
    assert client.error_of(response, 404, "model").startswith("model: there is no 'none' here")
    response = await client.get("/v1/about")
    assert (response.status_code, "model" in response.json()["error"]["message"]) == (400, True)
