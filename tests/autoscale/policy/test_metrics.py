from prometheus_client.core import CounterMetricFamily

from ladders import CAPACITY
from mars_autoscale.policy.decision import Reason
from mars_autoscale.policy.metrics import AutoscalerMetrics
from mars_autoscale.policy.outer_loop import AutoscalingBasis, OuterLoop
from mars_autoscale.policy.settings import OuterSettings


def test_metrics_can_be_read_while_another_thread_counts_a_new_reason(monkeypatch):
    loop = OuterLoop()
    loop.counts.update({Reason.STEADY: 3, Reason.LOAD: 1})
    add = CounterMetricFamily.add_metric

    def add_and_count(family, labels, value):
        add(family, labels, value)
        loop.counts[Reason.IDLE] += 1

    monkeypatch.setattr(CounterMetricFamily, "add_metric", add_and_count)
    (family,) = (
        each
        for each in AutoscalerMetrics({"m": loop}).collect()
        if each.name == "marsray_autoscaler_decisions"
    )
    assert {sample.labels["reason"]: sample.value for sample in family.samples} == {
        "steady": 3,
        "load": 1,
    }


def test_a_metric_tells_that_a_frontier_is_refused():
    used, refused = OuterLoop(), OuterLoop()
    used.basis = AutoscalingBasis(CAPACITY, OuterSettings())
    refused.basis = AutoscalingBasis(CAPACITY, OuterSettings(), refused="it is damaged")
    (family,) = (
        each
        for each in AutoscalerMetrics({"used": used, "refused": refused}).collect()
        if each.name == "marsray_autoscaler_frontier_refused"
    )
    assert {each.labels["model"]: each.value for each in family.samples} == {
        "used": 0.0,
        "refused": 1.0,
    }
