"""Fits one temperature per depth, so that a confidence of .95 is right 95% of the time.

This module also reads and writes a checkpoint's ``calibration.json``.
`mars_serve.measure.calibration.collect` collects the proposed tokens that temperatures are fitted
on.

The proposed token x of a depth is right with probability ``p_T = softmax(logits / T)[x]``. The
depth's temperature T minimises the mean negative log-likelihood of being right or wrong::

    loss(T) = mean of  -ln p_T  where x is right,  -ln(1 - p_T)  where x is wrong

This is temperature scaling (Guo et al., arXiv 1706.04599) with the event "right" in place of the
class, because only the probability of the proposed token is ever compared with a threshold. Imports
no Ray or HTTP library, and torch only where logits are read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from mars_platform.checkpoint.files import write_whole
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.config import Settings, build_settings, read_json
from mars_platform.errors import UserError

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress only reads the file
    from torch import Tensor

CALIBRATION_FILE = "calibration.json"
NUM_BINS = 15
"""Number of bins of the expected calibration error, as in Guo et al."""

_REMEDY = "delete it or run marsray calibrate again"
_OCTAVES = 3  # temperatures from 1/8 to 8
_STEPS = 8  # grid points per octave
_FINE_STEPS = 32  # search points per step of the grid
_LARGEST_LOG = -1e-7  # a float32 log-probability may round to 0, where the loss is infinite
_DIGITS = 6

GRID = tuple(2.0 ** (step / _STEPS) for step in range(-_OCTAVES * _STEPS, _OCTAVES * _STEPS + 1))
"""Temperatures at which `log_probability_curves` are computed; their range is searched."""


class DepthCalibration(Settings):
    """Calibration of one depth, measured on the half of the data that was not fitted on."""

    temperature: float = Field(gt=0, allow_inf_nan=False)
    """Divisor of the logits; 1 if nothing was fitted."""
    num_fitted: int = Field(ge=0)
    """Number of proposed tokens that the temperature was fitted on."""
    num_checked: int = Field(ge=0)
    """Number of proposed tokens behind the figures below, which are None if it is 0."""
    accuracy: float | None = None
    """Share of the proposed tokens that are right."""
    ece_before: float | None = None
    """Expected calibration error at temperature 1."""
    ece_after: float | None = None
    """Expected calibration error at the fitted temperature."""
    brier_before: float | None = None
    """Brier score at temperature 1."""
    brier_after: float | None = None
    """Brier score at the fitted temperature."""


class Calibration(Settings):
    """Content of ``calibration.json``."""

    format_version: Literal[1] = 1
    """Version of the file's layout."""
    weights: str
    """`weights_fingerprint` of the calibrated model."""
    num_items: int = Field(ge=1)
    """Number of conversations that were used, both halves together."""
    depths: tuple[DepthCalibration, ...]
    """Calibration of each depth from 0 to the block size; depth 0 always has temperature 1."""

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperature of each depth from 0 to the block size."""
        return tuple(depth.temperature for depth in self.depths)


class Observed(NamedTuple):
    """The tokens proposed at one depth."""

    curves: Tensor
    """float32 [tokens, temperatures], from `log_probability_curves`."""
    correct: Tensor
    """bool [tokens], whether each token is right."""


class Bin(NamedTuple):
    """One bin of a reliability diagram."""

    confidence: float
    accuracy: float
    num_tokens: int


def read_calibration(path: Path, block_size: int) -> Calibration | None:
    """Read ``calibration.json`` of a checkpoint directory; None if there is none.

    Raises:
        UserError: the file is damaged, or was made for other weights.
    """
    file = path / CALIBRATION_FILE
    if not file.is_file():
        return None
    content = read_json(file, _REMEDY)
    calibration = build_settings(content, Calibration, source=str(file), remedy=_REMEDY)
    if len(calibration.depths) != block_size + 1:
        raise UserError(
            f"{file}: depths: there are {len(calibration.depths)}, but the model's block size of "
            f"{block_size} makes {block_size + 1}; {_REMEDY}"
        )
    if calibration.weights != weights_fingerprint(path):
        raise UserError(f"{file}: weights: it was made for another model's; {_REMEDY}")
    return calibration


def write_calibration(path: Path, calibration: Calibration) -> Path:
    """Write ``calibration.json`` into a directory, replacing an existing one whole.

    Returns:
        The file's path.
    """
    return write_whole(path, CALIBRATION_FILE, calibration.model_dump_json(indent=2) + "\n")


def log_probability_curves(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token at the temperatures of `GRID`.

    ``logits`` are float [tokens, vocabulary], raw, including those of never-emitted tokens;
    ``tokens`` int64 [tokens]; the result is float32 [tokens, temperatures]. These few dozen numbers
    a token replace the logits of the whole vocabulary, so that the search for a temperature can
    keep all tokens of a data set in memory.
    """
    import torch

    logits = logits.float()
    chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)  # [tokens]
    columns = [chosen / temperature - (logits / temperature).logsumexp(-1) for temperature in GRID]
    return torch.stack(columns, dim=-1).clamp(max=0.0)


def log_probabilities_at(curves: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities, float32 [tokens], at one temperature in the range of `GRID`.

    They are interpolated over its logarithm from ``curves``, as `log_probability_curves` gives
    them: exact at the temperatures of `GRID`, and between them off by less than .003 of
    probability.
    """
    index = (math.log2(temperature) + _OCTAVES) * _STEPS  # in GRID, with a fraction
    below = min(int(index), len(GRID) - 2)
    return curves[:, below].lerp(curves[:, below + 1], index - below)


def fit_temperature(observed: Observed) -> float:
    """Return the temperature, within the range of `GRID`, that minimises the loss.

    It is 1 if all tokens are right, all are wrong, or there are none: the minimum would then lie at
    an end of the range, however few tokens there are.
    """
    num_correct = int(observed.correct.sum())
    if num_correct in (0, len(observed.correct)):
        return 1.0
    coarse = min(GRID, key=lambda temperature: _loss(observed, temperature))
    steps = range(-_FINE_STEPS, _FINE_STEPS + 1)
    near: list[float] = [coarse * 2.0 ** (n / (_STEPS * _FINE_STEPS)) for n in steps]
    within = [each for each in near if GRID[0] <= each <= GRID[-1]]
    return min(within, key=lambda temperature: _loss(observed, temperature))


def calibrate_depth(depth: int, fitting: Observed, checking: Observed) -> DepthCalibration:
    """Fit a depth's temperature on one half of the data and measure it on the other; both may be
    empty.

    Depth 0 keeps temperature 1, because it is the AR prediction itself, which no threshold stops.
    """
    # rounded before the figures are computed, which must be those of the temperature in the file
    temperature = round(fit_temperature(fitting), _DIGITS) if depth > 0 else 1.0
    num_checked = len(checking.correct)
    found = DepthCalibration(
        temperature=temperature, num_fitted=len(fitting.correct), num_checked=num_checked
    )
    if num_checked == 0:
        return found
    before, after = (
        log_probabilities_at(checking.curves, each).exp() for each in (1.0, temperature)
    )
    figures = {
        "accuracy": checking.correct.double().mean().item(),
        "ece_before": calibration_error(before, checking.correct),
        "ece_after": calibration_error(after, checking.correct),
        "brier_before": brier_score(before, checking.correct),
        "brier_after": brier_score(after, checking.correct),
    }
    return found.model_copy(update={name: round(value, _DIGITS) for name, value in figures.items()})


def reliability(probabilities: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> list[Bin]:
    """Sort tokens by probability and split them into bins of equal size, give or take one token.

    ``probabilities`` is float [tokens], ``correct`` bool [tokens]. With fewer tokens than
    ``num_bins``, which is at least 1, each bin has one token.
    """
    order = probabilities.argsort(stable=True)
    sure = probabilities[order].double().tensor_split(num_bins)
    right = correct[order].double().tensor_split(num_bins)
    return [
        Bin(a.mean().item(), b.mean().item(), len(a))
        for a, b in zip(sure, right, strict=True)
        if len(a) > 0
    ]


def calibration_error(probabilities: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> float:
    """Return the expected calibration error.

        sum over bins of  size / tokens * |mean probability - accuracy|

    Chance alone makes it positive: about .4 * sqrt(bins / n) with n tokens of a perfect model whose
    probabilities lie around one half, less towards 0 and 1.

    Args:
        probabilities: float [tokens], at least one.
        correct: bool [tokens].
        num_bins: see `reliability`.
    """
    bins = reliability(probabilities, correct, num_bins)
    gaps = (abs(part.confidence - part.accuracy) * part.num_tokens for part in bins)
    return math.fsum(gaps) / len(correct)


def brier_score(probabilities: Tensor, correct: Tensor) -> float:
    """Return the mean squared distance of ``probabilities``, float [tokens], and ``correct``, bool
    [tokens], of at least one token; 0 is certain and right.
    """
    return float((probabilities.double() - correct.double()).square().mean())


def _loss(observed: Observed, temperature: float) -> float:
    right = log_probabilities_at(observed.curves, temperature).double().clamp(max=_LARGEST_LOG)
    wrong = (-right.expm1()).log()
    return float(-right.where(observed.correct, wrong).mean())
