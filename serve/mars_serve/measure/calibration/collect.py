"""Measures how often a model's confidence is right, on held-out conversations, and fits it.

Each conversation is decoded in mode ar, and tokens are then proposed along that output; see
`observe`. The fit is `mars_platform.checkpoint.calibration`'s.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mars_platform.checkpoint.calibration import (
    Bin,
    Calibration,
    calibrate_depth,
    log_probabilities_at,
    reliability,
)
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.errors import UserError
from mars_serve.measure.calibration.observe import (
    Continuation,
    Observations,
    choose_cursors,
    is_fitted,
    observe,
)
from mars_serve.measure.evaluation.decoding import ONE_TOKEN, evaluation_engine, run_setting
from mars_serve.measure.evaluation.items import EvalItem

_TITLE_DECODE, _TITLE_OBSERVE = "decode", "calibrate"


class OnProgress(Protocol):
    """Function that is told of the progress of a phase."""

    def __call__(self, title: str, done: int, total: int, quality: str = "", /) -> None:
        """Take a phase's title, its finished units, all units, and the quality so far in words."""


@dataclass(frozen=True)
class Reliability:
    """The bins of a depth's reliability diagram, over the half that was not fitted on."""

    before: list[Bin]
    after: list[Bin]


@dataclass(frozen=True)
class MeasuredCalibration:
    """A calibration with its reliability diagrams."""

    calibration: Calibration
    reliability: list[Reliability]
    """Diagram of each depth, without bins if no token was observed."""
    num_cursors: int
    """Number of output indices that tokens were proposed at."""


def measure_calibration(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    *,
    max_tokens: int,
    max_cursors: int,
    max_num_seqs: int,
    dtype: torch.dtype,
    device: str,
    on_progress: OnProgress,
) -> MeasuredCalibration:
    """Decode the items, observe what masks propose along the outputs, fit and check.

    There are two items or more, with different prompts, and at least 2 and at most ``max_cursors``
    output indices to propose tokens at, over all items. ``max_num_seqs`` items decode at once.

    Raises:
        UserError: the weights cannot be loaded, all items fall into one half, or a step fails.
    """
    check_halves(items)
    engine = evaluation_engine(
        checkpoint,
        items,
        max_tokens=max_tokens,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        device=device,
    )
    decoded = run_setting(
        engine,
        items,
        ONE_TOKEN,
        max_tokens=max_tokens,
        on_progress=lambda done, quality: on_progress(_TITLE_DECODE, done, len(items), quality),
    )
    texts = [
        Continuation(item.prompt, each.tokens) for item, each in zip(items, decoded, strict=True)
    ]
    cursors = choose_cursors(texts, max_cursors)
    observed = observe(
        engine, cursors, lambda done: on_progress(_TITLE_OBSERVE, done, len(cursors))
    )
    halves: dict[bool, list[Observations]] = {True: [], False: []}
    for cursor, each in zip(cursors, observed, strict=True):
        halves[is_fitted(cursor.text.prompt)].append(each)
    fitting, checking = (Observations.joined(halves[half]) for half in (True, False))
    return fit(checkpoint, fitting, checking, len(items))


def check_halves(items: Iterable[EvalItem]) -> None:
    """Refuse items that cannot be split into a half to fit on and a half to check on."""
    if len({is_fitted(item.prompt) for item in items}) < 2:
        raise UserError(
            "data: all conversations fall into one of the two halves, to fit on and to check on; "
            "give more of them, with different prompts"
        )


def fit(
    checkpoint: Checkpoint, fitting: Observations, checking: Observations, num_items: int
) -> MeasuredCalibration:
    """Fit each depth on one half and measure its errors on the other."""
    assert checkpoint.metadata is not None
    depths, diagrams = [], []
    for depth in range(checkpoint.metadata.block_size + 1):
        checked = checking.at(depth)
        depths.append(calibrate_depth(depth, fitting.at(depth), checked))
        before, after = (
            reliability(log_probabilities_at(checked.curves, temperature).exp(), checked.correct)
            for temperature in (1.0, depths[-1].temperature)
        )
        diagrams.append(Reliability(before, after))
    calibration = Calibration(
        weights=checkpoint.fingerprint,
        num_items=num_items,
        depths=tuple(depths),
    )
    return MeasuredCalibration(
        calibration, diagrams, num_cursors=depths[0].num_fitted + depths[0].num_checked
    )
