from __future__ import annotations

import asyncio

from mars_serve.governor import Governor
from mars_serve.served import LiveThreshold

START = LiveThreshold(0, 0.95)


async def test_a_waiting_replica_hears_at_once() -> None:
    governor = Governor()
    waiting = [asyncio.create_task(governor.wait("m", START)) for _ in range(3)]
    await asyncio.sleep(0)
    changed = await governor.set("m", 0.8)
    assert await asyncio.gather(*waiting) == [changed] * 3
    assert changed.threshold == 0.8
    assert await governor.value("m", START) == changed


async def test_a_replica_that_missed_a_change_gets_it_without_waiting() -> None:
    governor = Governor()
    await governor.set("m", 0.8)
    last = await governor.set("m", 0.7)
    assert await governor.wait("m", START) == last


async def test_waiting_ends_with_what_was_known() -> None:
    assert await Governor().wait("m", START, timeout_s=0) == START


async def test_models_are_kept_apart() -> None:
    governor = Governor()
    waiting = asyncio.create_task(governor.wait("other", START, timeout_s=0.05))
    await governor.set("m", 0.8)
    assert await waiting == START


async def test_versions_grow_with_each_change() -> None:
    governor = Governor()
    versions = [(await governor.set("m", 0.5)).version for _ in range(50)]
    assert versions == sorted(set(versions))


async def test_a_new_governor_learns_from_its_replicas_and_tells_the_others() -> None:
    known = await Governor().set("m", 0.6)
    successor = Governor()
    late = asyncio.create_task(successor.wait("m", START))
    await asyncio.sleep(0)
    assert await successor.wait("m", known, timeout_s=0) == known
    assert await late == known


async def test_a_change_at_a_new_governor_wins_over_what_replicas_remember() -> None:
    known = await Governor().set("m", 0.6)
    successor = Governor()
    changed = await successor.set("m", 0.7)
    assert await successor.wait("m", known) == changed
