"""The queue before the replicas, on real engines and connections."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from clusters.blocked_engines import (
    block,
    engine_of,
    ids_at,
    links_of,
    request,
    spawn,
    spawn_waiting,
    unblock,
)
from clusters.local_replicas import LocalReplica, ReplicaHandle
from decoding.failing_engines import SlowEngine
from decoding.grammar_specs import regex
from mars_autoscale.queueing.estimate import LateRule
from mars_autoscale.queueing.grants import reserve_of
from mars_platform.tier import Tier
from mars_serve.config.settings import AutoscalingSettings, ModelSettings
from mars_serve.deploy.backend import ReplicaBackend
from mars_serve.deploy.queue import _SPARE_SHARE, Lease, RequestQueue
from mars_serve.engine.ipc.client import DeadlineMissed, QueueFull, QueueTimeout
from mars_serve.engine.ipc.messages import Condition
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.observability.request_telemetry import RequestTelemetry
from waiting import soon

MODEL = ModelSettings(name="m", path="p")

Ingress = Callable[..., Coroutine[Any, Any, ReplicaBackend]]


@pytest.fixture
async def ingress(start) -> AsyncIterator[Ingress]:
    """Connect an ingress to replicas: ``await ingress(*replicas)``."""
    made = list[tuple[ReplicaHandle, ReplicaBackend]]()

    async def make(*replicas: LocalReplica, model: ModelSettings = MODEL) -> ReplicaBackend:
        handle = ReplicaHandle(*replicas)
        backend = ReplicaBackend(handle, model, "app")
        made.append((handle, backend))
        backend._clients.start()
        names = {each.name for each in replicas}
        await soon(lambda: backend._clients.usable().keys() == names)
        await soon(lambda: all(client.credit.limit for client in links_of(backend)))
        return backend

    yield make
    for handle, backend in made:
        handle.replicas.clear()
        for client in links_of(backend):
            client.stop()
        await soon(lambda backend=backend: not backend._clients._all)


def at_once(lease: Coroutine[Any, Any, Lease]) -> Lease:
    """Return the lease that a request gets without waiting."""
    with pytest.raises(StopIteration) as ended:
        lease.send(None)
    found = ended.value.value
    assert isinstance(found, Lease)
    return found


def give_up(queue: RequestQueue, lease: Lease, wanted: Request) -> None:
    """End a request that had its lease and was never sent."""
    queue.sent(lease)
    queue.ended(lease, wanted, 0, 0)


async def assert_all_is_back(backend: ReplicaBackend, *replicas: LocalReplica) -> None:
    """Wait until all credits are free, and check that nothing of a request is left."""
    queue = backend._queue
    for replica in replicas:
        status = replica.loop.engine.status
        await soon(lambda status=status: not status().num_requests)
        assert status().num_free_pages == status().num_pages
    sizes = [each.loop.engine.settings.max_num_seqs for each in replicas]
    room = sum(size + reserve_of(size) for size in sizes)
    await soon(lambda: sum(client.credit.num_free for client in links_of(backend)) == room)
    assert (len(queue), queue._reserved, queue._held.total()) == (0, {}, 0)


# Credits


async def test_a_request_for_an_idle_replica_does_not_wait(start, ingress) -> None:
    backend = await ingress(replica := start("a"))
    queue, wanted = backend._queue, request()
    lease = at_once(queue.lease(wanted, time.monotonic()))
    assert (lease.replica, lease.queued, wanted.waited_s) == ("a", None, 0.0)
    give_up(queue, lease, wanted)
    assert len(await backend.complete(wanted)) == 1
    await assert_all_is_back(backend, replica)


async def test_leases_of_requests_that_are_not_sent_yet_count_as_load(start, ingress) -> None:
    backend = await ingress(*(replicas := [start("a"), start("b")]))
    queue, wanted = backend._queue, [request(str(number)) for number in range(4)]
    leases = [at_once(queue.lease(each, time.monotonic())) for each in wanted]
    assert Counter(lease.replica for lease in leases) == {"a": 2, "b": 2}
    for lease, each in zip(leases, wanted, strict=True):
        give_up(queue, lease, each)
    await assert_all_is_back(backend, *replicas)


async def test_nothing_is_sent_while_pages_are_short_and_nothing_overtakes(start, ingress) -> None:
    backend = await ingress(replica := start("a", SlowEngine, num_pages=16, max_num_seqs=4))
    (client,) = links_of(backend)
    first = backend.stream(request("first", 10, prompt=50))
    await anext(first)
    second = spawn(backend, request("second", 1, prompt=50))
    await soon(lambda: client.credit.num_free == 0)
    (third,) = await spawn_waiting(backend, request("third", 1))
    for _ in range(4):  # there would be pages for it
        await anext(first)
    assert len(backend._queue) == replica.loop.engine.status().num_waiting == 1
    await first.aclose()
    await second
    await third
    await assert_all_is_back(backend, replica)


async def test_two_ingresses_share_a_replica_by_what_waits(start, ingress) -> None:
    replica = start("a", max_num_seqs=4)
    ahead, behind = await ingress(replica), await ingress(replica)
    (client,) = links_of(ahead)
    await soon(lambda: client.credit.num_free == 2)
    blocks = await block(ahead, replica)
    blocks += await block(behind, replica, name="block too")
    assert len(blocks) == 4
    many = await spawn_waiting(ahead, *(request(f"ahead-{index}") for index in range(30)))
    few = await spawn_waiting(behind, *(request(f"behind-{index}") for index in range(10)))
    unblock(replica)
    await asyncio.gather(*blocks, *many, *few)
    order = [each.split("-")[0] for each in ids_at(replica) if not each.startswith("block")]
    assert sorted(Counter(order).values()) == [10, 30]
    assert order[:28].count("behind") >= 8, "the one with more waiting takes no more than its part"


# Order


async def test_waiting_requests_go_by_tier_then_deadline_then_arrival(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=1))
    blocks = await block(backend, replica)
    waiting = await spawn_waiting(
        backend,
        request("flex", tier=Tier.FLEX, deadline_s=0.5),
        request("late", deadline_s=60.0),
        request("first"),
        request("second"),
        request("soon", deadline_s=20.0),
        request("priority", tier=Tier.PRIORITY),
    )
    told = backend.waiting_by_tier()
    assert (told[Tier.FLEX], told[Tier.PRIORITY]) == (1, 1)
    assert 4 <= told[Tier.DEFAULT] <= 4 + len(blocks)
    unblock(replica)
    await asyncio.gather(*blocks, *waiting)
    assert not backend.waiting_by_tier().total()
    wanted = ["priority", "first", "second", "soon", "late", "flex"]
    assert ids_at(replica)[len(blocks) :] == wanted
    await assert_all_is_back(backend, replica)


async def test_without_a_deadline_the_objective_of_the_model_counts(start, ingress) -> None:
    slow = {"max_replicas": 1, "objective_ttft_s": 30.0}
    model = MODEL.model_copy(update={"autoscaling": AutoscalingSettings(**slow)})
    backend = await ingress(replica := start("a", max_num_seqs=1), model=model)
    blocks = await block(backend, replica)
    waiting = await spawn_waiting(backend, request("usual"), request("soon", deadline_s=20.0))
    unblock(replica)
    await asyncio.gather(*blocks, *waiting)
    assert ids_at(replica)[len(blocks) :] == ["soon", "usual"]


async def test_a_key_that_floods_leaves_room_for_another_that_is_active(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=18))
    await backend.complete(request("before", key="b"))
    engine_of(replica).may_step.clear()
    flood = [spawn(backend, request(f"{index}", key="a", prompt=2)) for index in range(40)]
    await soon(lambda: len(backend._queue) == 40 - (18 - 18 // _SPARE_SHARE))
    wanted = request("at once", key="b")
    lease = asyncio.create_task(backend._queue.lease(wanted, time.monotonic()))
    for _ in range(3):
        await asyncio.sleep(0)
    assert lease.done(), "there is room that was kept for it"
    give_up(backend._queue, lease.result(), wanted)
    backend._queue._clock = lambda: time.monotonic() + 61  # nobody has come for a minute
    await soon(lambda: len(backend._queue) == 40 - 18)
    unblock(replica)
    await asyncio.gather(*flood)
    await assert_all_is_back(backend, replica)


async def test_the_prompts_of_one_key_leave_room_for_the_requests_of_another(
    start, ingress
) -> None:
    model = MODEL.model_copy(update={"engine": EngineSettings(max_num_seqs=8)})
    backend = await ingress(replica := start("a", max_num_seqs=8, num_pages=1000), model=model)
    engine_of(replica).may_step.clear()
    long = [request(f"long-{index}", key="a", prompt=250) for index in range(8)]
    flood = [spawn(backend, each) for each in long]
    await soon(lambda: len(backend._queue) == 2)  # 6 requests of 250 tokens count as 8.9
    short = spawn(backend, request("short", key="b"))
    await soon(lambda: "short" in ids_at(replica))
    unblock(replica)
    await asyncio.gather(*flood, short)
    await assert_all_is_back(backend, replica)


async def test_grammars_that_compile_leave_room_for_keys_that_come_later(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=8))
    with engine_of(replica).grammars._vocabulary_lock:  # none can be compiled
        slow = [
            spawn(backend, request(f"{key} {number}", key=key, grammar=regex(f"{number}+")))
            for number in range(5)
            for key in "abcd"
        ]
        await soon(lambda: len(backend._queue) == len(slow) - 6)
        outputs = await asyncio.wait_for(backend.complete(request("plain", key="e")), 5)
        assert [output.tokens for output in outputs] != [[]]
        assert not any(task.done() for task in slow)
    ends = await asyncio.gather(*slow, return_exceptions=True)
    assert {str(end) for end in ends} == {str(ends[0])}, "the model has no end token"
    await assert_all_is_back(backend, replica)


async def test_one_keys_grammars_leave_room_for_anothers(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=8))
    with engine_of(replica).grammars._vocabulary_lock:
        slow = [
            spawn(backend, request(str(number), key="a", grammar=regex(f"{number}+")))
            for number in range(9)
        ]
        await soon(lambda: len(backend._queue) == 7)
        other = spawn(backend, request("other", key="b", grammar=regex("b+")))
        await soon(lambda: sum(links_of(backend)[0].num_compiling().values()) == 3)
        assert len(backend._queue) == 7
    await asyncio.gather(*slow, other, return_exceptions=True)
    await assert_all_is_back(backend, replica)


# Ends of a wait


async def test_a_request_that_is_cancelled_while_it_waits_is_never_sent(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=1))
    blocks = await block(backend, replica)
    left, stays = await spawn_waiting(backend, request("left"), request("stays"))
    left.cancel()
    await soon(lambda: len(backend._queue) == 1)
    unblock(replica)
    await asyncio.gather(*blocks, stays)
    assert ids_at(replica)[len(blocks) :] == ["stays"]
    await assert_all_is_back(backend, replica)


async def test_a_request_cancelled_in_the_instant_of_its_turn_gives_it_back(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=2))
    queue, holder = backend._queue, request("holder")
    leases = [at_once(queue.lease(holder, time.monotonic())) for _ in range(2)]
    waiting = [
        asyncio.create_task(queue.lease(request(f"{index}"), time.monotonic()))
        for index in range(3)
    ]
    await soon(lambda: len(queue) == 3)
    give_up(queue, leases[0], holder)
    assert len(queue) == 2, "the first has its lease, and its task has not run since"
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert waiting[0].cancelled()
    second = await waiting[1]
    waiting[2].cancel()
    give_up(queue, second, request("1"))
    give_up(queue, leases[1], holder)
    await asyncio.wait(waiting)
    assert waiting[2].cancelled()
    await assert_all_is_back(backend, replica)


async def test_no_credit_is_lost_whenever_requests_are_cancelled(start, ingress) -> None:
    replicas = [start(name, max_num_seqs=2) for name in "ab"]
    backend = await ingress(*replicas)
    chance = random.Random(5)
    tasks = [spawn(backend, request(f"{index}", 3, key=f"{index % 3}")) for index in range(300)]
    left = [task for task in tasks if chance.random() < 0.7]
    for task in left:
        await asyncio.sleep(chance.choice([0.0, 0.0, 0.002]))
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, list | asyncio.CancelledError) for each in results)
    stayed = [each for task, each in zip(tasks, results, strict=True) if task not in left]
    assert stayed
    assert all(isinstance(each, list) for each in stayed)
    await assert_all_is_back(backend, *replicas)


async def test_a_request_waits_no_longer_than_it_may(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=1))
    blocks = await block(backend, replica)
    (stays,) = await spawn_waiting(backend, request("stays", max_queue_s=60.0))
    with pytest.raises(QueueTimeout, match=r"no replica began the request within 0\.2 s"):
        await backend.complete(request("brief", max_queue_s=0.2))
    unblock(replica)
    await asyncio.gather(*blocks, stays)
    assert "brief" not in ids_at(replica)
    await assert_all_is_back(backend, replica)


# Replicas that come and go


async def test_a_new_replica_takes_what_waits(start, ingress) -> None:
    backend = await ingress(busy := start("a", max_num_seqs=1))
    blocks = await block(backend, busy)
    waiting = await spawn_waiting(backend, *(request(f"{index}") for index in range(4)))
    backend._clients._handle.replicas.append(new := start("b", max_num_seqs=1))
    await asyncio.gather(*waiting)
    assert ids_at(new) == ["0", "1", "2", "3"]
    unblock(busy)
    await asyncio.gather(*blocks)
    await assert_all_is_back(backend, busy, new)


async def test_what_waits_for_a_replica_that_dies_runs_once_elsewhere(start, ingress) -> None:
    dying, sound = start("a", max_num_seqs=2), start("b", max_num_seqs=2)
    backend = await ingress(dying, sound)
    engine_of(dying).fails_between_steps = True
    running = [spawn(backend, request(f"{index}", 3)) for index in range(20)]
    results = await asyncio.gather(*running)
    assert all(sum(len(each.tokens) for each in outputs) == 3 for outputs in results)
    assert ids_at(dying)
    names = [name.split("/")[0] for name in ids_at(sound)]
    assert sorted(names, key=int) == [f"{index}" for index in range(20)]
    await assert_all_is_back(backend, sound)


async def test_a_replica_drains_though_requests_wait_for_others(start, ingress) -> None:
    """It ends once it reports no requests, so it must not count those that it will not get."""
    ending, staying = (start(name, SlowEngine, max_num_seqs=1) for name in "ab")
    backend = await ingress(ending, staying)
    running = [spawn(backend, request(f"{index}", 2)) for index in range(16)]
    await soon(lambda: ending.loop.status().num_waiting > 4)
    ending.loop.tell(Condition(is_draining=True))
    await soon(lambda: not ending.loop.status().num_requests)
    assert staying.loop.status().num_waiting > 4, "they wait for the other one"
    outputs = await asyncio.gather(*running)
    assert [sum(len(each.tokens) for each in output) for output in outputs] == [2] * 16
    assert backend.arrivals()[0] == 16, "a request that moves has arrived once"


async def test_requests_that_find_an_engine_gone_are_sent_elsewhere_once(start, ingress) -> None:
    """The event loop does not learn of the engine's end before they try it."""
    dying, sound = (start(name, max_num_seqs=2) for name in "ab")
    backend = await ingress(dying, sound)
    engine_of(dying).fails_between_steps = True
    dying.loop.stop()
    sent = [request(f"{index}") for index in range(20)]
    outputs = await asyncio.gather(*map(backend.complete, sent))
    assert all(len(each) == 1 for each in outputs)
    assert max(each.num_moves for each in sent) == 1


# Refusals


async def test_late_requests_are_refused_once_every_replica_has_a_rule(start, ingress) -> None:
    replicas = [start(name, max_num_seqs=1) for name in "ab"]
    backend = await ingress(*replicas)
    blocks = await block(backend, *replicas)
    rule = LateRule(each_s=10.0, objective_s=1.0)

    def rules() -> list[LateRule | None]:
        return [client.late_rule for client in links_of(backend)]

    def early(name: str) -> Request:
        return request(name, deadline_s=60.0)

    waiting = await spawn_waiting(backend, early("w0"), early("w1"))
    replicas[0].loop.set_late_rule(rule)
    await soon(lambda: rule in rules())
    waiting += await spawn_waiting(backend, early("w2"))
    replicas[1].loop.set_late_rule(rule)
    await soon(lambda: rules() == [rule, rule])
    with pytest.raises(QueueFull, match=r"would come 14\.0 s too late") as refused:
        await backend.complete(request("late"))
    assert refused.value.wait_s == pytest.approx(14.0)  # three are before two engines
    assert not isinstance(refused.value, DeadlineMissed)
    waiting += await spawn_waiting(backend, request("first", tier=Tier.PRIORITY))
    replicas[0].loop.set_late_rule(None)
    await soon(lambda: None in rules())
    waiting += await spawn_waiting(backend, request("w3"))
    unblock(*replicas)
    await asyncio.gather(*blocks, *waiting)
    assert "late" not in ids_at(replicas[0]) + ids_at(replicas[1])
    await assert_all_is_back(backend, *replicas)


async def test_a_request_that_would_wait_in_vain_is_told_when_it_is_late(start, ingress) -> None:
    """By hand: behind five late ones, of which one in eight goes, it would wait for 4 s."""
    model = MODEL.model_copy(
        update={"autoscaling": AutoscalingSettings(max_replicas=1, objective_ttft_s=0.2)}
    )
    backend = await ingress(replica := start("a", max_num_seqs=1), model=model)
    blocks = await block(backend, replica)
    waiting = await spawn_waiting(backend, *(request(f"{index}") for index in range(5)))
    await asyncio.sleep(0.2)
    replica.loop.set_late_rule(LateRule(each_s=0.1, objective_s=10.0))
    await soon(lambda: all(client.late_rule for client in links_of(backend)))
    with pytest.raises(QueueTimeout, match=r"within 0\.15 s"):
        await backend.complete(request("vain", max_queue_s=3.9))
    waiting += await spawn_waiting(backend, request("patient", max_queue_s=60.0))
    unblock(replica)
    await asyncio.gather(*blocks, *waiting)
    assert "vain" not in ids_at(replica)
    await assert_all_is_back(backend, replica)


async def test_a_deadline_that_surely_cannot_be_met_is_refused(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=2))
    now_s = 100.0
    queue = backend._queue = RequestQueue(MODEL, backend._clients, lambda: now_s)
    holder = request("holder")
    leases = [at_once(queue.lease(holder, now_s)) for _ in range(2)]
    unsure = request("no pace is known", deadline_s=0.001)
    waiting = [asyncio.create_task(queue.lease(unsure, now_s))]
    others = [request(f"{index}", deadline_s=9.0) for index in range(12)]
    waiting += [asyncio.create_task(queue.lease(each, now_s)) for each in others]
    await soon(lambda: len(queue) == 13)
    for _ in range(2):  # two of them begin within five seconds
        give_up(queue, leases.pop(), holder)
    now_s += 5.5
    with pytest.raises(DeadlineMissed, match="would wait about") as missed:
        await queue.lease(request("hopeless", deadline_s=4.0), now_s)
    # eleven are before it, and not late yet
    assert missed.value.wait_s == pytest.approx(11 / 2 * 5)
    meets = asyncio.create_task(queue.lease(request("meets", deadline_s=3600.0), now_s))
    await soon(lambda: len(queue) == 12)
    for task in [*waiting[2:], meets]:
        task.cancel()
    await asyncio.wait([*waiting, meets])
    for task in waiting[:2]:
        give_up(queue, task.result(), holder)
    await assert_all_is_back(backend, replica)


# Load reports


async def test_reports_of_replicas_count_what_waits_before_them_once(start, ingress) -> None:
    replicas = [start(name, max_num_seqs=2) for name in "ab"]
    backend = await ingress(*replicas)
    loops = [replica.loop for replica in replicas]
    blocks = await block(backend, *replicas)
    waiting = await spawn_waiting(backend, *(request(f"{index}") for index in range(15)))
    unblock(*replicas)
    engine_seen = list[int]()
    most = 0
    while not all(task.done() for task in waiting):
        engine_seen.append(max(loop.engine.status().num_waiting for loop in loops))
        most = max(most, sum(loop.status().num_waiting for loop in loops))
        await asyncio.sleep(0)
    assert most > max(engine_seen) + 4, "the reports count what waits outside"
    await asyncio.gather(*blocks, *waiting)
    num = len(blocks) + len(waiting)

    def totals() -> tuple[int, int, int]:
        found = [loop.activity.counts for loop in loops]
        return (
            sum(each.lengths.num_begun for each in found),
            sum(each.prompt_tokens for each in found),
            sum(sum(each.lengths.ended) for each in found),
        )

    await soon(lambda: all(isinstance(loop.activity, RequestTelemetry) for loop in loops))
    await soon(lambda: totals() == (num, num * 5, num))
    assert backend.arrivals() == (num, num * 5)
    await soon(lambda: sum(loop.status().num_requests for loop in loops) == 0)


async def test_the_time_in_the_queue_includes_the_wait_before_the_replica(start, ingress) -> None:
    backend = await ingress(replica := start("a", max_num_seqs=1))
    blocks = await block(backend, replica)
    wanted = request("waits")
    (waiting,) = await spawn_waiting(backend, wanted)
    await asyncio.sleep(0.1)
    unblock(replica)
    outputs = await waiting
    assert outputs[0].queue_s >= wanted.waited_s >= 0.1
    await asyncio.gather(*blocks)


# Choice of a replica


@pytest.mark.parametrize("fields", [{"session": "s"}, {"prompt": list(range(4, 60))}])
async def test_sessions_and_prefixes_return_to_their_replica_while_it_has_room(
    start, ingress, fields: dict[str, Any]
) -> None:
    replicas = [start(name, SlowEngine, max_num_seqs=3) for name in "ab"]
    backend = await ingress(*replicas)
    queue, held = backend._queue, list[tuple[Lease, Request]]()

    def place(**more: Any) -> str:
        wanted = request(f"{len(held)}", **more)
        held.append((at_once(queue.lease(wanted, time.monotonic())), wanted))
        return held[-1][0].replica

    first = place()
    give_up(queue, *held.pop())
    running = backend.stream(request("makes the other one less busy", 200))
    await anext(running)
    usual = place(**fields)
    assert usual != first
    await running.aclose()
    assert place() == first, "it is chosen without memory"
    assert [place(**fields) for _ in range(2)] == [usual, usual]
    assert place(**fields) == first, "no request waits for a credit of its own replica"
    for lease, wanted in held:
        give_up(queue, lease, wanted)
    await assert_all_is_back(backend, *replicas)
