import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence, num_accepted, visibility

# --- acceptance -----------------------------------------------------------------------------------


def plain_count(confidences, threshold, num_proposed):
    count = 1
    while count < num_proposed and confidences[count] >= threshold:
        count += 1
    return count


@st.composite
def acceptance_cases(draw):
    rows, depths = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    level = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])  # equal values come up often
    confidences = [[draw(level) for _ in range(depths)] for _ in range(rows)]
    thresholds = [draw(level) for _ in range(rows)]
    return confidences, thresholds, [draw(st.integers(1, depths)) for _ in range(rows)]


@given(acceptance_cases())
@settings(max_examples=200)
def test_the_count_equals_that_of_a_plain_loop(case):
    confidences, thresholds, proposed = case
    counts = num_accepted(
        torch.tensor(confidences), torch.tensor(thresholds), torch.tensor(proposed)
    )
    expected = [plain_count(*row) for row in zip(confidences, thresholds, proposed, strict=True)]
    assert counts.tolist() == expected


# --- confidence -----------------------------------------------------------------------------------


def plain_confidence(logits, token, measure):
    """The definitions, in double precision."""
    probabilities = np.exp(logits.astype(np.float64) - logits.max())
    probabilities /= probabilities.sum()
    if measure is Confidence.PROBABILITY:
        return probabilities[token]
    if measure is Confidence.MARGIN:
        return max(0.0, probabilities[token] - np.delete(probabilities, token).max())
    some = probabilities[probabilities > 0]
    return np.exp((some * np.log(some)).sum())


@pytest.mark.parametrize("measure", Confidence)
@given(
    hnp.arrays(np.float32, (3, 2, 7), elements=st.floats(-30, 30, width=32)),
    hnp.arrays(np.int64, (3, 2), elements=st.integers(0, 6)),
)
@settings(max_examples=100)
def test_measures_equal_their_definitions(measure, logits, tokens):
    found = confidence(torch.from_numpy(logits), torch.from_numpy(tokens), measure)
    rows = zip(logits.reshape(6, 7), tokens.reshape(6), strict=True)
    expected = [plain_confidence(*row, measure) for row in rows]
    assert found.dtype == torch.float32
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-4, abs=2e-6)
    assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("measure", Confidence)
def test_measures_reach_both_ends_of_their_range(measure):
    flat, sharp = torch.zeros(1, 8), torch.tensor([[0.0, 1e4, 0.0, 0.0]])
    lowest = 0.0 if measure is Confidence.MARGIN else 1 / 8
    for logits, expected in [(flat, lowest), (sharp, 1.0)]:
        found = confidence(logits, torch.tensor([1]), measure)
        assert found.tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("measure", Confidence)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tokens_of_probability_zero_do_not_count(measure, dtype):
    logits = torch.tensor([[1.0, -torch.inf, 3.0, 2.0]], dtype=dtype)
    finite = logits.float().clamp(min=-300)
    found = confidence(logits, torch.tensor([2]), measure)
    assert found.dtype == torch.float32
    assert found.tolist() == confidence(finite, torch.tensor([2]), measure).tolist()
    assert 0 < float(found) < 1


@pytest.mark.parametrize("measure", Confidence)
@pytest.mark.parametrize("place", [0, 2])
def test_logits_with_a_nan_have_no_confidence(measure, place):
    logits = torch.tensor([[1.0, 0.5, 3.0], [1.0, 0.5, 3.0]])
    logits[0, place] = torch.nan
    found = confidence(logits, torch.tensor([2, 2]), measure)
    assert found.isnan().tolist() == [True, False]


# --- visibility -----------------------------------------------------------------------------------


@st.composite
def rows_of_slots(draw):
    slots = draw(st.integers(1, 12))

    def column(values):
        return torch.tensor([draw(st.lists(values, min_size=slots, max_size=slots))])

    block_size, offset = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    position = column(st.integers(0, 9))
    block = (position + offset) // block_size
    return column(st.integers(-1, 1)), position, block, column(st.booleans())


def sees(query, key):
    """The rule for two slots, each (document, position, block, noisy)."""
    if query[0] != key[0]:
        return False
    if not query[3]:
        return not key[3] and key[1] <= query[1]
    if key[3]:
        return key[2] == query[2] and key[1] <= query[1]
    return key[2] < query[2]


@given(rows_of_slots())
@settings(max_examples=200)
def test_visibility_equals_the_rule_for_each_pair_of_slots(columns):
    slots = list(zip(*(column[0].tolist() for column in columns), strict=True))
    expected = [[sees(query, key) for key in slots] for query in slots]
    assert visibility(*columns)[0].tolist() == expected


def test_rows_have_masks_of_their_own():
    document = torch.zeros(2, 3, dtype=torch.long)
    position = torch.tensor([[0, 1, 2], [2, 1, 0]])
    visible = visibility(document, position, position // 4, torch.zeros(2, 3, dtype=torch.bool))
    assert visible[0].tolist() == torch.ones(3, 3).tril().bool().tolist()
    assert visible[1].tolist() == torch.ones(3, 3).triu().bool().tolist()
