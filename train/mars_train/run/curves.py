"""Plots the losses and held-out scores of a run as one picture. Imports no Ray or torch."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mars_platform.cli.pictures import write_picture
from mars_platform.cli.report import finish_axes
from mars_train.stage.history import TrainingHistory

_SMOOTHED_SHARE = 50


def write_curves(histories: Mapping[str, TrainingHistory], file: Path) -> None:
    """Draw the curves of stages into a picture, whose suffix names its format."""
    write_picture(partial(picture_of, histories), file)


def picture_of(histories: Mapping[str, TrainingHistory]) -> Figure:
    """Draw one row per stage: loss, loss by depth, accuracy, tokens per forward pass."""
    figure = Figure(figsize=(16, 3.6 * len(histories)), layout="constrained")
    grid = figure.subplots(len(histories), 4, squeeze=False)
    for axes, (stage, history) in zip(grid, histories.items(), strict=True):
        _draw_losses(axes[0], stage, history)
        _draw_depths(axes[1], history)
        _draw_thresholds(axes[2], history, "accuracy", "held-out accuracy")
        _draw_thresholds(axes[3], history, "tokens_per_forward", "tokens / forward pass")
        for axis in axes:
            finish_axes(axis, x="step", legend="best" if axis.has_data() else None)
    return figure


def _draw_losses(axis: Any, stage: str, history: TrainingHistory) -> None:
    axis.set_title(f"stage {stage}: training loss, nats")
    axis.set_yscale("log")
    steps = range(1, len(history.steps) + 1)
    streams = {"clean_loss": "clean (AR)", "noisy_loss": "noisy (masked)"}
    for stream, label in streams.items():
        losses = [getattr(step, stream) for step in history.steps]
        if any(losses):  # an AR stage has no noisy loss, and one with an adapter no clean one
            axis.plot(steps, _smoothed(losses), label=label)


def _draw_depths(axis: Any, history: TrainingHistory) -> None:
    axis.set_title("held-out loss by depth, nats")
    axis.set_yscale("log")
    steps = [score.step for score in history.scores]
    num_depths = len(history.scores[0].loss_by_depth) if history.scores else 0
    for depth in range(num_depths):
        losses = [score.loss_by_depth[depth] for score in history.scores]
        axis.plot(steps, losses, marker=".", label=f"depth {depth}")


def _draw_thresholds(axis: Any, history: TrainingHistory, figure: str, title: str) -> None:
    axis.set_title(title)
    for index in range(len(history.scores[0].thresholds) if history.scores else 0):
        values = [getattr(score.thresholds[index], figure) for score in history.scores]
        if None not in values:
            steps = [score.step for score in history.scores]
            label = f"τ = {history.scores[0].thresholds[index].threshold:g}"
            axis.plot(steps, values, marker=".", label=label)


def _smoothed(values: list[float]) -> list[float]:
    """Return the moving average of the finite values."""
    width = max(1, len(values) // _SMOOTHED_SHARE)
    smoothed = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if math.isfinite(value)]
        smoothed.append(sum(window) / len(window) if window else math.nan)
    return smoothed
