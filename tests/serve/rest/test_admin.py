from __future__ import annotations

import asyncio
from typing import Any

import pytest


@pytest.fixture
async def client(client: Any) -> Any:
    yield client
    await client.put("/admin/threshold", json={"confidence_threshold": 0.95})


async def test_a_change_of_all_models(client: Any) -> None:
    before = (await client.get("/admin/threshold")).json()["models"]
    after = (await client.put("/admin/threshold", json={"confidence_threshold": 0.7})).json()
    assert after == (await client.get("/admin/threshold")).json()
    for name in ("mars", "plain"):
        live = after["models"][name]
        assert live["confidence_threshold"] == 0.7
        assert live["version"] > before[name]["version"]
        state = {"confidence_threshold": 0.7, "version": live["version"]}
        assert live["replicas"] == {"only": state}


async def test_a_change_of_one_model(client: Any) -> None:
    body = {"model": "mars", "confidence_threshold": 0.6}
    changed = (await client.put("/admin/threshold", json=body)).json()["models"]
    assert changed.keys() == {"mars"}
    states = (await client.get("/admin/threshold")).json()["models"]
    assert states["mars"] == changed["mars"]
    assert states["plain"]["confidence_threshold"] == 0.95


async def test_running_requests_follow_down_to_their_floor(client: Any) -> None:
    body = {"model": "mars", "prompt": "What is 3", "max_tokens": 120, "logit_bias": {"2": -100}}
    body["service_tier"] = "flex"  # its floor is 0.7
    running = asyncio.create_task(client.post("/v1/completions", json=body))
    for threshold in (1.0, 0.01, 1.0, 0.01):
        await client.put("/admin/threshold", json={"confidence_threshold": threshold})
        await asyncio.sleep(0.01)
    mars = (await running).json()["mars"]
    assert mars["min_confidence_threshold"] == 0.7
    assert 0.7 < mars["confidence_threshold"] < 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"confidence_threshold": 0}, 400, "confidence_threshold"),
        ({"confidence_threshold": 1.01}, 400, "confidence_threshold"),
        ({"confidence_threshold": None}, 400, "confidence_threshold"),
        ({}, 400, "confidence_threshold"),
        ({"confidence_threshold": 0.5, "model": "nobody"}, 404, "model"),
        ({"confidence_threshold": 0.5, "models": "mars"}, 400, "models"),
    ],
)
async def test_refused(client: Any, body: dict[str, Any], status: int, param: str) -> None:
    response = await client.put("/admin/threshold", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert error["message"].startswith(f"{param}: ")
    states = (await client.get("/admin/threshold")).json()["models"]
    assert {state["confidence_threshold"] for state in states.values()} == {0.95}
