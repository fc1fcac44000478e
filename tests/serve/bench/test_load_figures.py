from __future__ import annotations

import math

import pytest

from mars_platform.tier import Tier
from mars_serve.bench.load.figures import LoadFigures, client_figures, figures_of
from mars_serve.bench.load.plan import LoadPlan
from mars_serve.bench.load.report import lateness_warning
from mars_serve.bench.load.send import Replayed, SentRequest
from rest.sent_requests import sent, served

SENT = [
    served(0.0, 0.5, 1.5, threshold_min=0.8, correct=True),
    served(0.5, 2.0, 3.0, threshold_min=0.9, correct=False, tier="flex"),
    sent(1.0, None, 1.1, status=503, error="503 queue_full"),
    sent(1.0, None, 1.1, status=429, error="429", tier="flex"),
    sent(1.5, 1.6, 1.9, status=200, error="stream cut off", num_tokens=2),
    sent(2.0, 2.1, None, status=200, num_tokens=2),  # cut off by an interrupt
]


def test_figures_of_one_tier() -> None:
    found = client_figures(SENT, objective_s=1.0, duration_s=5.0)
    assert (found.num_sent, found.num_ended, found.num_served) == (6, 5, 2)
    assert found.slo_attainment == 1 / 5
    assert (found.ttft_p50_s, found.ttft_p99_s) == (math.inf, math.inf)
    assert (found.rejected, found.rejected_429, found.rejected_503) == (2, 0.2, 0.2)
    assert found.failed == 1
    assert found.errors == {"503 queue_full": 1, "429": 1, "stream cut off": 1}
    assert (found.threshold_mean, found.threshold_min) == (0.9, 0.8)
    assert found.tokens_per_forward == 2.0
    assert (found.num_tokens, found.tokens_per_s) == (12, 12 / 5)
    assert found.num_checked == 2
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5
    of_two = client_figures(SENT[:2], objective_s=2.0, duration_s=5.0)
    assert of_two.slo_attainment == 1.0
    assert (of_two.ttft_p50_s, of_two.ttft_p99_s) == (2.0, 2.0)
    assert (of_two.e2e_p50_s, of_two.e2e_p99_s) == (3.0, 3.0)


def test_no_requests_give_no_figures() -> None:
    found = client_figures([], 1.0, 0.0)
    assert (found.num_sent, found.rejected, found.failed, found.errors) == (0, 0, 0, {})
    assert found.slo_attainment is found.ttft_p50_s is found.tokens_per_s is None


def replayed(sent: list[SentRequest]) -> Replayed:
    return Replayed(LoadPlan("mars", [each.request for each in sent], [], 0), sent)


def figures(sent: list[SentRequest]) -> LoadFigures:
    return figures_of(replayed(sent), 1.0)


def test_figures_are_split_by_tier() -> None:
    found = figures(SENT)
    assert found.classes.keys() == {"default", "flex"}
    assert found.classes[Tier.FLEX].num_sent == 2
    assert found.classes[Tier.FLEX].slo_attainment == 0.0
    assert found.classes[Tier.DEFAULT].slo_attainment == 1 / 3
    assert found.duration_s == 3.5
    assert found.lateness_p99_s == 0.0


@pytest.mark.parametrize(("late_s", "warns"), [(0.049, False), (0.051, True)])
def test_a_late_sender_causes_a_warning(late_s: float, warns: bool) -> None:
    late = served(1.0 + late_s, 0.1, 0.2, at_s=1.0)
    found = figures([served(0.0, 0.1, 0.2), late])
    assert found.lateness_p99_s == pytest.approx(late_s)
    assert (lateness_warning(found) is not None) == warns


def test_times_between_events_are_those_of_all_answers() -> None:
    one, two = (served(0.0, 1.0, 9.0) for _ in range(2))
    one.token_s.extend([1.5, 1.5001, 3.5])
    two.token_s.append(4.0)
    found = client_figures([one, two, SENT[4]], 1.0, 9.0)
    assert (found.itl_p50_s, found.itl_p99_s) == pytest.approx((1.9999, 3.0))
