import numpy as np
import pytest

from ladders import threshold_rung
from mars_autoscale.model.capacity import AR, Capacity, linear_step_time
from mars_autoscale.simulation.bound import clairvoyant
from mars_autoscale.simulation.replicas import ReplicaSettings
from mars_autoscale.traces.files import TraceRequest

LOW = threshold_rung(0.9, 1.85, 3.0)
CAPACITY = Capacity(linear_step_time(0.032, 128), (AR, LOW), 16, 20_000)
GAIN = CAPACITY.gain(LOW)


def work(*, at_s, seconds, replicas, prompts=0.0):
    """Return requests that keep so many replicas busy for some time."""
    times = np.arange(at_s, at_s + seconds, 0.5)
    prompt = round(0.5 * prompts * CAPACITY.prefill_tokens_per_s)
    output = round(0.5 * replicas * CAPACITY.tokens_per_s(AR))
    return [TraceRequest(float(time), prompt, output) for time in times]


def bound(trace, hours, initial=1):
    limits = ReplicaSettings(min=1, max=4, initial=initial, cold_start_s=30)
    return clairvoyant(trace, CAPACITY, limits, objective_s=1.0, max_replica_hours=hours)


def test_replicas_are_ready_just_in_time():
    trace = work(at_s=0, seconds=100, replicas=0.9)
    trace += work(at_s=100, seconds=100, replicas=2.9) + work(at_s=200, seconds=100, replicas=0.9)
    best = bound(trace, hours=1.0)
    assert (best.served, best.quality_loss_mean) == (1.0, 0.0)
    assert best.num_replicas == [1] * 10 + [3] * 10 + [1] * 10
    assert best.replica_hours == pytest.approx((300 + 2 * 100 + 2 * 30) / 3600)


def test_fewer_hours_cost_quality():
    trace = work(at_s=0, seconds=300, replicas=2.4)
    whole, less = bound(trace, 1.0, initial=3), bound(trace, 0.2, initial=2)
    assert (whole.quality_loss_mean, whole.num_replicas) == (0.0, [3] * 30)
    assert less.num_replicas == [2] * 30
    # two replicas must be 1.2 times as fast, by a mixture of both rungs
    assert less.quality_loss_mean == pytest.approx(3.0 * 0.2 / (GAIN - 1), rel=0.05)


@pytest.mark.parametrize(
    ("replicas", "prompts", "served", "loss"),
    [(5 * GAIN, 0.0, 4 / 5, 3.0), (0.1, 4.5, 4.0 / 4.6, 0.0)],
    ids=["decoding", "prompts"],
)
def test_work_beyond_all_replicas_is_refused(replicas, prompts, served, loss):
    best = bound(work(at_s=0, seconds=200, replicas=replicas, prompts=prompts), 1.0, initial=4)
    assert best.served == pytest.approx(served, rel=0.02)
    if loss:
        assert best.quality_loss_mean == pytest.approx(loss, rel=0.01)


def test_work_before_the_replicas_have_started_is_refused():
    assert bound(work(at_s=0, seconds=100, replicas=2.9), 1.0).served < 1.0
