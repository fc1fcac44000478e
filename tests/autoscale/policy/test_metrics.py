from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from mars_autoscale.policy.decision import Reason
from mars_autoscale.policy.metrics import exposition
from mars_autoscale.policy.outer_loop import OuterLoop


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
        for each in text_string_to_metric_families(exposition({"m": loop}))
        if each.name == "marsray_autoscaler_decisions"
    )
    assert {sample.labels["reason"]: sample.value for sample in family.samples} == {
        "steady": 3,
        "load": 1,
    }
