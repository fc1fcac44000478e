from __future__ import annotations

import pytest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from mars_autoscale.policy.control import Control
from mars_autoscale.policy.decide import Reason
from mars_autoscale.policy.metrics import exposition


def test_a_reason_that_is_new_while_others_are_read_harms_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are read in a thread of their own, beside the decisions."""
    control = Control()
    control.counts.update({Reason.STEADY: 3, Reason.LOAD: 1})
    add = CounterMetricFamily.add_metric

    def add_and_decide(family: CounterMetricFamily, labels: list[str], value: float) -> None:
        add(family, labels, value)
        control.counts[Reason.IDLE] += 1

    monkeypatch.setattr(CounterMetricFamily, "add_metric", add_and_decide)
    (family,) = (
        each
        for each in text_string_to_metric_families(exposition({"m": control}))
        if each.name == "marsray_autoscaler_decisions"
    )
    assert {sample.labels["reason"]: sample.value for sample in family.samples} == {
        "steady": 3,
        "load": 1,
    }
