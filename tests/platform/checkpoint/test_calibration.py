from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mars_platform.checkpoint.calibration import (
    CALIBRATION_FILE,
    GRID,
    Calibration,
    DepthCalibration,
    Observed,
    brier_score,
    calibrate_depth,
    calibration_error,
    fit_temperature,
    log_probabilities_at,
    log_probability_curves,
    read_calibration,
    reliability,
    write_calibration,
)
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.errors import UserError

BLOCK_SIZE = 2
ONE = GRID.index(1.0)

# --- curves ---------------------------------------------------------------------------------------


def some_logits(num: int, *, spread: float = 3.0, vocabulary: int = 20, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(num, vocabulary, generator=generator)


def direct(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    rows = torch.arange(len(tokens))
    return (logits.double() / temperature).log_softmax(-1)[rows, tokens].float()


def test_curves_are_log_probabilities_at_the_grid():
    logits = some_logits(50)
    tokens = torch.arange(50) % 20  # also unlikely ones
    curves = log_probability_curves(logits, tokens)
    assert curves.shape == (50, len(GRID))
    assert (GRID[0], GRID[-1]) == (1 / 8, 8.0)
    for column, temperature in enumerate(GRID):
        torch.testing.assert_close(curves[:, column], direct(logits, tokens, temperature))
        at = log_probabilities_at(curves, temperature)
        torch.testing.assert_close(at, curves[:, column], rtol=0, atol=1e-5)
    assert log_probabilities_at(curves, 1.0).equal(curves[:, ONE])


@given(
    temperature=st.floats(GRID[0], GRID[-1]),
    spread=st.sampled_from([0.3, 1.0, 3.0, 10.0]),
    vocabulary=st.sampled_from([2, 20, 300]),
)
def test_probabilities_between_grid_temperatures_are_close(temperature, spread, vocabulary):
    logits = some_logits(50, spread=spread, vocabulary=vocabulary)
    tokens = logits.argmax(-1)
    found = log_probabilities_at(log_probability_curves(logits, tokens), temperature)
    expected = direct(logits, tokens, temperature)
    torch.testing.assert_close(found.exp(), expected.exp(), rtol=0, atol=0.003)


# --- fitting --------------------------------------------------------------------------------------


def draw(num: int, temperature: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits that dividing by the temperature calibrates; likeliest tokens; which are right."""
    calibrated = some_logits(num, spread=1.5, seed=seed)
    sure, tokens = calibrated.softmax(-1).max(-1)
    correct = torch.rand(num, generator=torch.Generator().manual_seed(seed + 1)) < sure
    return calibrated * temperature, tokens, correct


def observed(logits: Tensor, tokens: Tensor, correct: Tensor) -> Observed:
    return Observed(log_probability_curves(logits, tokens), correct)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_a_known_temperature_is_recovered(temperature):
    fitting = observed(*draw(20000, temperature, seed=0))
    checking = observed(*draw(20000, temperature, seed=7))
    found = calibrate_depth(1, fitting, checking)
    assert found.temperature == pytest.approx(temperature, rel=0.05)
    assert found.ece_after is not None
    assert found.ece_after < 0.02
    if temperature != 1.0:
        assert found.ece_after < found.ece_before / 5
        assert found.brier_after < found.brier_before - 0.01


@pytest.mark.parametrize("seed", range(3))
def test_no_other_temperature_has_a_lower_loss(seed):
    logits, tokens, correct = draw(300, 1.7, seed)

    def loss(temperature: float) -> float:
        right = direct(logits, tokens, temperature).double()
        return float(-torch.where(correct, right, (-torch.expm1(right)).log()).mean())

    lowest = min(loss(2.0 ** (step / 200)) for step in range(-600, 601))
    assert loss(fit_temperature(observed(logits, tokens, correct))) < lowest + 1e-4


def test_a_fitted_temperature_stays_within_the_grid():
    logits, tokens, _ = draw(200, 1.0, seed=0)
    almost_all, almost_none = torch.ones(200).bool(), torch.zeros(200).bool()
    almost_all[logits.amax(-1).argmin()] = False
    almost_none[logits.amax(-1).argmax()] = True
    sharper = observed(logits / 100, tokens, almost_all)
    assert fit_temperature(sharper) == GRID[0]
    assert fit_temperature(observed(logits * 100, tokens, almost_none)) == GRID[-1]


@pytest.mark.parametrize("right", [True, False])
def test_temperature_one_is_kept_without_both_outcomes(right):
    logits, tokens, _ = draw(100, 3.0, seed=0)
    assert fit_temperature(observed(logits, tokens, torch.full((100,), right))) == 1.0
    assert fit_temperature(observed(logits[:0], tokens[:0], torch.zeros(0).bool())) == 1.0


def test_a_certain_but_wrong_token_has_a_finite_loss():
    logits = torch.tensor([[5000.0, 0.0], [5000.0, 0.0]])
    found = fit_temperature(observed(logits, torch.tensor([0, 0]), torch.tensor([True, False])))
    assert math.isfinite(found)


def test_depth_zero_is_measured_but_not_fitted():
    both = observed(*draw(500, 3.0, seed=0))
    found = calibrate_depth(0, both, both)
    assert found.temperature == 1.0
    assert found.ece_after == found.ece_before > 0.1
    assert calibrate_depth(1, both, both).temperature > 2.0


def test_figures_come_from_the_half_that_was_not_fitted_on():
    fitting = observed(*draw(500, 3.0, seed=0))
    logits, tokens, correct = draw(300, 1.0, seed=5)
    found = calibrate_depth(1, fitting, observed(logits, tokens, correct))
    assert (found.num_fitted, found.num_checked) == (500, 300)
    assert found.accuracy == pytest.approx(correct.double().mean().item(), abs=1e-6)
    before = direct(logits, tokens, 1.0).exp()
    after = direct(logits, tokens, found.temperature).exp()
    assert found.ece_before == pytest.approx(calibration_error(before, correct), abs=1e-6)
    assert found.brier_before == pytest.approx(brier_score(before, correct), abs=1e-6)
    assert found.ece_after == pytest.approx(calibration_error(after, correct), abs=0.003)
    assert found.brier_after == pytest.approx(brier_score(after, correct), abs=0.003)


def test_without_tokens_to_check_there_are_no_figures():
    fitting = observed(*draw(500, 3.0, seed=0))
    empty = Observed(fitting.curves[:0], fitting.correct[:0])
    found = calibrate_depth(1, fitting, empty)
    assert found.temperature > 2.0
    assert (found.num_checked, found.accuracy, found.ece_after) == (0, None, None)


# --- errors ---------------------------------------------------------------------------------------

SURE = torch.tensor([0.9, 0.2, 0.8, 0.1])
RIGHT = torch.tensor([True, True, True, False])


def test_errors_equal_values_computed_by_hand():
    # bins (.1, .2) and (.8, .9): gaps .5 - .15 and 1 - .85
    assert calibration_error(SURE, RIGHT, num_bins=2) == pytest.approx(0.25)
    assert calibration_error(SURE, RIGHT, num_bins=1) == pytest.approx(0.25)
    # a bin for each: .1, .8, .2, .1
    assert calibration_error(SURE, RIGHT) == pytest.approx(0.3)
    # bins of two and one: gaps .15 and .8 - .0
    three = torch.tensor([0.1, 0.2, 0.8]), torch.tensor([False, False, False])
    assert calibration_error(*three, num_bins=2) == pytest.approx((2 * 0.15 + 0.8) / 3)
    # .1 and .8 and .2 and .1, squared
    assert brier_score(SURE, RIGHT) == pytest.approx((0.01 + 0.64 + 0.04 + 0.01) / 4)


def test_bins_have_equal_size_and_rising_confidence():
    sure = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    bins = reliability(sure, sure > 0.5)
    assert [part.num_tokens for part in bins] == [67] * 10 + [66] * 5
    confidences = [part.confidence for part in bins]
    assert confidences == sorted(confidences)
    assert [part.accuracy for part in bins[:7]] == [0.0] * 7
    assert bins[-1].accuracy == 1.0


# --- the file -------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def calibration(model: Path) -> Calibration:
    return Calibration(
        weights=weights_fingerprint(model),
        num_items=9,
        depths=(
            DepthCalibration(temperature=1.0, num_fitted=5, num_checked=6, accuracy=1.0),
            DepthCalibration(
                temperature=0.77, num_fitted=4, num_checked=5, ece_before=0.2, ece_after=0.1
            ),
            DepthCalibration(temperature=1.0, num_fitted=3, num_checked=0),
        ),
    )


def test_a_calibration_is_read_as_it_was_written(model, calibration):
    assert read_calibration(model, BLOCK_SIZE) is None
    assert write_calibration(model, calibration) == model / CALIBRATION_FILE
    assert read_calibration(model, BLOCK_SIZE) == calibration
    assert calibration.temperatures == (1.0, 0.77, 1.0)


def refusal(model: Path, content: bytes | dict[str, Any]) -> str:
    """The line with which a file of this content is refused."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (model / CALIBRATION_FILE).write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_calibration(model, BLOCK_SIZE)
    message = str(caught.value)
    assert message.startswith(f"{model / CALIBRATION_FILE}: ")
    assert message.endswith("; delete it or run marsray calibrate again")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 10000])
def test_a_file_that_is_no_json_object_is_refused(model, content):
    assert re.search("JSON|must be an object", refusal(model, content))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format_version": 2}, "format_version"),
        ({"weights": None}, "weights"),
        ({"weights": "0" * 64}, "weights: it was made for another model's"),
        ({"num_items": 0}, "num_items"),
        (
            {"depths": [{"temperature": 1.0, "num_fitted": 0, "num_checked": 0}]},
            "depths: there are 1, but the model's block size of 2 makes 3",
        ),
        ({"date": "today"}, "date: unknown key"),
    ],
)
def test_a_file_with_an_unusable_value_is_refused(model, calibration, change, named):
    assert named in refusal(model, calibration.model_dump(mode="json") | change)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, "hot", None])
def test_an_unusable_temperature_is_refused(model, calibration, temperature):
    content = calibration.model_dump(mode="json")
    content["depths"][1]["temperature"] = temperature
    assert "depths.1.temperature" in refusal(model, content)
