"""A served model with an adapter: the base model's text in modes ar and exact, and its description.

The mask's id lies past the base model's vocabulary, as with a model without a spare row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decoding.adapters import write_adapter
from decoding.local_engine_client import LocalEngineClient
from mars_platform.checkpoint.adapted import read_model
from rest.rest_requests import PROMPT
from rest.rest_server import SingleEngineBackend, app_of, client_of, served


@pytest.fixture
def models(
    full_dir: Path, tmp_path: Path, make_loop: Callable[..., LocalEngineClient]
) -> list[Any]:
    adapter = write_adapter(full_dir, tmp_path / "adapter")
    checkpoints = {"base": read_model(full_dir), "fast": read_model(full_dir, adapter)}
    metadata = checkpoints["fast"].metadata
    assert metadata is not None
    assert metadata.mask_token_id == checkpoints["base"].config.vocab_size
    return [
        served(name, each, SingleEngineBackend(make_loop(each, batch_invariant=True)))
        for name, each in checkpoints.items()
    ]


async def test_the_base_models_text_is_served_in_fewer_passes(models: list[Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "logprobs": 1}
    async with client_of(app_of(*models)) as client:

        async def complete(model: str, **more: Any) -> dict[str, Any]:
            response = await client.post("/v1/completions", json={**body, "model": model, **more})
            assert response.status_code == 200, response.text
            found: dict[str, Any] = response.json()
            return found

        alone = await complete("base", mode="ar")
        ar, exact = [await complete("fast", mode=mode) for mode in ("ar", "exact")]
        low = await complete(
            "fast", mode="threshold", confidence_threshold=0.02, min_confidence_threshold=0.02
        )
        schema = {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "integer"}},
        }
        number = await complete("fast", mode="exact", response_format=schema, logprobs=None)
        mask = await client.post(
            "/v1/completions",
            json={**body, "model": "fast", "prompt": [5, models[1].checkpoint.config.vocab_size]},
        )
    assert ar["choices"] == alone["choices"]  # log-probabilities to the last bit
    assert exact["choices"][0]["text"] == alone["choices"][0]["text"]
    assert low["mars"]["forward_passes"] < ar["mars"]["forward_passes"] == 24
    assert number["choices"][0]["text"].lstrip("-").isdigit()
    assert "is the mask, which no prompt may contain" in mask.json()["error"]["message"]


async def test_models_and_about_name_the_adapter(models: list[Any]) -> None:
    async with client_of(app_of(*models)) as client:
        entries = (await client.get("/v1/models")).json()["data"]
        about = (await client.get("/v1/about", params={"model": "fast"})).json()
    assert [each["mars"]["adapter"] for each in entries] == [None, "adapter"]
    assert set(entries[1]["mars"]["modes"]) == set(about["modes"]) == {"ar", "threshold", "exact"}
    assert (about["adapter"], about["block_size"]) == ("adapter", 4)
    assert about["missing"]["frontier"].startswith("frontier.json: ")
    assert str(models[1].checkpoint.adapter.path.parent) not in f"{entries}{about}"
