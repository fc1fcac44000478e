"""LoRA adapters by name over HTTP: listed, loaded, served beside the model, and unloaded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.adapters import add_mask_row, with_lora
from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.adapted import with_lora_masks
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_serve.config.loras import LoraNames
from mars_serve.control.governor import Governor
from mars_serve.engine.request import LoraReference
from mars_serve.http.endpoints import loras
from mars_serve.http.middleware.authentication import LOAD_LORA as LOAD
from mars_serve.http.middleware.authentication import UNLOAD_LORA as UNLOAD
from rest.rest_requests import PROMPT
from rest.rest_server import ENGINE, Client, SingleEngineBackend, app_of, client_of, served


@pytest.fixture(autouse=True)
def _heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loras, "HEARD_S", 0.0)


@pytest.fixture
def model(mars_dir: Path, tmp_path: Path, make_loop: Callable[..., LocalEngineClient]) -> Any:
    """A model with one adapter of its settings, and a directory for others."""
    base = load_model(mars_dir)
    for index, name in enumerate(("one", "two", "again")):
        with_lora(base, tmp_path / "allowed" / name, seed=index)
    with_lora(base, tmp_path / "elsewhere")
    checkpoint = read_checkpoint(mars_dir)
    loop = make_loop(checkpoint, max_loras=2)
    engine = ENGINE.model_copy(update={"max_loras": 2})
    found = served(
        "mars", checkpoint, SingleEngineBackend(loop), lora_directories=[str(tmp_path / "allowed")]
    )
    found = replace(found, settings=found.settings.model_copy(update={"engine": engine}))
    own = found.read_lora("own", tmp_path / "allowed" / "one")
    return replace(found, loras=LoraNames({"own": own}))


async def text_of(client: Client, model: str, **options: Any) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "mode": "ar", **options}
    answer = await client.answer("/v1/completions", body)
    assert answer["model"] == model
    text: str = answer["choices"][0]["text"]
    return text


async def test_adapters_are_named_like_models_and_come_and_go_while_the_server_runs(
    model: Any, tmp_path: Path
) -> None:
    async with client_of(app_of(model)) as client:
        plain, own = await text_of(client, "mars"), await text_of(client, "own")
        added = await client.post(
            LOAD, json={"lora_name": "new", "lora_path": str(tmp_path / "allowed" / "two")}
        )
        assert (added.status_code, added.text) == (
            200,
            "Success: LoRA adapter 'new' added successfully.",
        )
        new = await text_of(client, "new")
        assert len({plain, own, new}) == 3
        assert await text_of(client, "own", mode="exact") == own
        entries = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"]) for each in entries] == [
            ("mars", None),
            ("own", "mars"),
            ("new", "mars"),
        ]
        again = {"lora_name": "new", "lora_path": str(tmp_path / "allowed" / "again")}
        assert "already been loaded" in await client.refusal(LOAD, again, 400, "lora_name")
        assert (await client.post(LOAD, json={**again, "load_inplace": True})).status_code == 200
        assert await text_of(client, "new") not in (plain, own, new)
        model.backend.governor = Governor()  # one that was started again knows nothing
        removed = await client.post(UNLOAD, json={"lora_name": "own"})
        assert removed.text == "Success: LoRA adapter 'own' removed successfully."
        await client.refusal("/v1/completions", {"model": "own", "prompt": PROMPT}, 404, "model")
        assert (await client.get("/v1/models/own")).status_code == 404
        assert (await client.get("/v1/models/new")).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 'marsray_lora_requests_total{lora="own",model="mars",replica="ingress"} 2.0' in metrics


async def test_an_unloaded_name_makes_room_for_another(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "MOST_LORAS", 2)
    path = str(tmp_path / "allowed" / "two")
    async with client_of(app_of(model)) as client:
        for step in range(3):
            await client.post(LOAD, json={"lora_name": f"step-{step}", "lora_path": path})
            assert list(model.loras.current) == ["own", f"step-{step}"]
            more = {"lora_name": "more", "lora_path": path}
            assert "unload one first" in await client.refusal(LOAD, more, 400, "lora_name")
            await client.post(UNLOAD, json={"lora_name": f"step-{step}"})
        await client.post(UNLOAD, json={"lora_name": "own"})
    assert model.loras.changes.loras == {"own": None}


async def test_of_two_ingress_replicas_one_loads_a_name(model: Any, tmp_path: Path) -> None:
    others = replace(model, loras=LoraNames())
    bodies = [
        {"lora_name": "new", "lora_path": str(tmp_path / "allowed" / each)}
        for each in ("two", "again")
    ]
    async with client_of(app_of(model)) as one, client_of(app_of(others)) as other:
        answers = await asyncio.gather(
            *(
                client.post(LOAD, json=body)
                for client, body in zip((one, other), bodies, strict=True)
            )
        )
        assert sorted(each.status_code for each in answers) == [200, 400]
        (loaded,) = (body for body, each in zip(bodies, answers, strict=True) if each.is_success)
        (refused,) = (each for each in answers if not each.is_success)
        assert "already been loaded" in one.error_of(refused, 400, "lora_name")
        assert model.loras.current["new"] == others.loras.current["new"]
        assert model.loras.current["new"].path == loaded["lora_path"]


async def test_a_change_that_a_governor_took_along_is_told(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "HEARD_S", 0.1)
    body = {"lora_name": "new", "lora_path": str(tmp_path / "allowed" / "two")}
    async with client_of(app_of(model)) as client:
        loading = asyncio.create_task(client.post(LOAD, json=body))
        while "new" not in model.loras.current:
            await asyncio.sleep(0.001)
        model.backend.governor = Governor()
        other = LoraNames().with_change("other", model.loras.current["own"])
        assert await model.backend.loras(other) == other
        assert "ask again" in client.error_of(await loading, 503, "lora_name")
        assert list(model.loras.current) == ["own", "other"]
        assert (await client.post(LOAD, json=body)).status_code == 200


async def test_what_may_not_be_loaded_is_refused(model: Any, tmp_path: Path) -> None:
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "elsewhere")
    async with client_of(app_of(model)) as client:
        for path in ("elsewhere", "allowed/../elsewhere", "allowed/link", "allowed/absent"):
            body = {"lora_name": "new", "lora_path": str(tmp_path / path)}
            assert "lora_directories" in await client.refusal(LOAD, body, 400, "lora_path")
        for name, message in {"mars": "is called 'mars'", "own": "already been loaded"}.items():
            body = {"lora_name": name, "lora_path": str(tmp_path / "allowed" / "two")}
            assert message in await client.refusal(LOAD, body, 400, "lora_name")
        (tmp_path / "allowed" / "two" / "adapter_model.safetensors").write_bytes(b"none")
        body = {"lora_name": "new", "lora_path": str(tmp_path / "allowed" / "two")}
        assert "cannot be read" in await client.refusal(LOAD, body, 400, "lora_path")
        os.truncate(tmp_path / "allowed" / "two" / "adapter_model.safetensors", 1 << 25)
        assert "at most; save it" in await client.refusal(LOAD, body, 400, "lora_path")
        (tmp_path / "allowed" / "two" / "adapter_model.safetensors").unlink()
        os.mkfifo(tmp_path / "allowed" / "two" / "adapter_model.safetensors")
        assert "holds no file adapter_model" in await client.refusal(LOAD, body, 400, "lora_path")
        assert "cannot be found" in await client.refusal(UNLOAD, {"lora_name": "new"}, 404, None)
        assert len((await client.get("/v1/models")).json()["data"]) == 2
    async with client_of(app_of(model, host="192.0.2.1", insecure=True)) as client:
        for path in (LOAD, UNLOAD):
            body = {"lora_name": "own", "lora_path": "b"}
            assert "no administrator" in await client.refusal(path, body, 403, None)


async def test_an_adapter_with_masks_drafts_on_a_model_that_has_none(
    full_dir: Path, tmp_path: Path, make_loop: Callable[..., LocalEngineClient]
) -> None:
    """The mask's id lies past the model's vocabulary."""
    base = load_model(full_dir)
    for name in ("own", "plain"):
        with_lora(base, tmp_path / name)
    add_mask_row(full_dir, tmp_path / "own", torch.randn(base.config.hidden_size))
    checkpoint = with_lora_masks(read_checkpoint(full_dir), [tmp_path / "plain", tmp_path / "own"])
    backend = SingleEngineBackend(make_loop(checkpoint, max_loras=2))
    model = served("mars", checkpoint, backend, mode=None)
    adapters = {name: LoraReference.to(name, tmp_path / name) for name in ("own", "plain")}
    model = replace(model, checkpoint=checkpoint, loras=LoraNames(adapters))
    body = {"prompt": PROMPT, "max_tokens": 24}
    low = {"mode": "threshold", "confidence_threshold": 0.01, "min_confidence_threshold": 0.01}
    async with client_of(app_of(model)) as client:
        for name in ("mars", "plain"):
            answer = await client.answer("/v1/completions", {**body, "model": name})
            assert answer["mars"]["mode"] == "ar"
            refused = {**body, **low, "model": name}
            assert "plain AR" in await client.refusal("/v1/completions", refused, 400, "mode")
        ar = await text_of(client, "own", max_tokens=24)
        exact = await client.answer("/v1/completions", {**body, "model": "own"})
        assert exact["mars"]["mode"] == "exact"
        assert exact["choices"][0]["text"] == ar
        assert ar == await text_of(client, "plain", max_tokens=24)
        fast = await client.answer("/v1/completions", {**body, **low, "model": "own"})
        assert fast["mars"]["forward_passes"] < 24
