from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from mars_platform.cli.report import jsonable
from mars_platform.tier import Tier
from mars_serve.bench.load.costs import Losses, quality_loss, replica_hours
from mars_serve.bench.load.figures import LoadFigures, client_figures, figures_of, samples_of
from mars_serve.bench.load.plan import LoadPlan
from mars_serve.bench.load.report import figures_json, lateness_warning, print_load
from mars_serve.bench.load.run import LoadTest
from mars_serve.bench.load.send import LiveView, Replayed, SentRequest
from mars_serve.bench.options import LoadOptions
from rest.sent_requests import planned, sent, served

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
    assert samples_of([], [], 0.0) == []


def view(time_s: float, *thresholds: float) -> LiveView:
    """Return a view of the replicas r0, r1 and so on."""
    named = {f"r{index}": threshold for index, threshold in enumerate(thresholds)}
    return LiveView(time_s, 0.5, named)


def test_each_second_is_a_sample() -> None:
    live = [view(0.0, 0.95), view(1.0, 0.8, 1.0), view(1.99, 0.7, 0.8, 0.9)]
    samples = samples_of(SENT, live, 3.5)
    assert [sample.time_s for sample in samples] == [0, 1, 2, 3]
    assert [sample.requests_per_s for sample in samples] == [2, 3, 1, 0]
    assert [sample.in_flight for sample in samples] == [2, 1, 2, 1]
    assert [sample.ttft_p95_s for sample in samples] == [2.0, math.inf, None, None]
    assert [sample.threshold_mean for sample in samples] == [0.9, None, None, None]
    assert [sample.live_threshold for sample in samples] == [0.95, pytest.approx(0.8), None, None]
    assert [sample.num_replicas for sample in samples] == [1, 3, None, None]


def test_the_live_threshold_without_a_replica_is_the_one_that_was_set() -> None:
    assert (view(0.0).threshold, view(0.0).num_replicas) == (0.5, 0)
    assert (view(0.0, 0.8, 1.0).threshold, view(0.0, 0.8, 1.0).num_replicas) == (0.9, 2)


LOSSES = Losses({0.9: 2.0, 0.7: 6.0})


def test_a_loss_between_two_rungs_is_interpolated() -> None:
    assert [LOSSES.at(each) for each in (1.0, 0.95, 0.9, 0.8, 0.7, 0.69)] == [
        pytest.approx(loss) for loss in (0.0, 1.0, 2.0, 4.0, 6.0)
    ] + [None]
    of_a_target = Losses({0.9: 2.0})
    assert of_a_target.at(1.0) == 0.0
    nothing = Losses(refusal="/admin/autoscaler gave 403")
    assert (nothing.at(1.0), nothing.at(0.99)) == (0.0, None)


def test_a_loss_is_a_mean_over_tokens_and_a_quantile_over_answers() -> None:
    short = served(0.0, 0.1, 0.2, num_tokens=1, threshold_mean=0.7)
    long = served(0.0, 0.1, 0.2, num_tokens=3, threshold_mean=1.0)
    refused = sent(1.0, None, 1.1, status=503, error="503 queue_full")
    loss = quality_loss([short, long, refused], LOSSES)
    assert loss.mean == pytest.approx(6.0 / 4)
    assert loss.p99 == pytest.approx(6.0 * 0.99)
    plain = quality_loss([long], Losses())
    assert (plain.mean, plain.p99) == (0.0, 0.0)
    for unknown in ([], [refused], [long, served(0.0, 0.1, 0.2, threshold_mean=0.5)]):
        assert quality_loss(unknown, LOSSES).mean is None
    untold = served(0.0, 0.1, 0.2, threshold_mean=None)
    assert quality_loss([long, untold], LOSSES).p99 is None


def test_replica_hours_count_until_the_last_request() -> None:
    live = [view(0.2, 1.0), view(1.2, 0.9, 1.0), view(2.2, 0.9, 0.9), view(5.2, 0.9)]
    plan = LoadPlan("mars", [planned()], [], 0)
    requests = [served(0.0, 0.1, 9.0), served(4.2, 0.1, 9.0)]
    hours = replica_hours(Replayed(plan, requests, live))
    assert hours == pytest.approx((1.2 * 1 + 1.0 * 2 + 2.0 * 2) / 3600)
    for untold in (Replayed(plan, requests), Replayed(plan, requests, live, live_refusal=401)):
        assert replica_hours(untold) is None


def replayed(sent: list[SentRequest]) -> Replayed:
    return Replayed(LoadPlan("mars", [each.request for each in sent], [], 0), sent)


def figures(sent: list[SentRequest]) -> LoadFigures:
    return figures_of(replayed(sent), 1.0)


def load_test(losses: Losses) -> LoadTest:
    options = LoadOptions(trace=Path("t.csv"), model="mars")
    return LoadTest(options, replayed(SENT), figures(SENT), losses)


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


def test_an_unknown_loss_is_told_with_its_reason() -> None:
    test = load_test(Losses(refusal="/admin/autoscaler gave 403"))
    assert jsonable(figures_json(test))["all"]["quality_loss_mean"] is None
    console = Console(record=True, width=160, file=io.StringIO())
    print_load(test, console)
    assert "The loss of quality is not known: /admin/autoscaler gave 403." in console.export_text()
