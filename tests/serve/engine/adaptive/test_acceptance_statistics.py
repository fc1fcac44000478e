from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from decoding.engine_requests import make_request
from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine.adaptive.acceptance_statistics import AcceptanceStatistics, bin_of
from mars_serve.engine.decoding_options import Sampling
from mars_serve.engine.request import Draft, LoraReference, Request

MAX_WINDOW = 4


def make_rows(count: int) -> list[Request]:
    return [make_request(f"row {index}") for index in range(count)]


def teach(
    statistics: AcceptanceStatistics, row: Request, outcomes: Sequence[tuple[int, int]]
) -> None:
    """Observe a step for each (masks, accepted tokens)."""
    for num_masks, num_accepted in outcomes:
        statistics.advance(1)
        statistics.observe(row, num_masks, num_accepted)


def estimate(statistics: AcceptanceStatistics, row: Request) -> list[float]:
    return [float(chance) for chance in statistics.probabilities([row])[0, :MAX_WINDOW]]


def test_only_proposed_depths_behind_accepted_ones_give_evidence() -> None:
    statistics, row = AcceptanceStatistics(MAX_WINDOW), make_request()
    prior = estimate(statistics, row)[0]
    teach(statistics, row, [(3, 2)] * 30)  # depth 1 accepted, depth 2 rejected, depth 3 unknown
    first, second, third, fourth = estimate(statistics, row)
    assert first > prior > second
    assert third == fourth == pytest.approx(prior)
    teach(statistics, row, [(3, 4)] * 5)  # depths 1 to 3 accepted, depth 4 not proposed
    assert estimate(statistics, row)[2] > prior
    assert estimate(statistics, row)[3] == pytest.approx(prior)


def test_drafts_are_as_likely_as_those_of_their_confidence_were() -> None:
    """The third of four drafts is wrong in each step, so the fourth gives no evidence."""
    statistics, row = AcceptanceStatistics(MAX_WINDOW), make_request(mode=Mode.EXACT)
    confidences = [0.75, 0.75, 0.9, 0.5]
    row.drafts = [Draft(7, confidence) for confidence in confidences]
    before, right, wrong, unknown = (
        statistics.probabilities([row])[0, MAX_WINDOW:],
        *(bin_of(confidence) for confidence in confidences[1:]),
    )
    assert before[right] == pytest.approx(0.75)
    teach(statistics, row, [(4, 3)] * 40)
    for same_kind in (row, make_request("like", mode=Mode.EXACT)):
        after = statistics.probabilities([same_kind])[0, MAX_WINDOW:]
        assert after[right] > 0.95
        assert after[wrong] < 0.1
        assert after[unknown] == pytest.approx(before[unknown])


def test_estimates_converge_to_the_acceptance_of_each_depth() -> None:
    statistics, rows = AcceptanceStatistics(3), make_rows(8)
    source, truth = np.random.default_rng(0), np.array([0.8, 0.3, 0.6])
    for _ in range(600):
        statistics.advance(1)
        for row in rows:
            run = int(np.cumprod(source.random(3) < truth).sum())
            statistics.observe(row, 3, run + 1)
    assert statistics.probabilities(rows)[:, :3].mean(axis=0) == pytest.approx(truth, abs=0.06)


def test_a_new_row_starts_from_what_rows_of_its_kind_taught() -> None:
    statistics, old = AcceptanceStatistics(MAX_WINDOW), make_request("old")
    prior = estimate(statistics, old)
    teach(statistics, old, [(4, 1)] * 60)
    statistics.forget(old.id)
    for same_kind in (make_request("like"), make_request("near", threshold=0.96)):
        assert estimate(statistics, same_kind)[0] < 0.2
    for other_kind in (
        make_request("other measure", confidence=Confidence.MARGIN),
        make_request("lower", threshold=0.6),
    ):
        assert estimate(statistics, other_kind) == pytest.approx(prior)


def test_exact_rows_learn_apart_from_other_modes_and_temperatures() -> None:
    """The acceptance of sampled drafts depends on the noise, and thus on the temperature."""
    statistics, threshold = AcceptanceStatistics(MAX_WINDOW), make_request("threshold")
    greedy, like, warm = (
        make_request(name, mode=Mode.EXACT, sampling=Sampling(temperature))
        for name, temperature in [("greedy", 0.0), ("like", 0.0), ("warm", 1.0)]
    )
    prior = estimate(statistics, threshold)
    teach(statistics, greedy, [(4, 1)] * 60)
    assert estimate(statistics, like)[0] < 0.2
    assert estimate(statistics, threshold) == estimate(statistics, warm) == pytest.approx(prior)


def test_a_forgotten_row_leaves_nothing_to_the_next_row_in_its_entry() -> None:
    statistics, rows = AcceptanceStatistics(MAX_WINDOW), make_rows(40)
    for row in rows:
        teach(statistics, row, [(4, 1)] * 20)
        statistics.observe(row, 4, 1)
        statistics.forget(row.id)
    statistics.forget("never seen")
    teach(statistics, rows[0], [(4, 5)])
    best, fresh = estimate(statistics, rows[0]), estimate(statistics, make_request("new"))
    assert fresh[0] < best[0] < 0.3


def test_an_adapter_learns_nothing_from_the_one_that_was_in_its_slot() -> None:
    statistics, rows = AcceptanceStatistics(MAX_WINDOW), make_rows(4)
    plain, first, second, beside = rows
    for row, name, slot in ((first, "a", 0), (second, "b", 0), (beside, "c", 1)):
        row.lora, row.lora_slot = LoraReference(name, "", name), slot
    prior = estimate(statistics, plain)
    teach(statistics, beside, [(4, 1)] * 60)
    teach(statistics, first, [(4, 1)] * 60)
    taught = estimate(statistics, beside)
    assert estimate(statistics, second) == prior
    for _ in range(9):
        statistics.observe(first, 4, 1)
    statistics.observe(second, 4, 5)
    assert estimate(statistics, second)[0] > prior[0]
    assert estimate(statistics, beside) == taught
    assert taught[0] < 0.2
