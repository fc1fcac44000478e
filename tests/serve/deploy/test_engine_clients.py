"""An ingress follows a model's replicas: real engines behind a stand-in for Ray's handle."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from clusters.local_replicas import ReplicaHandle
from decoding.engine_requests import make_request
from decoding.failing_engines import SlowEngine
from mars_serve.deploy.engine_clients import EngineClients
from mars_serve.engine.ipc.client import EngineClient, EngineDied
from mars_serve.engine.ipc.messages import Condition
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from waiting import soon


@pytest.fixture
async def clients(handle: ReplicaHandle, start) -> AsyncIterator[EngineClients]:
    """Connections that follow the handle; they are closed before the engines end."""
    made = EngineClients(handle, lambda: None)
    made.start()
    yield made
    handle.replicas.clear()
    for client in made._all.values():
        client.stop()
    await soon(lambda: not made._all)


def long_request(name: str, max_tokens: int = 200) -> Request:
    return make_request(name, 5, max_tokens, threshold=1.0)


async def collect(loop: EngineClient, request: Request) -> list[StepOutput]:
    return [output async for output in loop.stream(request)]


async def names(clients: EngineClients, *expected: str) -> None:
    """Wait until exactly these replicas may get requests."""
    await soon(lambda: clients.usable().keys() == set(expected))


async def test_a_replica_that_appears_is_soon_usable(clients, handle, start) -> None:
    assert clients.usable() == {}
    handle.replicas.append(start("a"))
    await names(clients, "a")
    handle.replicas.append(start("b"))
    await names(clients, "a", "b")
    for name, client in clients.usable().items():
        assert len(await collect(client, long_request(name, 3))) == 3


async def test_replicas_are_not_asked_again_while_all_are_connected(clients, handle, start) -> None:
    handle.replicas += [first := start("a"), second := start("b")]
    await names(clients, "a", "b")
    asked = first.num_asked, second.num_asked
    await asyncio.sleep(0.2)
    assert (first.num_asked, second.num_asked) == asked


async def test_a_replica_that_disappears_keeps_its_requests_to_their_end(
    clients, handle, start
) -> None:
    handle.replicas += [leaving := start("a", SlowEngine), start("b")]
    await names(clients, "a", "b")
    client = clients.usable()["a"]
    stream = client.stream(long_request("running", 12))
    await anext(stream)
    handle.replicas.remove(leaving)
    await names(clients, "b")
    assert len([output async for output in stream]) == 11
    await soon(lambda: not client.is_alive)
    assert leaving.loop.is_alive, "only Ray Serve ends replicas"


async def test_a_replica_that_comes_back_in_between_is_usable_again(clients, handle, start) -> None:
    """Ray Serve's handle may forget a replica for a moment."""
    handle.replicas.append(back := start("a", SlowEngine))
    await names(clients, "a")
    client = clients.usable()["a"]
    stream = client.stream(long_request("running", 40))
    await anext(stream)
    handle.replicas.remove(back)
    await names(clients)
    handle.replicas.append(back)
    await names(clients, "a")
    assert clients.usable() == {"a": client}
    await stream.aclose()


async def test_a_dead_engine_is_dropped_and_its_replacement_connected(
    clients, handle, start
) -> None:
    handle.replicas += [dead := start("a"), start("b")]
    await names(clients, "a", "b")
    dead.loop.stop()
    await names(clients, "b")
    handle.replicas[0] = start("c")
    await names(clients, "b", "c")


async def test_an_engine_that_starts_anew_in_a_replica_is_connected_again(
    clients, handle, start
) -> None:
    """The replica keeps its name, and tells another address."""
    handle.replicas.append(replica := start("a"))
    await names(clients, "a")
    before = clients.usable()["a"]
    replica.loop.stop()
    await names(clients)
    replica.reached_at = start("again").loop.address
    await names(clients, "a")
    assert clients.usable()["a"] is not before


async def test_a_question_for_an_address_that_fails_is_asked_again(clients, handle, start) -> None:
    replica = start("a")
    replica.fails = handle.fails = 1
    handle.replicas.append(replica)
    await names(clients, "a")
    assert handle.fails == replica.fails == 0


async def test_a_replica_that_cannot_be_reached_is_tried_again(clients, handle, start) -> None:
    replica = start("a")
    found = replica.reached_at
    replica.reached_at = replace(found, token=bytes(32))
    handle.replicas += [replica, start("b")]
    await names(clients, "b")
    replica.reached_at = found
    await names(clients, "a", "b")


async def test_a_replica_whose_engine_hangs_holds_up_no_other(clients, handle, start) -> None:
    """The system accepts connections for a stopped process, which then says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as hung:
        replica = start("a")
        replica.reached_at = replace(replica.reached_at, port=hung.getsockname()[1])
        handle.replicas.append(replica)
        accepted = await asyncio.to_thread(hung.accept)
        handle.replicas.append(start("b"))
        await names(clients, "b")
        handle.replicas.append(dead := start("c"))
        await names(clients, "b", "c")
        dead.loop.stop()
        await names(clients, "b")
        accepted[0].close()


async def test_a_draining_replica_gets_no_further_requests(clients, handle, start) -> None:
    """It says so itself, also to those that have not sent it any, before Ray Serve's news come."""
    handle.replicas += [draining := start("a", SlowEngine), start("b")]
    await names(clients, "a", "b")
    client = clients.usable()["a"]
    stream = client.stream(long_request("running", 8))
    await anext(stream)
    draining.loop.tell(Condition(is_draining=True))
    await names(clients, "b")
    assert len([output async for output in stream]) == 7
    handle.replicas[1].loop.tell(Condition(is_draining=True))
    await names(clients)


async def test_an_overdue_engine_stays_connected(clients, handle, start) -> None:
    """It may come back; the router prefers others."""
    handle.replicas.append(overdue := start("a"))
    await names(clients, "a")
    client = clients.usable()["a"]
    overdue.loop.tell(Condition(is_overdue=True))
    await soon(lambda: client.is_overdue)
    assert clients.usable() == {"a": client}
    with pytest.raises(EngineDied, match="does not answer"):
        await collect(client, long_request("new"))
    overdue.loop.tell(Condition())
    await soon(lambda: not client.is_overdue)
    assert len(await collect(client, long_request("new", 3))) == 3


async def test_whoever_sends_requests_hears_of_replicas_that_come_and_go(handle, start) -> None:
    changed = asyncio.Event()
    clients = EngineClients(handle, changed.set)
    clients.start()
    handle.replicas.append(replica := start("a"))
    seen = list[set[str]]()
    for expected in ({"a"}, set[str]()):
        while clients.usable().keys() != expected:
            changed.clear()
            await asyncio.wait_for(changed.wait(), 20)
        seen.append(set(clients.usable()))
        handle.replicas.clear()
        replica.loop.stop()
    assert seen == [{"a"}, set()]
    await soon(lambda: not clients._all)
