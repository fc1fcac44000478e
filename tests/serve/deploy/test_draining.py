"""Replicas that end while requests wait before them and others."""

from __future__ import annotations

import asyncio

from clusters.local_replicas import ReplicaHandle
from decoding.engine_requests import make_request
from decoding.failing_engines import ControlledEngine, SlowEngine
from mars_serve.config.settings import ModelSettings
from mars_serve.deploy.backend import ReplicaBackend
from mars_serve.engine.ipc.messages import Condition
from waiting import soon


async def test_a_replica_drains_though_requests_wait_for_others(start) -> None:
    """It ends once it reports no requests, so it must not count those that it will not get."""
    replicas = [start(name, SlowEngine, max_num_seqs=1) for name in "ab"]
    backend = ReplicaBackend(ReplicaHandle(*replicas), ModelSettings(name="m", path="p"), "app")
    backend._links.start()
    await soon(lambda: len(backend._links.usable()) == 2)
    requests = [make_request(f"{index}", 5, 12, threshold=1.0) for index in range(20)]
    running = [asyncio.create_task(backend.complete(each)) for each in requests]
    ending, staying = (replica.loop for replica in replicas)
    await soon(lambda: ending.status().num_waiting > 4)
    ending.tell(Condition(is_draining=True))
    await soon(lambda: not ending.status().num_requests)
    assert staying.status().num_waiting > 4, "they wait for the other one"
    assert len(backend._queue) > 4
    outputs = await asyncio.gather(*running)
    assert [sum(len(each.tokens) for each in output) for output in outputs] == [12] * 20
    loops = (ending, staying)
    await soon(lambda: sum(loop.activity.load.counts.arrived for loop in loops) == 20)


async def test_requests_that_find_an_engine_gone_are_sent_elsewhere_once(start) -> None:
    """The event loop does not learn of the engine's end before they try it."""
    dying, sound = (start(name, max_num_seqs=2) for name in "ab")
    backend = ReplicaBackend(ReplicaHandle(dying, sound), ModelSettings(name="m", path="p"), "app")
    backend._links.start()
    await soon(lambda: len(backend._links.usable()) == 2)
    await soon(lambda: all(link.credit.limit for link in backend._links.usable().values()))
    assert isinstance(dying.loop.engine, ControlledEngine)
    dying.loop.engine.fails_between_steps = True
    dying.loop.stop()
    sent = [make_request(f"{index}", 5, 1, threshold=1.0) for index in range(20)]
    outputs = await asyncio.gather(*(backend.complete(each) for each in sent))
    assert all(len(each) == 1 for each in outputs)
    assert max(each.num_moves for each in sent) == 1
