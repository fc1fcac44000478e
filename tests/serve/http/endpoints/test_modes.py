from __future__ import annotations

from typing import Any

import pytest

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.method.mode import LiveDecoding
from rest.rest_requests import BODIES, COMPLETION, COMPLETIONS
from rest.rest_server import SingleEngineBackend, app_of, client_of, served


@pytest.mark.parametrize(
    ("fields", "mode", "threshold"),
    [
        ({}, "threshold", 0.95),
        ({"confidence_threshold": 0.1, "min_confidence_threshold": 0.6}, "threshold", 0.6),
        ({"min_confidence_threshold": 0.99}, "threshold", 0.99),
        ({"mode": "exact"}, "exact", 1.0),
        ({"mode": "ar", "confidence_threshold": 0.2}, "ar", 1.0),
        ({"model": "plain"}, "ar", 1.0),
    ],
)
async def test_the_response_reports_the_effective_mode_and_threshold(
    client, fields, mode, threshold
):
    summary = (await client.answer(COMPLETIONS, {**COMPLETION, **fields}))["mars"]
    assert (summary["mode"], summary["confidence_threshold"]) == (mode, threshold)
    if mode == "ar":
        assert summary["forward_passes"] == 24


# Tiers


@pytest.mark.parametrize(
    ("tier", "used", "mode"),
    [
        ("auto", "default", "threshold"),
        ("default", "default", "threshold"),
        ("flex", "flex", "threshold"),
        ("priority", "priority", "exact"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_the_response_reports_the_tier(client, path, tier, used, mode):
    body = {**BODIES[path], "service_tier": tier}
    answer = await client.answer(path, body)
    assert (answer["service_tier"], answer["mars"]["mode"]) == (used, mode)
    events = await client.events(path, body)
    assert {event["service_tier"] for event in events} == {used}


# The server's own threshold


@pytest.fixture
def governed(make_loop: Any, mars: Checkpoint) -> Any:
    """Return a backend whose live threshold a test may change."""
    return SingleEngineBackend(make_loop(mars))


async def test_requests_follow_the_servers_threshold_down_to_their_floors(governed, mars):
    tiers = {"default_min_threshold": 0.3, "flex_min_threshold": 0.05}
    async with client_of(app_of(served("mars", mars, governed, tiers=tiers))) as client:

        async def used(**fields: Any) -> float:
            answer = await client.answer(COMPLETIONS, {**COMPLETION, **fields})
            assert "min_confidence_threshold" not in answer["mars"]
            return answer["mars"]["confidence_threshold"]

        for live, expected in [(0.95, 0.95), (0.1, 0.3), (1.0, 1.0)]:
            await governed.set_live_threshold(live)
            assert await used() == expected
        await governed.set_live_threshold(0.01)
        assert await used(service_tier="flex") == 0.05
        assert await used(service_tier="flex", min_confidence_threshold=0.2) == 0.2
        assert await used(min_confidence_threshold=0.2) == 0.3
        assert await used(confidence_threshold=0.02) == 0.02
        assert await used(mode="exact") == 1.0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_response_reports_mean_and_minimum_of_a_moving_threshold(governed, mars, stream):
    """The threshold moves from 1 to 0.5 after the first five passes."""
    engine, steps = governed.loop.engine, 0
    step = engine.begin_step

    def counting() -> Any:
        nonlocal steps
        steps += 1
        if steps == 6:
            engine.live = LiveDecoding(0.5)  # a message might arrive later
        return step()

    engine.begin_step = counting
    governed.loop.set_live(LiveDecoding(1.0))
    tiers = {"default_min_threshold": 0.01}
    async with client_of(app_of(served("mars", mars, governed, tiers=tiers))) as client:
        if stream:
            found = (await client.events(COMPLETIONS, COMPLETION))[-1]["mars"]
        else:
            found = (await client.answer(COMPLETIONS, COMPLETION))["mars"]
    passes = found["forward_passes"]
    assert found["min_confidence_threshold"] == 0.5
    mean = (5 * 1.0 + (passes - 5) * 0.5) / passes
    assert found["confidence_threshold"] == pytest.approx(mean, abs=1e-6)
