from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mars_autoscale.model.step_times import StepTimes
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


async def test_without_settings_the_output_is_that_of_one_token_decoding(make_loop, mars):
    backend = SingleEngineBackend(make_loop(mars))
    async with client_of(app_of(served("mars", mars, backend, mode=None))) as client:
        plain = await client.answer(COMPLETIONS, {**COMPLETION, "mode": "ar"})
        usual = await client.answer(COMPLETIONS, COMPLETION)
        assert usual["mars"]["mode"] == "exact"
        assert usual["choices"][0]["text"] == plain["choices"][0]["text"]
        asked = await client.answer(COMPLETIONS, {**COMPLETION, "confidence_threshold": 0.02})
        assert (asked["mars"]["mode"], asked["mars"]["confidence_threshold"]) == ("threshold", 0.02)
        assert asked["choices"][0]["text"] != plain["choices"][0]["text"]
        about = (await client.get("/v1/about", params={"model": "mars"})).json()
        assert about["mode"] == "exact"


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


# Windows

IDLE = StepTimes((1, 4096), (0,), ((1.0,), (1.0,)))
BUSY = StepTimes((1, 4096), (0,), ((0.001,), (4.096,)))
"""Times of a machine on which masks cost nothing, and of one on which they never pay."""
LOW = {"mode": "threshold", "confidence_threshold": 0.02}


@pytest.mark.parametrize(
    ("fields", "is_pinned"),
    [({}, False), ({"window": 3}, True), ({"temperature": 0.7, "seed": 5}, True)],
)
async def test_with_a_pinned_window_the_output_depends_on_no_time_and_no_neighbour(
    make_loop, mars, fields, is_pinned
):
    backend, found = SingleEngineBackend(make_loop(mars)), set()
    body = {**COMPLETION, **LOW, **fields}
    others = [{**COMPLETION, **LOW, "prompt": f"{number} is"} for number in range(3)]
    async with client_of(app_of(served("mars", mars, backend))) as client:
        for times in (IDLE, BUSY):
            backend.engine.engine.adapt_windows(times)
            beside = [asyncio.create_task(client.answer(COMPLETIONS, each)) for each in others]
            answer = await client.answer(COMPLETIONS, body)
            await asyncio.gather(*beside)
            found.add((answer["choices"][0]["text"], answer["mars"]["forward_passes"]))
            events = await client.events(COMPLETIONS, body)
            text = "".join(each["choices"][0]["text"] for each in events)
            found.add((text, events[-1]["mars"]["forward_passes"]))
    assert (len(found) == 1) == is_pinned, found


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
    engine, steps = governed.engine.engine, 0
    step = engine.begin_step

    def counting() -> Any:
        nonlocal steps
        steps += 1
        if steps == 6:
            engine.live = LiveDecoding(0.5)  # a message might arrive later
        return step()

    engine.begin_step = counting
    governed.engine.set_live(LiveDecoding(1.0))
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
