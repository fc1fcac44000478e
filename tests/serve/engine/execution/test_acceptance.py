from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoding.engine_requests import make_request, make_row
from mars_platform.method.mode import Confidence, Mode
from mars_platform.method.rules import confidence, num_accepted
from mars_serve.engine.decoding_options import Outcomes, Span, Spans
from mars_serve.engine.execution.acceptance import (
    Accepted,
    accept,
    accepted_by_row,
    unpack,
    unpack_groups,
)
from mars_serve.engine.execution.reads import Reads
from mars_serve.engine.request import Draft

MEASURES = tuple(Confidence)
BANNED = torch.tensor([0, 3])
NONE = torch.tensor([], dtype=torch.long)


def reads_of(
    num_proposed: Sequence[int], thresholds: Sequence[float], measures: Sequence[Confidence]
) -> Reads:
    proposals = [(row, depth) for row, count in enumerate(num_proposed) for depth in range(count)]
    return Reads(
        row=torch.tensor([row for row, _ in proposals]),
        depth=torch.tensor([depth for _, depth in proposals]),
        thresholds=torch.tensor(thresholds, dtype=torch.float32),
        measures=torch.tensor([MEASURES.index(measure) for measure in measures]),
        used_measures=frozenset(measures),
        max_depth=max(num_proposed),
    )


def random_reads(source: random.Random, num_rows: int, measures: Sequence[Confidence]) -> Reads:
    return reads_of(
        [source.randint(1, 6) for _ in range(num_rows)],
        [source.choice([1e-6, 0.1, 0.3, 0.6, 0.9, 1.0]) for _ in range(num_rows)],
        [source.choice(measures) for _ in range(num_rows)],
    )


def random_logits(seed: int, num_reads: int, vocabulary: int, scale: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_reads, vocabulary, generator=generator) * scale


def by_the_rule(
    logits: Tensor, reads: Reads, banned: Tensor
) -> list[tuple[list[int], list[float]]]:
    """Accept row by row with the method's plain functions."""
    results = []
    for row in range(len(reads.thresholds)):
        own = torch.nonzero(reads.row == row)[:, 0]
        scores = logits[own[reads.depth[own].argsort()]]  # [proposals, vocabulary]
        tokens = scores.index_fill(-1, banned, -torch.inf).argmax(-1)
        sure = confidence(scores, tokens, MEASURES[int(reads.measures[row])])
        one = slice(row, row + 1)
        count = int(num_accepted(sure[None], reads.thresholds[one], torch.tensor([len(own)])))
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
    reads = random_reads(source, num_rows, measures)
    logits = random_logits(seed, len(reads.row), 24, scale).to(dtype)
    expected = by_the_rule(logits, reads, BANNED)
    assert unpack(accept(logits.clone(), reads, BANNED)) == expected


def test_order_of_the_reads_is_free():
    reads = random_reads(random.Random(5), 6, MEASURES)
    logits = random_logits(5, len(reads.row), 24)
    order = torch.randperm(len(reads.row), generator=torch.Generator().manual_seed(1))
    shuffled = replace(reads, row=reads.row[order], depth=reads.depth[order])
    expected = unpack(accept(logits.clone(), reads, BANNED))
    assert unpack(accept(logits[order], shuffled, BANNED)) == expected


@pytest.mark.parametrize("vocabulary", [3_000, 200_000])
def test_many_logits_equal_the_rule(vocabulary):
    """There are more logits than are handled at once; in the second case even in a single read."""
    num_rows = 40 if vocabulary < 10_000 else 8
    reads = random_reads(random.Random(2), num_rows, MEASURES)
    logits = random_logits(2, len(reads.row), vocabulary, scale=20.0)
    expected = by_the_rule(logits, reads, BANNED)
    assert unpack(accept(logits, reads, BANNED)) == expected
    assert len({len(tokens) for tokens, _ in expected}) > 1


# --- known values ---------------------------------------------------------------------------------


def test_rows_stop_by_their_own_threshold_and_measure():
    """The same proposals (.5 .3 .2) in each row: margin .2, entropy exp(-1.0297) = .3571."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().repeat(12, 1)
    rows = [
        (Confidence.PROBABILITY, 0.49, 3),
        (Confidence.PROBABILITY, 0.51, 1),
        (Confidence.MARGIN, 0.19, 3),
        (Confidence.MARGIN, 0.21, 1),
        (Confidence.ENTROPY, 0.357, 3),
        (Confidence.ENTROPY, 0.358, 1),
    ]
    sure = {Confidence.PROBABILITY: 0.5, Confidence.MARGIN: 0.2, Confidence.ENTROPY: 0.3571}
    for measure, threshold, count in rows:
        others = [(Confidence.PROBABILITY, 0.3, 5), (Confidence.ENTROPY, 1.0, 1)]
        mixed = [(measure, threshold, count), *others]
        reads = reads_of([3, 5, 4], [row[1] for row in mixed], [row[0] for row in mixed])
        results = unpack(accept(logits.clone(), reads, NONE))
        assert [tokens for tokens, _ in results] == [[1] * row[2] for row in mixed]
        for (_, found), row in zip(results, mixed, strict=True):
            assert found == pytest.approx([sure[row[0]]] * row[2], abs=1e-4)


def test_confidence_equal_to_the_threshold_passes():
    logits = torch.tensor([[0.0, 1e4]] * 3)  # certain by every measure
    for measure in MEASURES:
        [(tokens, sure)] = unpack(accept(logits.clone(), reads_of([3], [1.0], [measure]), NONE))
        assert (tokens, sure) == ([1, 1, 1], [1.0, 1.0, 1.0])


def test_a_row_without_masks_gives_one_token():
    logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]]).log()
    reads = reads_of([1, 2], [0.5, 0.5], [MEASURES[0]] * 2)
    assert [tokens for tokens, _ in unpack(accept(logits, reads, NONE))] == [[0], [0, 0]]
    alone = reads_of([1], [0.5], [MEASURES[0]])
    assert [tokens for tokens, _ in unpack(accept(logits[:1], alone, NONE))] == [[0]]


def test_banned_tokens_are_not_chosen_but_count_in_the_confidence():
    logits = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.1, 0.6, 0.1, 0.2]]).log()
    for measure, sure in [
        (Confidence.PROBABILITY, [0.3, 0.6]),
        (Confidence.MARGIN, [0.0, 0.4]),  # the banned token is likelier
    ]:
        reads = reads_of([2], [0.3], [measure])
        [(tokens, found)] = unpack(accept(logits.clone(), reads, BANNED))
        assert tokens == [2, 1]
        assert found == pytest.approx(sure)


def test_equal_logits_give_the_first_token():
    logits = torch.zeros(2, 50)
    [(tokens, _)] = unpack(accept(logits, reads_of([2], [0.001], [MEASURES[0]]), BANNED))
    assert tokens == [1, 1]


def test_given_counts_replace_the_rule():
    reads = reads_of([3, 1, 4], [1.0, 0.9, 0.1], MEASURES)
    logits = random_logits(0, 8, 24)
    proposed = logits.index_fill(-1, BANNED, -torch.inf).argmax(-1).tolist()
    results = unpack(accept(logits, reads, BANNED, torch.tensor([3, 1, 2])))
    assert [tokens for tokens, _ in results] == [proposed[:3], proposed[3:4], proposed[4:6]]
    assert [len(sure) for _, sure in results] == [3, 1, 2]


# --- damaged logits -------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("damage", [{5: torch.nan}, {3: torch.nan}, {5: torch.inf}])
def test_a_nan_at_depth_zero_shows_and_leaves_other_rows_alone(measure, damage):
    reads = reads_of([3, 3, 3], [1e-9] * 3, [MEASURES[0], measure, MEASURES[2]])
    logits = random_logits(1, 9, 24)
    logits[:, BANNED] = -9.0  # never the likeliest: no margin is 0
    sound = unpack(accept(logits.clone(), reads, BANNED))
    for token, value in damage.items():
        logits[3, token] = value
    damaged = unpack(accept(logits, reads, BANNED))
    assert len(damaged[1][0]) == len(damaged[1][1]) == 1
    assert math.isnan(damaged[1][1][0])
    assert (damaged[0], damaged[2]) == (sound[0], sound[2])
    assert len(sound[1][0]) == 3


@pytest.mark.parametrize("measure", MEASURES)
def test_a_nan_at_a_deeper_depth_ends_the_run(measure):
    reads = reads_of([4], [1e-9], [measure])
    logits = random_logits(1, 4, 24)
    logits[:, BANNED] = -9.0
    logits[2, 7] = torch.nan
    [(tokens, sure)] = unpack(accept(logits, reads, BANNED))
    assert len(tokens) == 2
    assert not any(map(math.isnan, sure))


def test_logits_that_are_all_minus_infinity_give_a_nan_confidence():
    logits = torch.full((1, 24), -torch.inf)
    for measure in MEASURES:
        [(_, sure)] = unpack(accept(logits.clone(), reads_of([1], [0.5], [measure]), BANNED))
        assert math.isnan(sure[0])


# --- drafts ---------------------------------------------------------------------------------------


def checked_reads(drafts: Sequence[Sequence[int]], num_group_reads: Sequence[int]) -> Reads:
    """Reads of rows in mode exact: at the cursor, at each draft, then at masks."""
    plain = reads_of(
        [len(row) + 1 for row in drafts], [0.5] * len(drafts), [MEASURES[0]] * len(drafts)
    )
    direct, groups, row_of = [], [], []
    for row, (own, count) in enumerate(zip(drafts, num_group_reads, strict=True)):
        begin = len(row_of)
        row_of += [row] * (len(own) + 1 + count)
        direct += range(begin, begin + len(own) + 1)
        groups += range(begin + len(own) + 1, len(row_of))
    width = plain.max_depth - 1
    padded = [[*row, *[-1] * (width - len(row))] for row in drafts]
    return replace(
        plain,
        row=torch.tensor(row_of),
        drafts=torch.tensor(padded, dtype=torch.long).view(len(drafts), width),
        direct=torch.tensor(direct),
        groups=torch.tensor(groups, dtype=torch.long),
    )


def certain(tokens: Sequence[int], vocabulary: int = 8, share: float = 0.9) -> Tensor:
    """Logits that give each token this probability: [tokens, vocabulary]."""
    logits = torch.full((len(tokens), vocabulary), (1 - share) / (vocabulary - 1))
    logits[range(len(tokens)), list(tokens)] = share
    return logits.log()


@pytest.mark.parametrize("share", [0.2, 0.9])
@pytest.mark.parametrize(
    ("drafts", "chosen", "count"),
    [
        ([], [4], 1),
        ([4, 5, 6], [4, 5, 6, 7], 4),
        ([4, 5, 6], [4, 5, 7, 7], 3),
        ([4, 5, 6], [4, 7, 6, 7], 2),
        ([4, 5, 6], [7, 5, 6, 7], 1),  # drafts behind a wrong one do not count
        ([4, 4], [4, 4, 4], 3),
    ],
)
def test_leading_right_drafts_are_accepted_at_any_confidence(drafts, chosen, count, share):
    """A row accepts one token more than its leading drafts that equal the token before them."""
    reads = checked_reads([drafts, [1, 1, 1]], [0, 0])
    logits = torch.cat([certain(chosen, share=share), certain([2, 2, 2, 2])])
    [(tokens, sure), (others, _)] = unpack(accept(logits, reads, NONE))
    assert tokens == chosen[:count]
    assert sure == pytest.approx([share] * count)
    assert others == [2]


def test_a_banned_draft_is_never_right():
    reads = checked_reads([[3, 5]], [0])
    [(tokens, _)] = unpack(accept(certain([3, 5, 6]), reads, BANNED))
    assert len(tokens) == 1
    assert tokens[0] not in BANNED


@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 6))
@settings(max_examples=150)
def test_rows_in_mode_exact_and_in_mode_threshold_share_a_step(seed, num_rows):
    """Each row follows its own rule; proposals of groups keep the order of their reads."""
    source = random.Random(seed)
    measures = [source.choice(MEASURES) for _ in range(num_rows)]
    is_exact = [source.random() < 0.6 for _ in range(num_rows)]
    counts = [source.randint(1, 5) for _ in range(num_rows)]
    num_group_reads = [source.randint(0, 6) if exact else 0 for exact in is_exact]
    reads = checked_reads([[-1] * (count - 1) for count in counts], num_group_reads)
    num_reads = len(reads.row)
    logits = random_logits(seed, num_reads, 12)
    proposed = logits.index_fill(-1, BANNED, -torch.inf).argmax(-1)
    direct, drafts = reads.direct.split(counts), reads.drafts.clone()
    for row in range(num_rows):
        if is_exact[row]:
            for depth, token in enumerate(proposed[direct[row][:-1]].tolist()):
                drafts[row, depth] = token if source.random() < 0.7 else source.randrange(4, 12)
    thresholds = torch.tensor([source.choice([0.1, 0.4, 0.8]) for _ in counts])
    indices = torch.tensor([MEASURES.index(measure) for measure in measures])
    reads = replace(
        reads,
        drafts=drafts,
        thresholds=thresholds,
        measures=indices,
        used_measures=frozenset(measures),
    )
    packed = accept(logits.clone(), reads, BANNED)
    for row, (tokens, sure) in enumerate(unpack(packed, num_rows)):
        chosen = proposed[direct[row]]
        expected = confidence(logits[direct[row]], chosen, measures[row])
        if is_exact[row]:
            right = (chosen[:-1] == drafts[row, : counts[row] - 1]).long()
            count = 1 + int(right.cumprod(0).sum())
        else:
            size = torch.tensor([counts[row]])
            count = int(num_accepted(expected[None], thresholds[row : row + 1], size))
        assert tokens == chosen[:count].tolist()
        assert sure == expected[:count].tolist()
    found = unpack_groups(packed, num_rows, sum(num_group_reads))
    assert [draft.token for draft in found] == proposed[reads.groups].tolist()
    rows = reads.row[reads.groups].tolist()
    for draft, read, row in zip(found, reads.groups.tolist(), rows, strict=True):
        one = slice(read, read + 1)
        assert draft.confidence == float(confidence(logits[one], proposed[one], measures[row]))


def test_drafts_are_compared_with_the_sampled_tokens():
    """Sampling may choose another token than the likeliest."""
    reads = checked_reads([[6, 6], [2, 2]], [1, 0])
    logits = certain([5, 5, 5, 5, 2, 2, 2])

    def choose(_):
        return torch.tensor([1, 0, 3]), torch.tensor([7, 6, 1])

    packed = accept(logits, reads, NONE, choose_tokens=choose)
    [(one, _), (other, _)] = unpack(packed, 2)
    assert one == [6, 7]  # the draft 6 is right, the one behind it is not
    assert other == [2, 2, 2]
    assert [draft.token for draft in unpack_groups(packed, 2, 1)] == [1]


def test_a_row_with_a_nan_accepts_no_draft_and_leaves_other_rows_alone():
    drafts = [[4, 5], [4, 5], [4, 5]]
    logits = certain([4, 5, 6] * 3)
    sound = unpack(accept(logits.clone(), checked_reads(drafts, [0, 0, 0]), NONE))
    logits[3, 7] = torch.nan  # depth 0 of the middle row
    damaged = unpack(accept(logits.clone(), checked_reads(drafts, [0, 0, 0]), NONE))
    assert len(damaged[1][0]) == 1
    assert math.isnan(damaged[1][1][0])
    assert (damaged[0], damaged[2]) == (sound[0], sound[2])
    assert sound[1][0] == [4, 5, 6]


def test_a_nan_at_a_checked_draft_shows_among_the_confidences():
    logits = certain([4, 5, 6])
    logits[1, 7] = torch.nan
    [(_, sure)] = unpack(accept(logits, checked_reads([[4, 5]], [0]), NONE))
    assert math.isnan(sure[1])
    logits = certain([6, 5, 6])
    logits[1, 7] = torch.nan  # behind a refused draft
    [(tokens, sure)] = unpack(accept(logits, checked_reads([[4, 5]], [0]), NONE))
    assert tokens == [6]
    assert sure == pytest.approx([0.9])


# --- rows -----------------------------------------------------------------------------------------

GROUPS = [Draft(30 + index, share) for index, share in enumerate([0.9, 0.2, 0.8, 0.95, 0.4, 0.99])]
"""Proposals of three groups of two masks."""


@pytest.mark.parametrize(
    ("mode", "has_drafter", "num_own", "expected"),
    [
        (
            Mode.EXACT,
            False,
            2,
            Accepted([7, 8], [0.5, 0.6], 1, GROUPS[2:4], num_masks_tried=2, num_masks_accepted=1),
        ),
        (
            Mode.EXACT,
            True,
            0,
            Accepted([7, 8], [0.5, 0.6], 1, GROUPS[2:4], num_masks_tried=0, num_masks_accepted=0),
        ),
        (
            Mode.THRESHOLD,
            True,
            0,
            Accepted(
                [7, 8, 32, 33],
                [0.5, 0.6, 0.8, 0.95],
                1,
                num_masks_tried=2,
                num_masks_accepted=2,
            ),
        ),
    ],
    ids=["exact", "exact with a drafter", "threshold with a drafter"],
)
def test_a_row_continues_with_the_group_of_its_outcome(mode, has_drafter, num_own, expected):
    request = make_request(mode=mode, threshold=0.7, outcomes=Outcomes.ALL)
    request.has_drafter, request.num_own_drafts = has_drafter, num_own
    row = make_row(request, 1, (2, 2, 2))
    assert accepted_by_row(row, [7, 8], [0.5, 0.6], GROUPS) == expected


def test_masks_behind_drafts_are_accepted_up_to_the_first_below_the_threshold():
    request = make_request(threshold=0.7)
    request.has_drafter = True
    found = accepted_by_row(make_row(request, 1, (2, 2, 2)), [7], [0.5], GROUPS)
    assert (found.tokens, found.num_masks_tried, found.num_masks_accepted) == ([7, 30], 2, 1)


def test_masks_without_drafts_are_counted_by_the_accepted_run():
    row = make_row(make_request(threshold=0.7), 1, (4,))
    assert accepted_by_row(row, [7, 8, 9], [0.5] * 3, []) == Accepted(
        [7, 8, 9], [0.5] * 3, num_masks_tried=4, num_masks_accepted=2
    )


@pytest.mark.parametrize(
    ("marker", "tokens", "num_right"),
    [
        (7, [7], 0),
        (8, [7, 8], 1),
        (32, [7, 8, 32], 1),
        (33, [7, 8, 32, 33], 1),
        (34, [7, 8, 32, 33], 1),
    ],
)
def test_a_run_ends_behind_a_marker(marker, tokens, num_right):
    """The draft 7 is right; as a marker it is fed again, so that the row can go on behind it."""
    spans = Spans(Span.ANSWER, {Span.ANSWER: {marker: Span.THINKING}}, {Span.THINKING: 1.0})
    request = make_request(threshold=0.7, spans=spans)
    request.has_drafter = True
    found = accepted_by_row(make_row(request, 1, (2, 2, 2)), [7, 8], [0.5, 0.6], GROUPS)
    assert (found.tokens, found.num_right) == (tokens, num_right)
    assert found.confidences == [0.5, 0.6, 0.8, 0.95][: len(tokens)]
    assert (found.num_masks_tried, found.num_masks_accepted) == (2, 2), "these were not rejected"
    exact = make_request(mode=Mode.EXACT, outcomes=Outcomes.ALL, spans=spans)
    assert accepted_by_row(make_row(exact, 1, (2, 2, 2)), [7, 8], [0.5, 0.6], GROUPS).tokens == [
        7,
        8,
    ]
