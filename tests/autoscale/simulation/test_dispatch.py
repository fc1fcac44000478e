"""Checks of the queues before simulated replicas: the server's and Ray Serve's."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from mars_autoscale.model.capacity import AR, Capacity
from mars_autoscale.model.step_times import linear_step_time
from mars_autoscale.policy.decision import ThresholdRange
from mars_autoscale.simulation.cluster import Replica
from mars_autoscale.simulation.dispatch import ServerQueue, TwoChoices
from mars_autoscale.simulation.policies import FixedThreshold, Target
from mars_autoscale.simulation.replicas import ReplicaSettings, SpeedChange
from mars_autoscale.simulation.run import Simulation
from mars_autoscale.traces.files import TraceRequest
from mars_platform.tier import Tier

CAPACITY = Capacity(linear_step_time(0.05, 40), (AR,), 4, 1000.0)
LONGEST_STEP_S = CAPACITY.step_time.at(CAPACITY.max_num_seqs)
COLD_START_S = 5.0
KINDS = {"server": lambda _: ServerQueue(), "ray": TwoChoices}


@dataclass
class Scaled:
    """Orders some replicas from each time on, and records what it is told."""

    kind: str
    numbers: dict[float, int]
    is_saturated: bool = False
    period_s: float = 1.0
    told: dict[float, list[tuple[float, float]]] = field(default_factory=dict)
    """Running and waiting requests of each replica, by time."""

    def decide(self, snapshot, /):
        loads = [(each.num_running, each.num_waiting) for each in snapshot.replicas]
        self.told[snapshot.now_s] = loads
        number = self.numbers[max(time for time in self.numbers if time <= snapshot.now_s)]
        return Target(number, ThresholdRange(is_saturated=self.is_saturated))

    def inner_loop(self):
        return FixedThreshold(1.0)

    def dispatch(self, seed, /):
        return KINDS[self.kind](seed)


def simulate(trace, kind, numbers, seed=0, speeds=(), **options):
    """Run a trace; returns the result and the policy."""
    policy = Scaled(kind, numbers, **options)
    limits = ReplicaSettings(
        max=8, initial=numbers[0.0], cold_start_s=COLD_START_S, real_speed=speeds
    )
    return Simulation(trace, CAPACITY, limits, policy, seed=seed).run(), policy


def random_trace(seed, *, num=400, length_s=40.0):
    """Return requests of all tiers, without prompts, that come in bursts."""
    rng = np.random.default_rng(seed)
    arrivals = np.sort(np.round(rng.uniform(0, length_s, num) ** 2 / length_s, 1))
    outputs = rng.integers(1, 30, num)
    tiers = rng.choice(list(Tier), num)
    return [
        TraceRequest(float(at), 0, int(output), Tier(tier))
        for at, output, tier in zip(arrivals, outputs, tiers, strict=True)
    ]


def backlog(num):
    """Return long requests that come at once, and a last one that keeps decisions going."""
    return [*(TraceRequest(0.001 * i, 0, 100) for i in range(num)), TraceRequest(40.0, 0, 1)]


def first_tokens(result, since_s):
    """Return the times of first tokens after a time, in order."""
    times = [each.first_token_s for each in result.served]
    return sorted(time for time in times if time > since_s)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_request_runs_exactly_once(kind, seed, monkeypatch):
    sent = Counter()
    enqueue = Replica.enqueue

    def counted(replica, served):
        assert not replica.is_draining
        sent[id(served)] += 1
        enqueue(replica, served)

    monkeypatch.setattr(Replica, "enqueue", counted)
    trace = random_trace(seed)
    result, _ = simulate(trace, kind, {0.0: 2, 8.0: 4, 20.0: 1, 28.0: 3}, seed)
    assert [each.request for each in result.served] == trace
    assert sent == {id(each): 1 for each in result.served}
    assert all(0 < each.ttft_s < np.inf for each in result.served)


def test_a_new_replica_takes_over_what_waits():
    """The first replica's batch would not have room for them: see what Ray Serve does."""
    ready_s = 2.0 + COLD_START_S
    result, _ = simulate(backlog(20), "server", {0.0: 1, 2.0: 2})
    begun = first_tokens(result, ready_s)[: CAPACITY.max_num_seqs]
    assert begun == pytest.approx([ready_s + LONGEST_STEP_S] * CAPACITY.max_num_seqs)


def test_ray_serve_lets_a_new_replica_idle_beside_a_backlog():
    result, policy = simulate(backlog(20), "ray", {0.0: 1, 2.0: 2})
    assert policy.told[10.0] == [(4, 12), (0, 0)], "four have ended"
    alone, _ = simulate(backlog(20), "ray", {0.0: 1})
    assert [each.ttft_s for each in alone.served[:20]] == [
        each.ttft_s for each in result.served[:20]
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_slot_is_free_for_one_step_at_most_while_requests_wait(seed):
    """A request that is sent when a row ends comes once the next step has begun."""
    trace, numbers = random_trace(seed), {0.0: 2, 8.0: 4, 20.0: 2}
    for loads in simulate(trace, "server", numbers)[1].told.values():
        waiting = [num for _, num in loads]
        most_sent = CAPACITY.max_num_seqs  # those that come during the step
        assert max(waiting) - min(waiting) <= 1 + most_sent, "even parts of the queue"
        if min(waiting) > 0:
            assert all(running + waiting >= 4 for running, waiting in loads)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_late_requests_are_refused_by_what_waits_for_each_replica(num_replicas):
    """By hand: a request takes a full batch 20 / 4 steps of .055 s, and may wait for 1 s."""
    before = [TraceRequest(0.5 * i, 0, 20) for i in range(200)]  # the mean output is known then
    trace = before + [TraceRequest(105.0 + 0.001 * i, 0, 20) for i in range(60)]
    result, _ = simulate(trace, "server", {0.0: num_replicas}, is_saturated=True)
    num_waiting = int(num_replicas * 1.0 / (5 * 0.055)) + 1
    num_kept = sum(not each.is_rejected for each in result.served[len(before) :])
    assert num_kept == num_replicas * CAPACITY.max_num_seqs + num_waiting


def test_late_requests_are_refused_by_the_real_speed():
    """By hand, at half of the speed: a request takes a full batch 20 / 4 steps of .11 s."""
    before = [TraceRequest(float(i), 0, 20) for i in range(100)]  # length and speed are known then
    trace = before + [TraceRequest(105.0 + 0.001 * i, 0, 20) for i in range(60)]
    half = [SpeedChange(times=0.5)]
    result, _ = simulate(trace, "server", {0.0: 1}, is_saturated=True, speeds=half)
    num_kept = sum(not each.is_rejected for each in result.served[len(before) :])
    assert num_kept == CAPACITY.max_num_seqs + int(1.0 / (5 * 0.11)) + 1


def test_prompts_wait_in_the_queue_and_not_in_a_batch():
    """A prompt of 1,000 tokens takes 1 s, and as much load as half of the slots."""
    trace = [TraceRequest(0.0, 1000, 2) for _ in range(4)]
    times = [each.ttft_s for each in simulate(trace, "server", {0.0: 1})[0].served]
    assert times == sorted(times)
    assert times[0] < 2.2 < times[3]
    at_once = [each.ttft_s for each in simulate(trace, "ray", {0.0: 1})[0].served]
    assert at_once[1:] == pytest.approx([at_once[3]] * 3), "each waits for all prompts"


def test_ray_serve_serves_in_order_of_arrival():
    trace = [TraceRequest(0.001 * i, 0, 2, tier) for i, tier in enumerate([*Tier] * 5)]
    times = [each.first_token_s for each in simulate(trace, "ray", {0.0: 1})[0].served]
    assert times == sorted(times)


def test_the_seed_determines_ray_serves_choices():
    trace = random_trace(0)
    runs = [simulate(trace, "ray", {0.0: 5}, seed)[0].served for seed in (0, 0, 1)]
    same, again, other = ([each.ttft_s for each in served] for served in runs)
    assert same == again
    assert same != other
