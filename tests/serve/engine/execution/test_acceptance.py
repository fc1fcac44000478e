from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.engine_requests import make_request, make_row
from mars_platform.method.mode import Confidence, Mode
from mars_platform.method.rules import confidence
from mars_platform.method.rules import num_accepted as num_accepted_by_rule
from mars_serve.engine.decoding_options import Outcomes, Span, Spans
from mars_serve.engine.execution.acceptance import (
    Accepted,
    accept,
    num_accepted,
)
from mars_serve.engine.execution.proposals import ChooseTokens, build_reads, propose, unpack
from mars_serve.engine.kernels import acceptance
from mars_serve.engine.kernels.native import native_for
from mars_serve.engine.request import Draft
from mars_serve.engine.scheduled_row import ScheduledRow

MEASURES = tuple(Confidence)
BANNED = torch.tensor([0, 3])
NONE = torch.tensor([], dtype=torch.long)


def rows_of(
    num_proposed: Sequence[int], thresholds: Sequence[float], measures: Sequence[Confidence]
) -> list[ScheduledRow]:
    """Rows that feed masks, check no drafts, and report confidences."""
    requests = [
        make_request(threshold=threshold, confidence=measure, reports_rejected=True)
        for threshold, measure in zip(thresholds, measures, strict=True)
    ]
    return [
        make_row(request, 1, (count - 1,))
        for request, count in zip(requests, num_proposed, strict=True)
    ]


def random_rows(
    source: random.Random, num_rows: int, measures: Sequence[Confidence]
) -> list[ScheduledRow]:
    return rows_of(
        [source.randint(1, 6) for _ in range(num_rows)],
        [source.choice([1e-6, 0.1, 0.3, 0.6, 0.9, 1.0]) for _ in range(num_rows)],
        [source.choice(measures) for _ in range(num_rows)],
    )


def accepted_of(
    logits: Tensor,
    rows: Sequence[ScheduledRow],
    banned: Tensor,
    choose_tokens: ChooseTokens | None = None,
) -> list[Accepted]:
    """Return the result of each row for its logits."""
    reads = build_reads(rows, None)
    tokens, confidences = unpack(propose(logits, reads, banned, choose_tokens))
    results, begin = [], 0
    for row in rows:
        own = slice(begin, begin + row.num_reads)
        count = num_accepted(row, tokens[own], confidences[own])
        results.append(accept(row, tokens[own], confidences[own], count))
        begin = own.stop
    assert begin == len(logits)
    return results


def runs_of(
    logits: Tensor, rows: Sequence[ScheduledRow], banned: Tensor, **options: Any
) -> list[tuple[list[int], list[float]]]:
    """Tokens and confidences that each row accepts."""
    found = accepted_of(logits, rows, banned, **options)
    return [(each.tokens, each.confidences) for each in found]


def random_logits(seed: int, num_reads: int, vocabulary: int, scale: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_reads, vocabulary, generator=generator) * scale


def by_the_rule(
    logits: Tensor, rows: Sequence[ScheduledRow], banned: Tensor
) -> list[tuple[list[int], list[float]]]:
    """Accept row by row with the method's plain functions."""
    results = []
    for row, scores in zip(rows, logits.split([row.num_reads for row in rows]), strict=True):
        request = row.request
        tokens = scores.index_fill(-1, banned, -torch.inf).argmax(-1)
        sure = confidence(scores, tokens, request.options.confidence)
        threshold = torch.tensor([request.plan.threshold], dtype=torch.float32)
        count = int(num_accepted_by_rule(sure[None], threshold, torch.tensor([len(scores)])))
        results.append((tokens[:count].tolist(), sure[:count].tolist()))
    return results


# --- against the rule -----------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 7),
    measures=st.lists(st.sampled_from(MEASURES), min_size=1, max_size=3, unique=True),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.1, 2.0, 6.0]),
)
@settings(max_examples=200)
def test_equals_the_rule_row_by_row(seed, num_rows, measures, dtype, scale):
    source = random.Random(seed)
    rows = random_rows(source, num_rows, measures)
    logits = random_logits(seed, sum(row.num_reads for row in rows), 24, scale).to(dtype)
    expected = by_the_rule(logits, rows, BANNED)
    assert runs_of(logits.clone(), rows, BANNED) == expected


@given(
    seed=st.integers(0, 2**32 - 1),
    measures=st.lists(st.sampled_from(MEASURES), min_size=1, max_size=3, unique=True),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=50)
def test_the_operator_of_captured_steps_proposes_the_same(seed, measures, dtype):
    rows = random_rows(random.Random(seed), 4, measures)
    reads = build_reads(rows, None)
    logits = random_logits(seed, len(reads.measures), 24).to(dtype)
    is_banned = torch.zeros(24, dtype=torch.bool).index_fill(0, BANNED, True)
    ones = torch.ones(len(logits), dtype=torch.float64)
    found = acceptance.propose(logits, is_banned, reads.measures, ones)
    assert found.equal(propose(logits.clone(), reads, BANNED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [24, 39, 1_000])
@pytest.mark.parametrize("temperatures", [None, [1.0, 0.7, 1.6, 2.5, 0.4, 1.2]])
def test_functions_of_cpp_propose_the_same(vocabulary, dtype, temperatures):
    native = native_for(torch.device("cpu"), dtype)
    rows = random_rows(random.Random(0), 30, [Confidence.PROBABILITY])
    if temperatures is not None:
        for row in rows[::2]:
            row.request.options = replace(row.request.options, calibrated=True)
    reads = build_reads(rows, temperatures)
    logits = random_logits(1, len(reads.measures), vocabulary, 3.0).to(dtype)
    logits[1], logits[2, BANNED], logits[3, BANNED] = -torch.inf, 50.0, torch.nan
    logits[4, 7], logits[5, 21], logits[6, :] = torch.nan, torch.inf, 1.0
    logits[7, 20:22] = 30.0
    exact = propose(logits.clone(), reads, BANNED)
    found = native.propose(logits, BANNED, reads.native_divisors())
    assert found[:, 0].equal(exact[:, 0])
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 4e-4, "atol": 1e-30}
    pair = found[:, 1].view(torch.float32), exact[:, 1].view(torch.float32)
    torch.testing.assert_close(*pair, **tolerance, equal_nan=True)


@pytest.mark.parametrize("vocabulary", [3_000, 200_000])
def test_many_logits_equal_the_rule(vocabulary):
    """There are more logits than are handled at once; in the second case even in a single read."""
    num_rows = 40 if vocabulary < 10_000 else 8
    rows = random_rows(random.Random(2), num_rows, MEASURES)
    logits = random_logits(2, sum(row.num_reads for row in rows), vocabulary, scale=20.0)
    expected = by_the_rule(logits, rows, BANNED)
    for row, (tokens, sure), own in zip(rows, runs_of(logits, rows, BANNED), expected, strict=True):
        # The only confidence of a row decides nothing, and its part of the logits may have none.
        assert (tokens, sure) == own or (tokens == own[0] and row.num_reads == sure[0] == 1)
    assert len({len(tokens) for tokens, _ in expected}) > 1


# --- damaged logits -------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("damage", [{5: torch.nan}, {3: torch.nan}, {5: torch.inf}])
def test_a_nan_at_depth_zero_shows_and_leaves_other_rows_alone(measure, damage):
    rows = rows_of([3, 3, 3], [1e-9] * 3, [MEASURES[0], measure, MEASURES[2]])
    logits = random_logits(1, 9, 24)
    logits[:, BANNED] = -9.0  # never the likeliest: no margin is 0
    sound = runs_of(logits.clone(), rows, BANNED)
    for token, value in damage.items():
        logits[3, token] = value
    damaged = runs_of(logits, rows, BANNED)
    assert len(damaged[1][0]) == len(damaged[1][1]) == 1
    assert math.isnan(damaged[1][1][0])
    assert (damaged[0], damaged[2]) == (sound[0], sound[2])
    assert len(sound[1][0]) == 3


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_rows_without_use_for_confidences_choose_the_same_and_show_damage(damage):
    rows = [make_row(make_request(mode=mode), 1, (0,)) for mode in (Mode.AR, Mode.EXACT, Mode.AR)]
    logits = random_logits(1, 3, 24)
    logits[:, BANNED] = 9.0
    likeliest = logits.index_fill(-1, BANNED, -torch.inf).argmax(-1).tolist()
    logits[1, 5] = damage
    (first, *_), (_, [damaged]), last = runs_of(logits, rows, BANNED)
    assert (first, last) == ([likeliest[0]], ([likeliest[2]], [1.0]))
    assert math.isnan(damaged)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_nan_at_a_deeper_depth_ends_the_run(measure):
    rows = rows_of([4], [1e-9], [measure])
    logits = random_logits(1, 4, 24)
    logits[:, BANNED] = -9.0
    logits[2, 7] = torch.nan
    [(tokens, sure)] = runs_of(logits, rows, BANNED)
    assert len(tokens) == 2
    assert not any(map(math.isnan, sure))


def test_logits_that_are_all_minus_infinity_give_a_nan_confidence():
    logits = torch.full((1, 24), -torch.inf)
    for measure in MEASURES:
        [(_, sure)] = runs_of(logits.clone(), rows_of([1], [0.5], [measure]), BANNED)
        assert math.isnan(sure[0])


# --- drafts ---------------------------------------------------------------------------------------


def checked_rows(
    drafts: Sequence[Sequence[int]], num_group_reads: Sequence[int]
) -> list[ScheduledRow]:
    """Rows in mode exact, which read at the cursor, at each draft, then at the last group."""
    rows = []
    for own, count in zip(drafts, num_group_reads, strict=True):
        request = make_request(mode=Mode.EXACT, reports_rejected=True)
        request.drafts = [Draft(token, 0.5) for token in own]
        rows.append(make_row(request, 1, (*[0] * len(own), count)))
    return rows


def certain(tokens: Sequence[int], vocabulary: int = 8, share: float = 0.9) -> Tensor:
    """Logits that give each token this probability: [tokens, vocabulary]."""
    logits = torch.full((len(tokens), vocabulary), (1 - share) / (vocabulary - 1))
    logits[range(len(tokens)), list(tokens)] = share
    return logits.log()


def test_a_banned_draft_is_never_right():
    rows = checked_rows([[3, 5]], [0])
    [(tokens, _)] = runs_of(certain([3, 5, 6]), rows, BANNED)
    assert len(tokens) == 1
    assert tokens[0] not in BANNED


@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 6))
@settings(max_examples=150)
def test_rows_in_mode_exact_and_in_mode_threshold_share_a_step(seed, num_rows):
    """Each row follows its own rule; proposals of groups keep the order of their reads."""
    source = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        if source.random() < 0.6:
            drafts = [source.randrange(4, 12) for _ in range(source.randint(0, 4))]
            rows += checked_rows([drafts], [source.randint(0, 6)])
        else:
            rows += random_rows(source, 1, MEASURES)
    counts = [row.num_reads for row in rows]
    logits = random_logits(seed, sum(counts), 12)
    proposed = logits.index_fill(-1, BANNED, -torch.inf).argmax(-1)
    for row, chosen in zip(rows, proposed.split(counts), strict=True):
        for depth, draft in enumerate(row.request.drafts):
            if source.random() < 0.7:
                row.request.drafts[depth] = draft._replace(token=int(chosen[depth]))
    found = accepted_of(logits.clone(), rows, BANNED)
    split = zip(rows, logits.split(counts), proposed.split(counts), found, strict=True)
    for row, scores, chosen, result in split:
        direct, request = slice(0, row.num_proposed), row.request
        measure = MEASURES[0] if request.plan.checks_drafts else request.options.confidence
        expected = confidence(scores, chosen, measure)
        if request.plan.checks_drafts:
            drafts = torch.tensor([draft.token for draft in request.drafts], dtype=torch.long)
            right = (chosen[direct][:-1] == drafts).long()
            count = 1 + int(right.cumprod(0).sum())
            groups = list(zip(chosen.tolist(), expected.tolist(), strict=True))[row.num_proposed :]
            is_last = count == row.num_proposed
            drafted = [(draft.token, draft.confidence) for draft in result.next_drafts]
            assert drafted == (groups if is_last else [])
        else:
            threshold = torch.tensor([request.plan.threshold], dtype=torch.float32)
            size = torch.tensor([row.num_proposed])
            count = int(num_accepted_by_rule(expected[None, direct], threshold, size))
        assert result.tokens == chosen[:count].tolist()
        assert result.confidences == expected[:count].tolist()


def test_drafts_are_compared_with_the_sampled_tokens():
    """Sampling may choose another token than the likeliest."""
    rows = checked_rows([[6, 6], [2, 2]], [0, 0])
    logits = certain([5, 5, 5, 2, 2, 2])

    def choose(_, tokens):
        tokens[:2] = torch.tensor([6, 7])

    one, other = accepted_of(logits, rows, NONE, choose)
    assert one.tokens == [6, 7]  # the draft 6 is right, the one behind it is not
    assert other.tokens == [2, 2, 2]


def test_a_row_with_a_nan_accepts_no_draft_and_leaves_other_rows_alone():
    drafts = [[4, 5], [4, 5], [4, 5]]
    logits = certain([4, 5, 6] * 3)
    sound = runs_of(logits.clone(), checked_rows(drafts, [0, 0, 0]), NONE)
    logits[3, 7] = torch.nan  # depth 0 of the middle row
    damaged = runs_of(logits.clone(), checked_rows(drafts, [0, 0, 0]), NONE)
    assert len(damaged[1][0]) == 1
    assert math.isnan(damaged[1][1][0])
    assert (damaged[0], damaged[2]) == (sound[0], sound[2])
    assert sound[1][0] == [4, 5, 6]


def test_a_nan_at_a_checked_draft_shows_among_the_confidences():
    logits = certain([4, 5, 6])
    logits[1, 7] = torch.nan
    [(_, sure)] = runs_of(logits, checked_rows([[4, 5]], [0]), NONE)
    assert math.isnan(sure[1])
    logits = certain([6, 5, 6])
    logits[1, 7] = torch.nan  # behind a refused draft
    [(tokens, sure)] = runs_of(logits, checked_rows([[4, 5]], [0]), NONE)
    assert tokens == [6]
    assert sure == pytest.approx([0.9])


# --- rows -----------------------------------------------------------------------------------------

GROUPS = [Draft(30 + index, share) for index, share in enumerate([0.9, 0.2, 0.8, 0.95, 0.4, 0.99])]
"""Proposals of three groups of two masks."""
READS = [7, 8, 9, *(draft.token for draft in GROUPS)]
CONFIDENCES = [0.5, 0.8, 0.95, *(draft.confidence for draft in GROUPS)]


@pytest.mark.parametrize("num_own", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_row_continues_with_the_group_of_its_outcome(num_own, count):
    """Only those of the drafts that come from masks count as tries of masks."""
    request = make_request(mode=Mode.EXACT, outcomes=Outcomes.ALL)
    request.num_own_drafts = num_own
    assert accept(make_row(request, 1, (2, 2, 2)), READS, CONFIDENCES, count) == Accepted(
        READS[:count],
        CONFIDENCES[:count],
        count - 1,
        GROUPS[2 * count - 2 : 2 * count],
        num_masks_tried=num_own,
        num_masks_accepted=min(num_own, count - 1),
    )


@pytest.mark.parametrize(("draft", "num_right"), [(8, 2), (5, 1)])
def test_a_draft_that_was_not_fed_is_compared_with_the_token_in_its_place(draft, num_right):
    request = make_request(mode=Mode.EXACT)
    request.set_drafts([Draft(token, 0.5) for token in (7, draft, 9)])
    found = accept(make_row(request, 1, (0, 0)), READS[:2], CONFIDENCES[:2], 2)
    assert (found.num_masks_tried, found.num_masks_accepted) == (2, num_right)
    assert found.num_right == 1
    found = accept(make_row(request, 1, (0, 0)), READS[:2], CONFIDENCES[:2], 1)
    assert (found.num_masks_tried, found.num_masks_accepted) == (1, 0)


def test_a_draft_that_was_not_fed_is_not_judged_by_a_drawn_number_or_broken_logits():
    request = make_request(mode=Mode.EXACT)
    request.set_drafts([Draft(token, 0.5) for token in (7, 5, 9)])
    row = make_row(request, 1, (0, 0))
    drawn = accept(row, READS[:2], CONFIDENCES[:2], 2, is_drawn=True)
    assert (drawn.num_masks_tried, drawn.num_masks_accepted) == (1, 1)
    broken = accept(make_row(request, 1, (0,)), READS[:1], [math.nan], 1)
    assert (broken.num_masks_tried, broken.num_masks_accepted) == (0, 0)


def test_an_outcome_without_masks_leaves_no_drafts():
    row = make_row(make_request(mode=Mode.EXACT), 1, (0, 0, 2))
    assert accept(row, READS[:5], CONFIDENCES[:5], 2).next_drafts == []
    assert accept(row, READS[:5], CONFIDENCES[:5], 3).next_drafts == GROUPS[:2]


def test_masks_without_drafts_are_counted_by_the_accepted_run():
    row = make_row(make_request(threshold=0.7), 1, (4,))
    assert accept(row, READS[:5], CONFIDENCES[:5], 3) == Accepted(
        [7, 8, 9], CONFIDENCES[:3], num_masks_tried=4, num_masks_accepted=2
    )


@pytest.mark.parametrize(
    ("marker", "tokens"),
    [
        (7, [7]),
        (8, [7, 8]),
        (9, [7, 8, 9]),
        (10, [7, 8, 9]),
    ],
)
def test_a_run_ends_behind_a_marker(marker, tokens):
    spans = Spans(Span.ANSWER, {Span.ANSWER: {marker: Span.THINKING}}, {Span.THINKING: 1.0})
    row = make_row(make_request(threshold=0.7, spans=spans), 1, (4,))
    found = accept(row, READS[:5], CONFIDENCES[:5], 3)
    assert found.tokens == tokens
    assert found.confidences == CONFIDENCES[: len(tokens)]
    assert (found.num_masks_tried, found.num_masks_accepted) == (4, 2), "these were not rejected"
    exact = make_request(mode=Mode.EXACT, outcomes=Outcomes.ALL, spans=spans)
    assert accept(make_row(exact, 1, (2, 2, 2)), READS, CONFIDENCES, 2).tokens == [7, 8]
