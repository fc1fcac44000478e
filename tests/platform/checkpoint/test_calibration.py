from __future__ import annotations

import json
import math
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
from mars_platform.checkpoint.files import check_writable
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.errors import UserError

BLOCK_SIZE = 2
ONE = GRID.index(1.0)

# Curves


def some_logits(num: int, *, spread: float = 3.0, vocabulary: int = 20, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(num, vocabulary, generator=generator)


def direct(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    rows = torch.arange(len(tokens))
    return (logits.double() / temperature).log_softmax(-1)[rows, tokens].float()


def test_curves_are_log_probabilities_at_the_grid() -> None:
    logits = some_logits(50)
    tokens = torch.arange(50) % 20  # not the likeliest ones only
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
def test_between_the_grid_probabilities_are_close(
    temperature: float, spread: float, vocabulary: int
) -> None:
    logits = some_logits(50, spread=spread, vocabulary=vocabulary)
    tokens = logits.argmax(-1)
    found = log_probabilities_at(log_probability_curves(logits, tokens), temperature)
    expected = direct(logits, tokens, temperature)
    torch.testing.assert_close(found.exp(), expected.exp(), rtol=0, atol=0.003)


def test_curves_of_half_precision_are_taken_in_float32() -> None:
    logits, tokens = some_logits(10).bfloat16(), torch.zeros(10, dtype=torch.long)
    curves = log_probability_curves(logits, tokens)
    assert curves.equal(log_probability_curves(logits.float(), tokens))


# Fitting


def draw(num: int, temperature: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits that are calibrated once divided by the temperature; likeliest tokens; right ones."""
    calibrated = some_logits(num, spread=1.5, seed=seed)
    sure, tokens = calibrated.softmax(-1).max(-1)
    correct = torch.rand(num, generator=torch.Generator().manual_seed(seed + 1)) < sure
    return calibrated * temperature, tokens, correct


def observed(logits: Tensor, tokens: Tensor, correct: Tensor) -> Observed:
    return Observed(log_probability_curves(logits, tokens), correct)


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_a_known_temperature_is_recovered(temperature: float) -> None:
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
def test_no_temperature_is_likelier(seed: int) -> None:
    logits, tokens, correct = draw(300, 1.7, seed)

    def loss(temperature: float) -> float:
        right = direct(logits, tokens, temperature).double()
        return float(-torch.where(correct, right, (-torch.expm1(right)).log()).mean())

    lowest = min(loss(2.0 ** (step / 200)) for step in range(-600, 601))
    assert loss(fit_temperature(observed(logits, tokens, correct))) < lowest + 1e-4


def test_the_range_ends_where_the_search_ends() -> None:
    logits, tokens, _ = draw(200, 1.0, seed=0)
    almost_all, almost_none = torch.ones(200).bool(), torch.zeros(200).bool()
    almost_all[logits.amax(-1).argmin()] = False
    almost_none[logits.amax(-1).argmax()] = True
    sharper = observed(logits / 100, tokens, almost_all)
    assert fit_temperature(sharper) == GRID[0]
    assert fit_temperature(observed(logits * 100, tokens, almost_none)) == GRID[-1]


@pytest.mark.parametrize("right", [True, False])
def test_without_both_outcomes_nothing_is_fitted(right: bool) -> None:
    logits, tokens, _ = draw(100, 3.0, seed=0)
    assert fit_temperature(observed(logits, tokens, torch.full((100,), right))) == 1.0
    assert fit_temperature(observed(logits[:0], tokens[:0], torch.zeros(0).bool())) == 1.0


def test_certain_and_wrong_has_a_finite_loss() -> None:
    logits = torch.tensor([[5000.0, 0.0], [5000.0, 0.0]])
    found = fit_temperature(observed(logits, torch.tensor([0, 0]), torch.tensor([True, False])))
    assert math.isfinite(found)


def test_depth_zero_is_reported_and_not_fitted() -> None:
    both = observed(*draw(500, 3.0, seed=0))
    found = calibrate_depth(0, both, both)
    assert found.temperature == 1.0
    assert found.ece_after == found.ece_before > 0.1
    assert calibrate_depth(1, both, both).temperature > 2.0


def test_figures_come_from_the_half_to_check_on() -> None:
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


def test_nothing_to_check_on() -> None:
    fitting = observed(*draw(500, 3.0, seed=0))
    empty = Observed(fitting.curves[:0], fitting.correct[:0])
    found = calibrate_depth(1, fitting, empty)
    assert found.temperature > 2.0
    assert (found.num_checked, found.accuracy, found.ece_after) == (0, None, None)


# Errors

SURE = torch.tensor([0.9, 0.2, 0.8, 0.1])
RIGHT = torch.tensor([True, True, True, False])


def test_known_errors() -> None:
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


def test_bins_are_of_equal_size_and_rise() -> None:
    sure = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    bins = reliability(sure, sure > 0.5)
    assert [part.num_tokens for part in bins] == [67] * 10 + [66] * 5
    confidences = [part.confidence for part in bins]
    assert confidences == sorted(confidences)
    assert [part.accuracy for part in bins[:7]] == [0.0] * 7
    assert bins[-1].accuracy == 1.0


def test_few_tokens_have_few_bins() -> None:
    assert len(reliability(SURE, RIGHT)) == 4
    assert reliability(SURE[:0], RIGHT[:0]) == []


def test_the_order_of_tokens_does_not_matter() -> None:
    sure = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    right = torch.rand(1000, generator=torch.Generator().manual_seed(1)) < sure
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(2))
    expected = calibration_error(sure, right)
    assert calibration_error(sure[order], right[order]) == pytest.approx(expected, abs=1e-12)


# Weights


def save(path: Path, name: str = "model.safetensors", **tensors: Tensor) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / name)
    return path


def weights() -> dict[str, Tensor]:
    return {
        "a": torch.arange(12.0).reshape(3, 4),
        "b": torch.ones(2, 2, 2, dtype=torch.bfloat16),
        "c": torch.ones(5),
        "d": torch.tensor(2.0),
    }


def test_fingerprint_does_not_depend_on_the_files(tmp_path: Path) -> None:
    whole = weights_fingerprint(save(tmp_path / "whole", **weights()))
    shards = tmp_path / "shards"
    for name, tensor in weights().items():
        save(shards, f"z-{name}.safetensors", **{name: tensor})
    assert weights_fingerprint(shards) == whole
    assert len(whole) == 64


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.arange(12.0).reshape(3, 4) + 1},
        {"a": torch.arange(12.0).reshape(2, 6)},
        {"a": torch.arange(12.0).reshape(3, 4).double()},
        {"b": 2 * torch.ones(2, 2, 2, dtype=torch.bfloat16)},
        {"c": torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0])},
        {"d": torch.tensor(3.0)},
        {"e": torch.ones(1)},
    ],
)
def test_fingerprint_tells_weights_apart(tmp_path: Path, other: dict[str, Tensor]) -> None:
    ours = weights_fingerprint(save(tmp_path / "ours", **weights()))
    assert weights_fingerprint(save(tmp_path / "theirs", **{**weights(), **other})) != ours


def test_damaged_weights(tmp_path: Path) -> None:
    file = save(tmp_path, **weights()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        weights_fingerprint(tmp_path)


# The file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path / "model", **weights())


@pytest.fixture
def calibration(model: Path) -> Calibration:
    unseen = DepthCalibration(temperature=1.0, num_fitted=3, num_checked=0)
    return Calibration(
        weights=weights_fingerprint(model),
        num_items=9,
        depths=(
            DepthCalibration(temperature=1.0, num_fitted=5, num_checked=6, accuracy=1.0),
            DepthCalibration(
                temperature=0.77, num_fitted=4, num_checked=5, ece_before=0.2, ece_after=0.1
            ),
            unseen,
        ),
    )


def test_round_trip(model: Path, calibration: Calibration) -> None:
    assert read_calibration(model, BLOCK_SIZE) is None
    file = write_calibration(model, calibration)
    assert file == model / CALIBRATION_FILE
    assert read_calibration(model, BLOCK_SIZE) == calibration
    assert calibration.temperatures == (1.0, 0.77, 1.0)
    before = file.read_bytes()
    write_calibration(model, calibration)
    assert file.read_bytes() == before
    assert sorted(path.name for path in model.iterdir()) == [CALIBRATION_FILE, "model.safetensors"]


def refusal(model: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_calibration(model, BLOCK_SIZE)
    message = str(caught.value)
    assert message.startswith(f"{model / CALIBRATION_FILE}: ")
    assert message.endswith("; delete it or run marsray calibrate again")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 10000])
def test_no_object(model: Path, content: bytes) -> None:
    (model / CALIBRATION_FILE).write_bytes(content)
    assert "JSON" in refusal(model) or "must be an object" in refusal(model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format_version": 2}, "format_version"),
        ({"weights": None}, "weights"),
        ({"weights": "0" * 64}, "weights: it was made for another model's"),
        ({"num_items": 0}, "num_items"),
        ({"depths": []}, "depths: there are 0"),
        ({"date": "today"}, "date: unknown key"),
    ],
)
def test_unusable_content(
    model: Path, calibration: Calibration, change: dict[str, Any], named: str
) -> None:
    content = {**calibration.model_dump(mode="json"), **change}
    (model / CALIBRATION_FILE).write_text(json.dumps(content))
    assert named in refusal(model)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, "hot", None])
def test_unusable_temperature(model: Path, calibration: Calibration, temperature: Any) -> None:
    content = calibration.model_dump(mode="json")
    content["depths"][1]["temperature"] = temperature
    (model / CALIBRATION_FILE).write_text(json.dumps(content))
    assert "depths.1.temperature" in refusal(model)


def test_another_block_size(model: Path, calibration: Calibration) -> None:
    write_calibration(model, calibration)
    with pytest.raises(UserError, match="depths: there are 3, but the model's block size of 3"):
        read_calibration(model, 3)


def test_weights_that_were_replaced(model: Path, calibration: Calibration) -> None:
    write_calibration(model, calibration)
    save(model, **{**weights(), "c": torch.zeros(5)})
    assert "weights" in refusal(model)


def test_a_write_that_fails_leaves_nothing(model: Path, calibration: Calibration) -> None:
    (model / CALIBRATION_FILE).mkdir()
    with pytest.raises(UserError, match=r"calibration\.json cannot be written into .*/model"):
        write_calibration(model, calibration)
    assert sorted(path.name for path in model.iterdir()) == [CALIBRATION_FILE, "model.safetensors"]


def test_a_directory_that_takes_no_file(model: Path, calibration: Calibration) -> None:
    check_writable(model)
    assert [path.name for path in model.iterdir()] == ["model.safetensors"]
    for refused in (check_writable, lambda path: write_calibration(path, calibration)):
        with pytest.raises(UserError, match=r"^model: .* make the directory writable"):
            refused(model / "nothing")
