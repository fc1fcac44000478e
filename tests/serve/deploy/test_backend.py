"""The ingress runs requests on replicas that are slow, fall silent or die; engines are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from clusters.blocked_engines import links_of
from clusters.local_replicas import LocalReplica, ReplicaHandle, StallingProxy
from decoding.engine_requests import make_request
from decoding.failing_engines import ControlledEngine, SlowEngine
from mars_platform.errors import UserError
from mars_serve.config.settings import ModelSettings
from mars_serve.deploy.backend import ReplicaBackend
from mars_serve.engine.ipc import client as engine_client
from mars_serve.engine.ipc import connections
from mars_serve.engine.ipc.client import EngineDied, EngineSilent, QueueFull, QueueTimeout
from mars_serve.engine.ipc.messages import Condition
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from waiting import soon

NUM_TOKENS = 6


@pytest.fixture
async def backend(handle: ReplicaHandle, start) -> AsyncIterator[ReplicaBackend]:
    """A backend without replicas; its connections are closed before the engines end."""
    made = ReplicaBackend(handle, ModelSettings(name="m", path="p"), "app")
    yield made
    handle.replicas.clear()
    clients = made._clients
    for client in clients._all.values():
        client.stop()
    await soon(lambda: not clients._all)


@pytest.fixture
def behind_proxy(start) -> Callable[..., StallingProxy]:
    """Put a proxy before a replica, through which it is reached from now on."""
    made = list[StallingProxy]()

    def put(replica: LocalReplica) -> StallingProxy:
        made.append(StallingProxy(replica.reached_at))
        replica.reached_at = made[-1].address
        return made[-1]

    yield put
    for proxy in made:
        proxy.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times after which an engine counts as overdue and as lost."""
    monkeypatch.setattr(connections, "_BEAT_S", 0.05)
    monkeypatch.setattr(engine_client, "_OVERDUE_S", 0.6)
    monkeypatch.setattr(engine_client, "_SILENT_S", 1.0)
    monkeypatch.setattr(engine_client, "_LOOK_S", 0.05)


def request(name: str = "r", max_tokens: int = NUM_TOKENS, **options: Any) -> Request:
    return make_request(name, 5, max_tokens, **{"threshold": 1.0, **options})


def engine_of(replica: LocalReplica) -> ControlledEngine:
    engine = replica.loop.engine
    assert isinstance(engine, ControlledEngine)
    return engine


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


async def collect(stream: AsyncIterator[StepOutput]) -> list[StepOutput]:
    return [output async for output in stream]


async def expected(start) -> list[int]:
    """Return the tokens that `request` gives."""
    return tokens_of(await collect(start("reference").loop.stream(request())))


def is_free(replica: LocalReplica) -> bool:
    status = replica.loop.engine.status()
    return not status.num_requests and status.num_free_pages == status.num_pages


async def test_a_request_runs_on_a_replica(backend, handle, start) -> None:
    handle.replicas.append(start("a"))
    wanted = await expected(start)
    assert tokens_of(await backend.complete(request())) == wanted
    assert tokens_of(await collect(backend.stream(request()))) == wanted


async def test_a_request_waits_for_the_first_replica(backend, handle, start) -> None:
    running = asyncio.create_task(backend.complete(request(max_queue_s=60.0)))
    await asyncio.sleep(0.1)
    handle.replicas.append(start("a"))
    assert len(tokens_of(await running)) == NUM_TOKENS


async def test_a_replica_that_sends_signs_of_life_may_be_slow(
    backend, handle, start, short
) -> None:
    """Its step takes more than twice as long as a replica may be silent."""
    handle.replicas.append(slow := start("slow"))
    engine_of(slow).may_step.clear()
    running = asyncio.create_task(collect(backend.stream(request())))
    await asyncio.wait([running], timeout=2.5)
    assert not running.done()
    engine_of(slow).may_step.set()
    assert len(tokens_of(await running)) == NUM_TOKENS
    assert engine_of(slow).sent == [((), 0)]


async def test_a_request_that_waits_at_a_silent_replica_moves(
    backend, handle, start, behind_proxy, short
) -> None:
    handle.replicas.append(silent := start("silent"))
    other = start("other")  # before the proxy stalls, since it may take longer than the patience
    proxy = behind_proxy(silent)
    await backend.complete(request("first"))
    proxy.stall()
    waiting = asyncio.create_task(collect(backend.stream(request())))
    await soon(lambda: links_of(backend)[0].num_requests)
    handle.replicas.append(other)
    assert tokens_of(await waiting) == await expected(start)
    assert engine_of(other).sent == [(("silent",), 0)]
    assert engine_of(other).received[0].id == "r/1", "the silent one may still have the request"


async def test_a_begun_request_without_output_moves_from_a_silent_replica_unsuspected(
    backend, handle, start, behind_proxy, short
) -> None:
    """No step is to blame if a host loses power."""
    handle.replicas.append(silent := start("silent"))
    proxy = behind_proxy(silent)
    await backend.complete(request("first"))
    engine_of(silent).may_step.clear()
    waiting = asyncio.create_task(collect(backend.stream(request())))
    await soon(lambda: silent.loop.engine.status().num_running)
    await asyncio.sleep(0.1)  # the announcement of the step passes the proxy
    proxy.stall()
    handle.replicas.append(other := start("other"))
    assert tokens_of(await waiting) == await expected(start)
    assert engine_of(other).sent == [(("silent",), 0)]


async def test_a_request_with_output_fails_if_its_replica_falls_silent(
    backend, handle, start, behind_proxy, short
) -> None:
    handle.replicas.append(silent := start("silent", SlowEngine))
    proxy = behind_proxy(silent)
    stream = backend.stream(request(max_tokens=200))
    assert (await anext(stream)).tokens
    handle.replicas.append(other := start("other"))
    proxy.stall()
    with pytest.raises(EngineSilent, match="silent") as failed:
        await collect(stream)
    assert failed.value.had_begun
    assert engine_of(other).sent == []
    proxy.resume()
    await soon(lambda: is_free(silent))


async def test_an_unfinished_whole_response_is_requested_again(
    backend, handle, start, behind_proxy, short
) -> None:
    """The client has seen none of its outputs."""
    handle.replicas.append(silent := start("silent", SlowEngine))
    proxy = behind_proxy(silent)
    running = asyncio.create_task(backend.complete(request(max_tokens=60)))
    await soon(lambda: silent.loop.engine.status().num_generated_tokens > 2)
    proxy.stall()
    handle.replicas.append(start("other"))
    outputs = await running
    assert {output.request_id for output in outputs} == {"r/1"}
    assert len(tokens_of(outputs)) == 60


async def test_a_request_is_given_up_after_its_longest_queue_time(
    backend, handle, start, behind_proxy, short
) -> None:
    with pytest.raises(QueueTimeout, match=r"no replica began the request within 0\.1 s"):
        await backend.complete(request(max_queue_s=0.1))
    handle.replicas.append(silent := start("silent"))
    other = start("other")  # before the proxy stalls, since it may take longer than the patience
    engine_of(other).may_step.clear()
    proxy = behind_proxy(silent)
    await backend.complete(request("first"))
    proxy.stall()
    waiting = asyncio.create_task(backend.complete(request(max_queue_s=0.3)))
    await soon(lambda: links_of(backend)[0].num_requests)
    handle.replicas.append(other)
    with pytest.raises(QueueTimeout, match=r"no replica began the request within 0\.3 s"):
        await waiting
    assert engine_of(other).sent == [], "it had waited for longer than that already"


async def test_a_replica_ends_a_wait_that_is_too_long(backend, handle, start) -> None:
    handle.replicas.append(busy := start("busy", SlowEngine, max_num_seqs=1))
    stream = backend.stream(request("running", 200))
    await anext(stream)
    (client,) = backend._clients.usable().values()
    with pytest.raises(QueueTimeout, match=r"did not begin within 0\.2 s"):
        _ = [each async for each in client.stream(request(max_queue_s=0.2))]  # past the queue
    await stream.aclose()
    await soon(lambda: is_free(busy))


async def known(backend: ReplicaBackend, *replicas: str) -> None:
    """Wait until a backend can send requests to exactly these replicas."""
    backend._clients.start()
    await soon(lambda: backend._clients.usable().keys() == set(replicas))


def death_between_steps(replica: LocalReplica) -> LocalReplica:
    """Let an engine die before a request's first step."""
    engine_of(replica).fails_between_steps = True
    return replica


def death_in_step(replica: LocalReplica, num_outputs: int = 0) -> LocalReplica:
    """Let an engine die in a step after some outputs."""
    engine_of(replica).fails_after = num_outputs
    return replica


async def test_a_request_that_waited_is_sent_elsewhere_twice_when_engines_die(
    backend, handle, start
) -> None:
    dying = [death_between_steps(start(name)) for name in "ab"]
    handle.replicas += dying
    await known(backend, "a", "b")
    running = asyncio.create_task(backend.complete(request()))
    await known(backend)
    handle.replicas.append(sound := start("c"))
    assert tokens_of(await running) == await expected(start)
    first, second = sorted(dying, key=lambda each: len(engine_of(each).sent[0][0]))
    assert engine_of(first).sent == [((), 0)]
    assert engine_of(second).sent == [((first.name,), 0)]
    assert engine_of(sound).sent == [((first.name, second.name), 0)]
    ids = [engine_of(each).received[0].id for each in (first, second, sound)]
    assert ids == ["r", "r/1", "r/1/2"]


async def test_a_request_is_given_up_after_three_dead_engines(backend, handle, start) -> None:
    dying = [death_between_steps(start(name)) for name in "abc"]
    handle.replicas += dying
    await known(backend, "a", "b", "c")
    with pytest.raises(EngineDied):
        await backend.complete(request())
    assert sorted(len(engine_of(each).sent[0][0]) for each in dying) == [0, 1, 2]


async def test_a_request_of_a_fatal_step_is_tried_once_more_alone(backend, handle, start) -> None:
    """Nobody knows how many tokens of a whole response there were, so it runs alone to its end."""
    handle.replicas.append(death_in_step(start("a"), num_outputs=3))
    running = asyncio.create_task(backend.complete(request()))
    await soon(lambda: not handle.replicas[0].loop.is_alive)
    handle.replicas.append(sound := start("b"))
    assert tokens_of(await running) == await expected(start)
    assert engine_of(sound).sent == [(("a",), NUM_TOKENS)]


async def test_a_request_that_ends_two_engines_is_given_up(backend, handle, start) -> None:
    handle.replicas.append(death_in_step(start("a")))
    running = asyncio.create_task(collect(backend.stream(request())))
    await soon(lambda: not handle.replicas[0].loop.is_alive)
    handle.replicas += [death_in_step(second := start("b"))]
    await soon(lambda: not second.loop.is_alive)
    handle.replicas.append(third := start("c"))
    with pytest.raises(EngineDied):
        await running
    assert engine_of(second).sent == [(("a",), 1)]
    await known(backend, "c")
    assert engine_of(third).sent == []


async def test_a_stream_that_has_begun_is_not_begun_again(backend, handle, start) -> None:
    handle.replicas.append(death_in_step(start("a"), num_outputs=2))
    stream = backend.stream(request())
    assert (await anext(stream)).tokens
    handle.replicas.append(other := start("b"))
    with pytest.raises(EngineDied):
        await collect(stream)
    await known(backend, "b")
    assert engine_of(other).sent == []


async def test_an_overdue_engine_gives_back_what_waits_and_keeps_what_runs(
    backend, handle, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_LOOK_S", 0.05)
    handle.replicas.append(overdue := start("a", max_num_seqs=2))
    running = backend.stream(request("running"))
    await anext(running)
    engine_of(overdue).may_step.clear()
    await soon(engine_of(overdue).hangs.is_set)  # the next step would begin what waits
    waiting = asyncio.create_task(backend.complete(request()))
    await soon(lambda: len(engine_of(overdue).received) == 2)
    handle.replicas.append(other := start("b"))
    await known(backend, "a", "b")
    overdue.loop.tell(Condition(is_overdue=True))
    assert tokens_of(await waiting) == await expected(start)
    assert engine_of(other).sent == [(("a",), 0)]
    engine_of(overdue).may_step.set()
    assert len(tokens_of(await collect(running))) == NUM_TOKENS - 1
    await soon(lambda: is_free(overdue))


async def test_other_errors_end_a_request(backend, handle, start) -> None:
    """Another replica would only say the same, or get the load of one that is full."""
    replicas = [start(name, max_requests=1) for name in "ab"]
    handle.replicas += replicas
    await known(backend, "a", "b")
    for call in (backend.complete, lambda each: collect(backend.stream(each))):
        with pytest.raises(UserError, match=r"^max_tokens: "):
            await call(request(max_tokens=10_000))
    assert sum(len(engine_of(each).sent) for each in replicas) == 2
    # an engine whose step hangs gives no credit back
    await soon(lambda: all(client.credit.num_free for client in links_of(backend)))
    for replica in replicas:
        engine_of(replica).may_step.clear()
    running = [asyncio.create_task(backend.complete(request(name))) for name in ("one", "two")]
    await soon(lambda: all(each.loop.engine.status().num_running for each in replicas))
    with pytest.raises(QueueFull):
        await backend.complete(request())
    for replica in replicas:
        engine_of(replica).may_step.set()
    await asyncio.gather(*running)
