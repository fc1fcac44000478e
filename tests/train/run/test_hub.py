"""Pushing to, and pulling from, a stand-in for the endpoints of the hub that this takes."""

import base64
import json
import threading
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from frontiers import frontier_of, point
from histories import held_out, record
from mars_autoscale.model.frontier import write_frontier
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.manifest import MANIFEST, describe_all
from mars_platform.cli.main import run
from mars_train.recipe import Recipe
from mars_train.run.model_card import model_card
from mars_train.run.stages import _provenance
from mars_train.stage.history import TrainingHistory
from stage_runs import write_start

COMMIT = "a" * 40
STAGE = {"name": "mars", "objective": "mars", "epochs": 3, "learning_rate": 2e-4}


class Hub(BaseHTTPRequestHandler):
    """One repository, whose files are small enough to be sent in the commit itself."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        files = self.server.files
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self.answer({"url": f"{self.server.address}/me/tuned", "name": "me/tuned"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names
            ]
            self.answer({"files": modes})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        else:
            entries = [json.loads(line) for line in body.splitlines()]
            for entry in entries:
                if entry["key"] == "file":
                    file = entry["value"]
                    files[file["path"]] = base64.b64decode(file["content"])
            self.answer(
                {
                    "commitUrl": f"{self.server.address}/me/tuned/commit/{COMMIT}",
                    "commitOid": COMMIT,
                    "hookOutput": "",
                }
            )

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        files = self.server.files
        if "/resolve/" in self.path:
            content = files[self.path.partition(f"/resolve/{COMMIT}/")[2]]
            self.answer(content)
        elif "/tree/" in self.path:
            tree = [
                {"type": "file", "path": n, "size": len(c), "oid": etag(c)}
                for n, c in files.items()
            ]
            self.answer(tree)
        else:
            siblings = [{"rfilename": name} for name in files]
            self.answer({"id": "me/tuned", "sha": COMMIT, "siblings": siblings})

    def answer(self, content):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        for name, value in {"ETag": f'"{etag(body)}"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def etag(content):
    return sha1(content).hexdigest()  # noqa: S324 - git's


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.address = {}, f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def trained(tmp_path):
    """A model with everything that a run leaves beside it."""
    path = write_start(tmp_path / "model")
    recipe = {"model": {"base": "Qwen/Qwen2.5-0.5B"}, "stages": [STAGE]}
    provenance = {"recipe": recipe, "stage": "mars"}
    content = {"block_size": 4, "mask_token_id": 263, "provenance": provenance}
    (path / "mars.json").write_text(json.dumps(content))
    history = TrainingHistory([record(2.0), record(0.5)], [held_out()])
    history.write(path / "history.json")
    (path / MANIFEST).write_text(describe_all(path).text)
    points = point("ar", 1.0, 80, 1.0, 1.0), point("threshold", 0.7, 79, 2.5, 4.0)
    write_frontier(path, frontier_of(*points, weights=weights_fingerprint(path), seconds=0.01))
    return path


def test_a_card_says_what_was_trained_and_measured(trained):
    card = model_card(trained, "me/tuned")
    for text in (
        "base_model: Qwen/Qwen2.5-0.5B",
        "marsray serve --model tuned=me/tuned",
        "| steps | 2 |",
        "| tokens | 154 |",
        "| loss of the first and the last step | 2.0000, 0.5000 |",
        "| learning_rate | 0.0002 |",
        "| 1 | 50.0% | 1.00 |",
        "| τ = 0.7 | 79.0% | 2.50 |",
    ):
        assert text in card
    assert str(trained.parent) not in card


def test_a_directory_that_looks_like_a_hub_id_is_not_on_the_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = {"data": {"train": ["rows.jsonl"]}, "stages": [STAGE], "output": "out"}
    recipe = Recipe.model_validate({**content, "model": {"base": "some/base"}})
    for directory, is_named in ((tmp_path / "absent", True), (tmp_path / "some" / "base", False)):
        directory.mkdir(parents=True)
        metadata = {"block_size": 4, "provenance": _provenance(recipe, recipe.stages[0])}
        (tmp_path / "mars.json").write_text(json.dumps(metadata))
        assert ("base_model: some/base" in model_card(tmp_path)) == is_named


def test_a_card_says_how_to_serve_each_kind_of_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    for metadata, command in {
        None: "loras: [{name: tuned, path: tuned}]",
        '{"block_size": 4, "scope": "all"}': "loras: [{name: tuned, path: tuned}]",
        '{"block_size": 4}': "marsray serve --model BASE --adapter tuned",
    }.items():
        if metadata is not None:
            (tmp_path / "mars.json").write_text(metadata)
        assert command in model_card(tmp_path, "me/tuned")


def test_what_is_pushed_is_pulled_and_nothing_else(hub, trained, tmp_path, capsys):
    (trained / ".token").write_text("secret")
    assert run(["push", str(trained), "me/tuned", "--private"]) == 0
    assert hub.created["visibility"] == "private"
    assert ".token" not in hub.files
    assert hub.files["README.md"].decode() == model_card(trained, "me/tuned")
    assert run(["pull", "me/tuned", str(tmp_path / "pulled")]) == 0
    assert "its files match its manifest" in capsys.readouterr().out
    for file in (tmp_path / "pulled").iterdir():
        assert file.read_bytes() == hub.files[file.name]
    assert {file.name for file in (tmp_path / "pulled").iterdir()} == hub.files.keys()
    assert hub.files.keys() - {"README.md"} == {f.name for f in trained.iterdir()} - {".token"}


def test_a_damaged_download_leaves_nothing(hub, trained, tmp_path, capsys):
    run(["push", str(trained), "me/tuned"])
    hub.files["config.json"] = hub.files["config.json"].replace(b"32", b"33")
    assert run(["pull", "me/tuned", str(tmp_path / "pulled")]) == 2
    assert "config.json does not match its checksum" in capsys.readouterr().err
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("more.json", "{}", "more.json is not listed in manifest.json"),
        ("README.md", "s3://me:word@host/data", "has a URL with a password"),
        ("README.md", '"https://host/rows?a=1&X-Amz-Signature=0f"', "password, key or signature"),
    ],
)
def test_unlisted_files_and_passwords_are_not_sent(hub, trained, capsys, name, content, problem):
    (trained / name).write_text(content)
    assert run(["push", str(trained), "me/tuned"]) == 2
    assert problem in capsys.readouterr().err
    assert not hub.files


def test_a_name_that_the_hub_does_not_take_is_told_in_one_line(hub, trained, capsys):
    assert run(["push", str(trained), "not a name"]) == 2
    assert capsys.readouterr().err.startswith("error: not a name: the Hugging Face hub does not ")


def test_a_directory_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(["pull", "someone/model", str(tmp_path / "file" / "model")]) == 2
    assert "file/model cannot be made" in capsys.readouterr().err


def test_a_directory_without_a_model_has_no_card(tmp_path, capsys):
    assert run(["push", str(tmp_path / "absent"), "me/tuned", "--card-only"]) == 2
    assert "holds neither a checkpoint nor an adapter" in capsys.readouterr().err
