"""Replicas that end while requests wait before them and others."""

from __future__ import annotations

import asyncio

from clusters.local_replicas import ReplicaHandle
from decoding.engine_requests import make_request
from decoding.failing_engines import SlowEngine
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
    await soon(lambda: sum(loop.activity.load.totals.arrived for loop in loops) == 20)
