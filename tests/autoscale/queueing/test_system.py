"""The parts together: no request is lost, run twice or kept waiting beside free room."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mars_platform.tier import Tier
from queue_system import System

SEEDS = st.integers(0, 2**32 - 1)
DELAYS = st.integers(1, 4)


def make_system(seed, max_delay, num_ingresses, num_replicas, real_cost=lambda queued: queued.cost):
    system = System(seed, max_delay, real_cost)
    for _ in range(num_ingresses):
        system.add_ingress()
    for _ in range(num_replicas):
        system.add_replica()
    return system


def arrive(system):
    source = system.source
    limit = system.now + source.randint(1, 60) if source.random() < 0.3 else None
    system.arrive(
        source.choice(system.ingresses),
        source.choice("abc"),
        source.choice(list(Tier)),
        cost=source.randint(1, 40),
        length=source.randint(1, 12),
        limit=limit,
    )


def cancel(system):
    ingress = system.source.choice(system.ingresses)
    if ingress.queued_requests:
        ingress.cancel(system.source.choice(list(ingress.queued_requests)))


def change_pages(system):
    if system.replicas:
        replica = system.source.choice(system.replicas)
        replica.is_short = not replica.is_short


def kill_replica(system):
    if system.replicas:
        system.kill_replica(system.source.choice(system.replicas))


def kill_ingress(system):
    if len(system.ingresses) > 1:
        system.kill_ingress(system.source.choice(system.ingresses))


RARE = [change_pages, change_pages, kill_replica, kill_ingress, System.add_replica, System.freeze]


def run(system, num_ticks):
    source = system.source
    for _ in range(num_ticks):
        for _ in range(source.choice([0, 0, 1, 3])):
            arrive(system)
        if source.random() < 0.2:
            cancel(system)
        if source.random() < 0.06:
            source.choice(RARE)(system)
        if source.random() < 0.01:
            system.add_ingress()
        system.tick()


def drain(system):
    system.add_replica()
    for replica in system.replicas:
        replica.is_short = False
    for _ in range(20_000):
        if not any(ingress.queued_requests for ingress in system.ingresses):
            break
        system.tick()
    for _ in range(4 * system.max_delay):  # for messages about cancelled requests
        system.tick()


@given(SEEDS, DELAYS, st.integers(1, 3), st.integers(0, 3))
def test_every_request_ends_once_and_nothing_is_left_behind(seed, max_delay, ingresses, replicas):
    """The rules of order and of overcommitment are asserted in `queue_system`, at every step."""

    def real_cost(queued):
        return system.source.randint(1, 2 * queued.cost)

    system = make_system(seed, max_delay, ingresses, replicas, real_cost)
    run(system, 150)
    drain(system)
    assert None not in {job.outcome for job in system.jobs}
    assert not any(job.engine for job in system.jobs)
    for ingress in system.ingresses:
        assert len(ingress.queue) == 0
        assert ingress.queue.first_limit_s() is None
        assert not any(connection.sent for connection in ingress.connections.values())
        assert set(ingress.connections) == {
            name
            for replica in system.replicas
            for name, connection in replica.connections.items()
            if connection.ingress is ingress
        }
    for replica in system.replicas:
        limits = {name: each.credit.num_free for name, each in replica.connections.items()}
        assert sum(limits.values()) == replica.grants.num_free == replica.grants.capacity


@given(SEEDS, DELAYS, st.integers(1, 3), st.integers(1, 3))
def test_no_request_waits_beside_free_room(seed, max_delay, num_ingresses, num_replicas):
    system = make_system(seed, max_delay, num_ingresses, num_replicas)
    for _ in range(12):
        run_quietly(system, system.source.randint(1, 12))
        system.freeze()


def run_quietly(system, num_ticks):
    for _ in range(num_ticks):
        arrive(system)
        if system.source.random() < 0.3:
            cancel(system)
        system.tick()


@given(SEEDS, DELAYS)
def test_replicas_that_start_take_over_requests_that_wait(seed, max_delay):
    system = make_system(seed, max_delay, 2, 1)
    for number in range(40):
        system.arrive(system.ingresses[number % 2], "a", length=1_000)
    for _ in range(10):
        system.tick()
    started = system.add_replica(max_num_seqs=16, reserve=0)
    for _ in range(5 * max_delay):
        system.tick()
    assert len(started.left) == 16


@given(SEEDS, DELAYS, st.integers(1, 3))
def test_keys_that_keep_waiting_get_equal_tokens_from_any_number_of_replicas(
    seed, max_delay, num_replicas
):
    system = make_system(seed, max_delay, 1, num_replicas)
    ingress, largest = system.ingresses[0], 40
    for _ in range(150):
        waiting = Counter(queued.key for queued in ingress.queue)
        for key in "ab":
            for _ in range(16 - waiting[key]):
                cost = system.source.randint(1, {"a": 5, "b": largest}[key])
                system.arrive(ingress, key, cost=cost)
        system.tick()
    gaps, gap = [0], 0
    for queued in ingress.served:
        gap += queued.cost if queued.key == "a" else -queued.cost
        gaps.append(gap)
    assert len(gaps) > 20
    assert max(gaps) - min(gaps) <= 5 + largest


@given(SEEDS, DELAYS, st.integers(1, 4))
def test_one_ingress_is_never_over_its_limit(seed, max_delay, num_replicas):
    system = make_system(seed, max_delay, 1, num_replicas)
    for _ in range(100):
        arrive(system)
        system.tick()
        for replica in system.replicas:
            assert not replica.beyond
            assert len(replica.jobs) <= replica.grants.capacity
