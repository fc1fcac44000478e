import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mars_platform.checkpoint.calibration import Calibration, DepthCalibration
from mars_platform.checkpoint.translations import KNOTS, ProposedRuns, fit_translation
from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence
from mars_platform.method.translation import Translation

NUM_DEPTHS, VOCABULARY = 3, 50


def observed(num_cursors, seed=0, temperature=1.0):
    """Draw runs of proposals, and the logits of each.

    The token is right as often as the softmax at ``temperature`` says. Often two tokens share
    nearly all of the probability, which entropy judges otherwise than probability.
    """
    rng = torch.Generator().manual_seed(seed)
    num = num_cursors * NUM_DEPTHS
    logits = torch.randn(num, VOCABULARY, generator=rng)
    logits[:, 0] += 14 * torch.rand(num, generator=rng)
    has_rival = torch.rand(num, generator=rng) < 0.5
    logits[has_rival, 1] += 9 * torch.rand(int(has_rival.sum()), generator=rng)
    truth = torch.multinomial((logits / temperature).softmax(-1), 1, generator=rng)[:, 0]
    proposed = logits.argmax(-1)
    cursor = torch.arange(num_cursors).repeat_interleave(NUM_DEPTHS)
    return ProposedRuns(num_cursors, cursor, truth == proposed), logits, proposed


def losses_by_hand(runs, values, threshold):
    """Return the cursors with a wrong accepted token, and the accepted tokens, one by one."""
    wrong = accepted = 0
    for cursor in range(runs.num_cursors):
        is_wrong = False
        for i in (runs.cursor == cursor).nonzero()[:, 0].tolist():
            if values[i] < threshold:
                break
            accepted += 1
            is_wrong |= not runs.correct[i]
        wrong += is_wrong
    return wrong, accepted


def loss_at(runs, values, threshold):
    wrong, accepted = losses_by_hand(runs, values, threshold)
    return wrong / (runs.num_cursors + accepted)


@pytest.mark.parametrize("measure", [Confidence.MARGIN, Confidence.ENTROPY])
def test_a_floor_of_probability_is_kept_by_other_measures(measure):
    """The fit's own data keeps the loss; other data keeps it but for chance."""
    runs, logits, proposed = observed(1_500)
    values = {each: confidence(logits, proposed, each) for each in Confidence}
    raw = values[Confidence.PROBABILITY]
    found = fit_translation(runs, raw, values[measure], measure, calibrated=False)
    others, logits, proposed = observed(1_500, seed=1)
    for floor in (0.5, 0.7, 0.8, 0.9, 0.95):
        loss = loss_at(runs, raw, floor)
        assert loss_at(runs, values[measure], found.of(floor)) <= loss
        fresh = loss_at(others, confidence(logits, proposed, measure), found.of(floor))
        assert fresh <= loss + 2.5 * math.sqrt(2 * loss / runs.num_cursors)
    assert found.of(0.9) < 0.9, "both are never above probability"


def test_a_corrected_confidence_that_is_higher_gets_a_higher_threshold():
    """The model is too unsure, so that calibration raises its confidence."""
    runs, logits, proposed = observed(2_000, temperature=0.5)
    raw = confidence(logits, proposed)
    corrected = confidence(logits / 0.5, proposed)
    found = fit_translation(runs, raw, corrected, Confidence.PROBABILITY, calibrated=True)
    assert found.of(0.7) > 0.8
    assert loss_at(runs, corrected, 0.7) > loss_at(runs, raw, 0.7), "what the bare number does"
    assert loss_at(runs, corrected, found.of(0.7)) <= loss_at(runs, raw, 0.7)


def test_with_few_wrong_tokens_no_more_are_accepted_than_by_probability():
    runs, logits, proposed = observed(30)
    raw = confidence(logits, proposed)
    always = torch.full_like(raw, 0.999)
    found = fit_translation(runs, raw, always, Confidence.ENTROPY, calibrated=False)
    for knot in KNOTS:
        _, accepted = losses_by_hand(runs, raw, knot)
        if losses_by_hand(runs, raw, knot)[0] < 10:
            assert losses_by_hand(runs, always, found.of(knot))[1] <= accepted


@given(
    seed=st.integers(0, 10**6),
    num_cursors=st.integers(1, 60),
    floors=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=5).map(sorted),
)
@example(seed=500489, num_cursors=1, floors=[0.5, 0.75])  # rounds up at a knot
def test_translations_rise_with_probability_and_end_at_one(seed, num_cursors, floors):
    runs, logits, proposed = observed(num_cursors, seed)
    values = [confidence(logits, proposed, each) for each in Confidence]
    found = fit_translation(runs, values[0], values[2], Confidence.ENTROPY, calibrated=False)
    translated = [found.of(floor) for floor in floors]
    assert translated == sorted(translated)
    assert all(0 < each <= 1 for each in translated)
    assert found.of(1.0) == 1.0


@given(seed=st.integers(0, 10**6), threshold=st.floats(0, 1), num_cursors=st.integers(1, 20))
def test_a_run_ends_at_the_first_token_below_the_threshold(seed, threshold, num_cursors):
    runs, logits, proposed = observed(num_cursors, seed)
    values = confidence(logits, proposed)
    accepted = int((runs.lowest(values) >= threshold).sum())
    assert accepted == losses_by_hand(runs, values, threshold)[1]


@pytest.mark.parametrize(
    ("probability", "threshold", "reason"),
    [
        ((), (), "1 to 64 values"),
        ((0.5,), (), "a value for each"),
        ((0.5, 0.5), (0.1, 0.2), "must rise"),
        ((0.5, 0.6), (0.3, 0.2), "must not fall"),
        ((0.5, 1.0), (0.3, 0.4), r"lie in \(0, 1\)"),
        ((0.5,), (0.0,), r"lie in \(0, 1\]"),
        ((0.5,), (math.nan,), r"lie in \(0, 1\]"),
    ],
)
def test_a_translation_that_contradicts_itself_is_refused(probability, threshold, reason):
    with pytest.raises(ValueError, match=reason):
        Translation(Confidence.ENTROPY, False, probability, threshold)


def test_a_calibration_keeps_its_translations_and_may_have_none():
    depths = (DepthCalibration(temperature=1, num_fitted=0, num_checked=0),)
    one = Translation(Confidence.ENTROPY, False, (0.5, 0.9), (0.3, 0.8))
    kept = Calibration(weights="w", num_items=2, depths=depths, translations=(one,))
    read = Calibration.model_validate_json(kept.model_dump_json())
    assert read.translation(Confidence.ENTROPY, calibrated=False) == one
    assert read.translation(Confidence.ENTROPY, calibrated=True) is None
    content = kept.model_dump(exclude={"translations"})
    assert Calibration.model_validate(content).translations == ()
    assert one.of(0.7) == pytest.approx(0.55)
