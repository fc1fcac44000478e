from dataclasses import replace

import numpy as np
import pytest

from ladders import exact_rung, threshold_rung
from mars_autoscale.model.capacity import AR, Capacity
from mars_autoscale.model.step_times import linear_step_time
from mars_autoscale.policy.decision import ThresholdRange
from mars_autoscale.policy.inner_loop import InnerLoopDecision
from mars_autoscale.policy.lengths import counts_of
from mars_autoscale.policy.settings import InnerSettings, OuterSettings
from mars_autoscale.simulation.cluster import Replica, Served
from mars_autoscale.simulation.dispatch import ServerQueue
from mars_autoscale.simulation.figures import figures_of
from mars_autoscale.simulation.policies import Joint, StaticReplicas, Target
from mars_autoscale.simulation.replicas import ReplicaSettings, SpeedChange
from mars_autoscale.simulation.run import Simulation
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import ClosedLoop
from mars_platform.method.mode import LiveDecoding
from mars_platform.tier import Tier

LIGHT = threshold_rung(0.9, 1.5, 2.0, 2)
DEEP = threshold_rung(0.8, 2.0, 5.0, 2)
STEP = linear_step_time(0.1, 10)
"""A step of one row at τ = 1 takes 0.11 s."""
ONE_ROW = Capacity(STEP, (AR, LIGHT, DEEP), 1, 100.0)
PRIORITY, DEFAULT, FLEX = Tier


class Script:
    """One replica whose inner loop makes the given decisions, and then repeats the last."""

    period_s = 1.0

    def __init__(self, *decisions, is_saturated=False):
        self.decisions = [InnerLoopDecision(LiveDecoding(*each)) for each in decisions]
        self.target = Target(1, ThresholdRange(is_saturated=is_saturated))

    def decide(self, snapshot, /):
        return self.target

    def inner_loop(self):
        return self

    def dispatch(self, seed, /):
        return ServerQueue()

    def update(self, look, /):
        return self.decisions.pop(0) if len(self.decisions) > 1 else self.decisions[0]


def simulate(trace, capacity=ONE_ROW, policy=None, real=None, **options):
    policy = policy or StaticReplicas(1)
    num_replicas = getattr(policy, "num_replicas", 1)
    limits = ReplicaSettings(max=num_replicas, initial=num_replicas, **real or {})
    return Simulation(trace, capacity, limits, policy, **options).run()


# One replica, by hand


def test_a_request_alone():
    (served,) = simulate([TraceRequest(1.0, 50, 10)]).served
    assert served.ttft_s == pytest.approx(0.5 + 0.11)
    assert served.loss_tokens == 0.0


def test_requests_wait_while_the_batch_is_full():
    first, second = simulate([TraceRequest(0.0, 0, 10), TraceRequest(0.2, 0, 1)]).served
    assert first.ttft_s == pytest.approx(0.11)
    assert second.ttft_s == pytest.approx(10 * 0.11 - 0.2 + 0.11)


def test_a_prompt_stalls_the_rows_beside_it():
    trace = [TraceRequest(0.0, 0, 3), TraceRequest(0.05, 100, 1), TraceRequest(0.06, 0, 1)]
    _, stalling, last = simulate(trace, replace(ONE_ROW, max_num_seqs=2)).served
    both = 0.1 * (1 + 2 / 10)
    assert stalling.ttft_s == pytest.approx(0.11 - 0.05 + 1.0 + both)
    # the last one comes while the first row takes a step alone, and runs alone itself
    assert last.ttft_s == pytest.approx(0.11 - 0.06 + 1.0 + both + 0.11 + 0.11)


def test_several_tokens_per_pass_cost_time_and_quality():
    trace = [TraceRequest(0.0, 0, 10), TraceRequest(0.0, 0, 1)]
    first, second = simulate(trace, policy=Script((DEEP.threshold,))).served
    step = 0.1 * (1 + 4 / 10)  # a row costs two tokens and two masks
    assert second.ttft_s == pytest.approx(5 * step + step)
    assert first.loss_tokens == pytest.approx(10 * 5.0)
    assert second.loss_tokens == pytest.approx(5.0)


# Replicas and loads that are not as the model has them, by hand


def test_the_real_speed_changes_over_time():
    trace = [TraceRequest(at_s, 50, 1) for at_s in (0.0, 10.0, 30.0)]
    changes = [SpeedChange(times=0.2), SpeedChange(times=0.5, from_s=20)]
    served = simulate(trace, real={"real_speed": changes}).served
    seconds = 0.5 + 0.11
    assert [each.ttft_s for each in served] == pytest.approx([5 * seconds] * 2 + [2 * seconds])


def test_one_replica_of_some_is_slow():
    trace = [TraceRequest(0.001 * i, 0, 5) for i in range(4)]
    slow = [SpeedChange(times=0.1, one_in=3)]
    served = simulate(trace, policy=StaticReplicas(3), real={"real_speed": slow}).served
    assert [each.ttft_s for each in served[:3]] == pytest.approx([0.11, 0.11, 1.1])
    assert served[3].ttft_s < 1.0, "a fast one takes the next"


def test_pages_may_let_fewer_rows_run_than_there_are_slots():
    trace = [TraceRequest(0.0, 0, 10) for _ in range(3)]
    wide = replace(ONE_ROW, max_num_seqs=4)
    times = [each.ttft_s for each in simulate(trace, wide, real={"real_rows": 2}).served]
    # the first runs one step alone, then two run, and the third begins behind the first
    assert times == pytest.approx([0.11, 0.11 + 0.12, 0.11 + 9 * 0.12 + 0.12])


def test_a_request_that_waits_for_too_long_is_refused():
    trace = [TraceRequest(0.0, 0, 100), *(TraceRequest(1.0 + i, 0, 1) for i in range(8))]
    served = simulate(trace, queue_wait_s=5.0).served
    assert [each.is_rejected for each in served] == [False] + [True] * 5 + [False] * 3
    assert served[6].ttft_s == pytest.approx(100 * 0.11 + 0.11 - 6.0)


def test_clients_wait_for_their_answers():
    """Two clients and one row: each waits for the other, and thinks for a second."""
    trace = [*(TraceRequest(0.01 * i, 0, 10) for i in range(5)), TraceRequest(20.0, 0, 10)]
    served = simulate(trace, clients=ClosedLoop(num=2, think_s=1.0)).served
    arrivals = [each.request.arrival_s for each in served]
    assert arrivals[:4] == pytest.approx([0.0, 0.01, 1.1 + 1.0, 2.2 + 1.0])
    assert len(arrivals) == pytest.approx(2 * 20 / 2.2, abs=1), "a turn takes 2.2 s with 2 clients"
    assert max(arrivals) <= 20.0


def test_clients_try_again_a_second_after_a_refusal():
    trace = [TraceRequest(0.0, 0, 100), TraceRequest(0.1, 0, 1), TraceRequest(8.0, 0, 1)]
    served = simulate(trace, queue_wait_s=2.0, clients=ClosedLoop(num=2)).served
    arrivals = [each.request.arrival_s for each in served]
    assert arrivals == pytest.approx([0.0, 0.1, 3.1, 6.1], abs=0.6), "it leaves at the next look"
    assert [each.is_rejected for each in served] == [False, True, True, True]


def test_a_replica_counts_what_an_engine_counts():
    replica = Replica(
        replace(ONE_ROW, max_num_seqs=2),
        InnerLoopDecision(LiveDecoding(0.8, 0.8)),
        is_by_tier=True,
        started_s=0.0,
        ready_s=0.0,
        prefix_cache_tokens=1024,
    )
    request = TraceRequest(0.0, 600, 4, prefix=(1, 2))
    for _ in range(3):
        replica.enqueue(Served(request))
    replica.begin_step()
    replica.finish_step(1.0, seconds=0.3)
    replica.begin_step()
    status = replica.status(num_before=5)
    assert (status.num_running, status.num_waiting, status.num_requests) == (2, 6, 8)
    assert (status.num_forward_passes, status.num_row_passes) == (1, 2)
    assert (status.num_generated_tokens, status.busy_s) == (4, 0.3)
    assert (status.num_prompt_tokens, status.num_prefix_hit_tokens) == (1200, 512)


# Tiers


def test_tiers_are_served_in_order():
    order = (DEFAULT, FLEX, DEFAULT, PRIORITY, FLEX, PRIORITY)
    trace = [TraceRequest(0.001 * i, 0, 1, tier) for i, tier in enumerate(order)]
    served = simulate(trace).served
    turns = sorted(range(len(served)), key=lambda i: served[i].first_token_s)
    assert turns == [0, 3, 5, 2, 1, 4]


def test_each_tier_has_its_rung():
    """By hand: rows cost 1, 1.5 + 2 and 2 + 2 positions."""
    trace = [TraceRequest(0.0, 0, 6, tier) for tier in (PRIORITY, DEFAULT, FLEX, FLEX)]
    capacity = replace(ONE_ROW, max_num_seqs=3)
    *first, last = simulate(trace, capacity, Script((0.9, 0.8))).served
    assert [each.loss_tokens for each in first] == pytest.approx([0.0, 6 * 2.0, 6 * 5.0])
    # one step with the first row alone, three until the third row ends, one until its successor
    # has come, in which the second row ends, and one with it
    rows = [1, *[1 + 3.5 + 4] * 3, 1 + 3.5, 1 + 4]
    assert last.ttft_s == pytest.approx(sum(0.1 * (1 + positions / 10) for positions in rows))


@pytest.mark.parametrize("tiers", [(DEFAULT, DEFAULT), (PRIORITY, FLEX)])
def test_mode_exact_is_faster_and_costs_no_quality(tiers):
    capacity = replace(ONE_ROW, rungs=(AR, exact_rung(2.0, 4), LIGHT, DEEP))
    trace = [TraceRequest(0.0, 0, n, tier) for n, tier in zip((10, 1), tiers, strict=True)]
    first, second = simulate(trace, capacity, Script((1.0, 1.0, True))).served
    assert second.ttft_s == pytest.approx(6 * 0.14)
    assert first.loss_tokens == second.loss_tokens == 0.0
    _, plain = simulate(trace, capacity, Script((1.0, 1.0))).served
    assert plain.ttft_s == pytest.approx(11 * 0.11)


def test_mode_exact_does_not_replace_a_lower_threshold():
    capacity = replace(ONE_ROW, rungs=(AR, exact_rung(2.0, 4), LIGHT, DEEP))
    (served,) = simulate([TraceRequest(0.0, 0, 10)], capacity, Script((0.8, 0.8, True))).served
    assert served.loss_tokens == pytest.approx(50.0)


def test_tier_flex_is_refused_first():
    """By hand: outputs of 3 tokens take .33 s each or little more, and two may be ahead.

    The first one runs, so the one after it waits behind none.
    """
    known = [TraceRequest(3.0 * i, 0, 3) for i in range(100)]  # the mean output is known by them
    after = [*[DEFAULT] * 2, *[FLEX] * 3, *[DEFAULT] * 3, PRIORITY]
    trace = [TraceRequest(400.0 + 0.001 * i, 0, 3, tier) for i, tier in enumerate(after)]
    served = simulate([*known, *trace], policy=Script((1.0,), is_saturated=True)).served
    refused = [i - len(known) for i, each in enumerate(served) if each.is_rejected]
    assert refused == [4, 7], "three are ahead, and of those of tier default no flex"
    assert all(served[len(known) + i].ttft_s == np.inf for i in refused)
    assert not any(each.is_rejected for each in simulate(trace).served), "more may be given"


def test_a_change_of_either_tiers_threshold_is_counted_and_one_of_exact_is_not():
    decisions = [(1.0, 1.0), (1.0, 1.0, True), (1.0, 0.8), (0.9, 0.8), (1.0, 1.0)]
    trace = [TraceRequest(float(i), 0, 1) for i in range(6)]
    capacity = replace(ONE_ROW, rungs=(AR, exact_rung(2.0, 4), LIGHT, DEEP))
    assert simulate(trace, capacity, Script(*decisions)).num_threshold_changes == 3


# Replicas


class Steps:
    """Orders other numbers of replicas from given times on."""

    period_s = 1.0

    def __init__(self, numbers):
        self.numbers = numbers
        self.seen = {}

    def decide(self, snapshot, /):
        self.seen[snapshot.now_s] = len(snapshot.replicas), snapshot.num_starting
        return Target(self.numbers[max(time for time in self.numbers if time <= snapshot.now_s)])

    def inner_loop(self):
        return StaticReplicas(1).inner_loop()

    def dispatch(self, seed, /):
        return ServerQueue()


def simulate_steps(seconds, numbers):
    trace = [TraceRequest(float(i), 0, 1) for i in range(seconds + 1)]
    policy, limits = Steps(numbers), ReplicaSettings(max=4, initial=numbers[0.0], cold_start_s=20)
    return Simulation(trace, ONE_ROW, limits, policy).run(), policy.seen


def test_the_least_loaded_replica_takes_a_request():
    trace = [TraceRequest(0.01 * i, 0, 5) for i in range(3)]
    served = simulate(trace, policy=StaticReplicas(3)).served
    assert [each.ttft_s for each in served] == pytest.approx([0.11] * 3)


def test_replicas_start_late_and_are_billed_from_their_order():
    result, seen = simulate_steps(100, {0.0: 1, 10.0: 3, 50.0: 1})
    assert (seen[10.0], seen[11.0], seen[29.0]) == ((1, 0), (1, 2), (1, 2))
    assert (seen[31.0], seen[50.0], seen[51.0]) == ((3, 0), (3, 0), (1, 0))
    assert result.replica_seconds == pytest.approx(100 + 2 * 40, abs=0.2)
    assert result.num_replica_changes == 2


def test_starting_replicas_are_stopped_first():
    result, seen = simulate_steps(60, {0.0: 2, 5.0: 3, 15.0: 2})
    assert (seen[14.0], seen[16.0]) == ((2, 1), (2, 0))
    assert result.replica_seconds == pytest.approx(2 * 60 + 10)


# Whole traces


def test_a_cluster_that_was_idle_before_the_trace_knows_that_its_rate_was_low():
    """Without it, three requests of the first second are taken for a rate of 3/s."""
    trace = [TraceRequest(time_s, 0, 8) for time_s in (0.2, 0.4, 0.6, *range(4, 40, 4))]
    outer = OuterSettings(max_replicas=4, period_s=1.0)

    def run(begin_s):
        policy = Joint(ONE_ROW, outer, InnerSettings())
        limits = ReplicaSettings(max=4, initial=1)
        known = counts_of([8] * 8, num_begun=8)
        return Simulation(trace, ONE_ROW, limits, policy, lengths=known, begin_s=begin_s).run()

    def first(result):
        return next(each for each in result.samples if each.time_s > 0)

    cold, idle = run(0.0), run(-10.0)
    assert first(idle).requests_per_s < first(cold).requests_per_s / 5
    assert idle.replica_seconds <= cold.replica_seconds
    one = Simulation(
        trace, ONE_ROW, ReplicaSettings(max=1, initial=1), Script((1.0,)), begin_s=-10.0
    )
    assert one.run().replica_seconds == trace[-1].arrival_s, "the time before the trace is free"
    assert idle.samples[0].time_s == -10.0


def test_refused_requests_miss_the_objective_and_cost_no_quality():
    late = [TraceRequest(1 + 0.001 * i, 0, 3, FLEX) for i in range(12)]
    policy = Script((0.8,), is_saturated=True)
    result = simulate([TraceRequest(0.0, 0, 3), *late], policy=policy)
    figures = figures_of(result, measured_from_s=0, objective_ttft_s=100.0)
    flex = figures.by_class[FLEX]
    assert flex.rejected == figures.rejected > 0
    assert flex.slo_attainment == pytest.approx(1 - flex.rejected / 12)
    assert flex.ttft_p99_s == np.inf
    assert flex.quality_loss_mean == figures.quality_loss_mean == pytest.approx(5.0)
    assert figures.by_class[DEFAULT].slo_attainment == 1.0
    assert set(figures.by_class) == {DEFAULT, FLEX}


def test_figures_leave_out_early_requests():
    trace = [TraceRequest(0.0, 0, 50), TraceRequest(0.5, 0, 1), TraceRequest(20.0, 0, 1)]
    figures = figures_of(simulate(trace), measured_from_s=10, objective_ttft_s=1.0)
    assert figures.slo_attainment == 1.0
    assert figures.ttft_p99_s == pytest.approx(0.11)
