"""Calibration: one temperature per depth, after which a confidence of .95 is right 95% of the time.

Holds the file ``calibration.json`` of a checkpoint and the maths on probabilities of proposed
tokens. Knows no model and no data: `mars_serve.measure.calibration.collect` collects what is
fitted here.

A depth's temperature T minimises the negative log-likelihood of the event that the proposed token
is right, given the probability p_T = softmax(logits / T)[token]. That is temperature scaling (Guo
et al., arXiv 1706.04599) with the event "right" in place of the class: the token that was proposed
is the only one whose probability is ever compared with a threshold.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from mars_platform.checkpoint.files import write_whole
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.config import Settings, build_settings
from mars_platform.errors import UserError

CALIBRATION_FILE = "calibration.json"
NUM_BINS = 15
"""Bins of equal size of the expected calibration error, the number of Guo et al."""

_REMEDY = "delete it or run marsray calibrate again"
_OCTAVES = 3  # temperatures from 1/8 to 8
_STEPS = 8  # of each octave
_FINE_STEPS = 32  # within one step
_LARGEST_LOG = -1e-7  # a float32 log-probability may round to 0, of which the loss is infinite
_DIGITS = 6

GRID = tuple(2.0 ** (step / _STEPS) for step in range(-_OCTAVES * _STEPS, _OCTAVES * _STEPS + 1))
"""Temperatures at which `log_probability_curves` are taken, and the range that is searched."""


class DepthCalibration(Settings):
    """What calibration found at one depth; figures are over the half that was not fitted on."""

    temperature: float = Field(gt=0, allow_inf_nan=False)
    """Divides the logits; 1 where nothing was fitted."""
    num_fitted: int = Field(ge=0)
    """Proposed tokens that the temperature was fitted on."""
    num_checked: int = Field(ge=0)
    """Proposed tokens that the figures below come from; None each where there are none."""
    accuracy: float | None = None
    """Share of proposed tokens that are right."""
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
    """Version of this file's layout."""
    weights: str
    """`weights_fingerprint` of the model that it was measured on."""
    num_items: int = Field(ge=1)
    """Conversations that it was measured on, both halves together."""
    depths: tuple[DepthCalibration, ...]
    """Of depths 0 to the block size. Depth 0 always has temperature 1."""

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Of depths 0 to the block size."""
        return tuple(depth.temperature for depth in self.depths)


class Observed(NamedTuple):
    """Tokens that were proposed at one depth."""

    curves: Tensor
    """float32 [tokens, temperatures], by `log_probability_curves`."""
    correct: Tensor
    """bool [tokens], whether each is right."""


class Bin(NamedTuple):
    """One bin of a reliability diagram."""

    confidence: float
    """Mean probability."""
    accuracy: float
    """Share of tokens that are right."""
    num_tokens: int


def read_calibration(path: Path, block_size: int) -> Calibration | None:
    """``calibration.json`` of a checkpoint directory, or None where there is none.

    Args:
        path: the directory.
        block_size: of the model.

    Raises:
        UserError: the file is damaged, or another model's.
    """
    file = path / CALIBRATION_FILE
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}); {_REMEDY}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: the top level must be an object; {_REMEDY}")
    try:
        calibration = build_settings(content, Calibration, source=str(file))
    except UserError as error:
        raise UserError(f"{error}; {_REMEDY}") from error
    if len(calibration.depths) != block_size + 1:
        raise UserError(
            f"{file}: depths: there are {len(calibration.depths)}, but the model's block size of "
            f"{block_size} makes {block_size + 1}; {_REMEDY}"
        )
    if calibration.weights != weights_fingerprint(path):
        raise UserError(f"{file}: weights: it was made for another model's; {_REMEDY}")
    return calibration


def write_calibration(path: Path, calibration: Calibration) -> Path:
    """Write ``calibration.json`` into a directory, whole or not at all; one there is replaced.

    Returns:
        The file.

    Raises:
        UserError: the file cannot be written.
    """
    return write_whole(path, CALIBRATION_FILE, calibration.model_dump_json(indent=2) + "\n")


def log_probability_curves(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token over the temperatures of `GRID`.

    A few dozen numbers a token replace the whole vocabulary's, so that all of a data set's tokens
    fit into memory while temperatures are tried out.

    Args:
        logits: float [tokens, vocabulary], raw; those of never-emitted tokens count.
        tokens: int64 [tokens].

    Returns:
        float32 [tokens, temperatures].
    """
    logits = logits.float()
    chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)  # [tokens]
    columns = [chosen / heat - (logits / heat).logsumexp(-1) for heat in GRID]
    return torch.stack(columns, dim=-1).clamp(max=0.0)


def log_probabilities_at(curves: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at one temperature, linear in its logarithm between those of `GRID`.

    Args:
        curves: float32 [tokens, temperatures].
        temperature: within `GRID`'s range; exact at its own, else within .003 of the probability.

    Returns:
        float32 [tokens].
    """
    place = (math.log2(temperature) + _OCTAVES) * _STEPS
    below = min(int(place), len(GRID) - 2)
    return curves[:, below].lerp(curves[:, below + 1], place - below)


def fit_temperature(observed: Observed) -> float:
    """The temperature of `GRID`'s range under which what is right and wrong is likeliest.

    Where all tokens are right, or all wrong, or there are none, it is 1: the likeliest one would
    lie at an end of the range, however few tokens there are.
    """
    num_correct = int(observed.correct.sum())
    if num_correct in (0, len(observed.correct)):
        return 1.0
    coarse = min(GRID, key=lambda heat: _loss(observed, heat))
    steps = range(-_FINE_STEPS, _FINE_STEPS + 1)
    near: list[float] = [coarse * 2.0 ** (n / (_STEPS * _FINE_STEPS)) for n in steps]
    within = [heat for heat in near if GRID[0] <= heat <= GRID[-1]]
    return min(within, key=lambda heat: _loss(observed, heat))


def calibrate_depth(depth: int, fitting: Observed, checking: Observed) -> DepthCalibration:
    """Fit a depth's temperature on one half of the data and measure it on the other.

    Args:
        depth: 0 keeps temperature 1: it is the AR prediction itself, which no threshold stops.
        fitting: tokens to fit on; none is fine.
        checking: tokens to measure on; none is fine.
    """
    # rounded first, so that the figures are those of the temperature in the file
    temperature = round(fit_temperature(fitting), _DIGITS) if depth > 0 else 1.0
    num_checked = len(checking.correct)
    found = DepthCalibration(
        temperature=temperature, num_fitted=len(fitting.correct), num_checked=num_checked
    )
    if num_checked == 0:
        return found
    before, after = (
        log_probabilities_at(checking.curves, heat).exp() for heat in (1.0, temperature)
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
    """Sort tokens by probability into bins of equal size, up to one; empty ones are left out.

    Args:
        probabilities: float [tokens].
        correct: bool [tokens].
        num_bins: at least 1.
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
    """Expected calibration error: the bins' mean gap of probability and accuracy, weighted by size.

    Chance alone makes it positive: with n tokens about .4 * sqrt(bins / n) for a perfect model
    whose probabilities lie around one half, less towards 0 and 1.

    Args:
        probabilities: float [tokens], at least one.
        correct: bool [tokens].
        num_bins: see `reliability`.
    """
    bins = reliability(probabilities, correct, num_bins)
    gaps = (abs(part.confidence - part.accuracy) * part.num_tokens for part in bins)
    return math.fsum(gaps) / len(correct)


def brier_score(probabilities: Tensor, correct: Tensor) -> float:
    """Mean squared distance of probability and outcome: lower is better, 0 is certain and right.

    Args:
        probabilities: float [tokens], at least one.
        correct: bool [tokens].
    """
    return float((probabilities.double() - correct.double()).square().mean())


def _loss(observed: Observed, temperature: float) -> float:
    """Mean negative log-likelihood of right and wrong, in nats a token."""
    right = log_probabilities_at(observed.curves, temperature).double().clamp(max=_LARGEST_LOG)
    wrong = (-torch.expm1(right)).log()
    return float(-torch.where(observed.correct, right, wrong).mean())
