"""Draws what ``marsray calibrate`` measured: reliability by depth, and the frontier."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mars_platform.checkpoint.calibration import Bin
from mars_platform.cli.report import finish_axes
from mars_serve.measure.calibration.collect import MeasuredCalibration
from mars_serve.measure.frontier.measure import MeasuredFrontier
from mars_serve.measure.frontier.plot import draw_gains, draw_quality


def picture_of(title: str, measured: MeasuredCalibration, frontier: MeasuredFrontier) -> Figure:
    """Draw reliability before and after by depth, quality over speed, and speed over batch size."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    (before, after), (quality, gains) = figure.subplots(2, 2)
    after.sharex(before)
    after.sharey(before)
    diagrams = measured.reliability[1:]
    temperatures = measured.calibration.temperatures[1:]
    _draw(before, "reliability before", [(diagram.before, 1.0) for diagram in diagrams])
    after_bins = [diagram.after for diagram in diagrams]
    _draw(after, "reliability after", list(zip(after_bins, temperatures, strict=True)))
    before.set_ylabel("share of proposed tokens that are right")
    draw_quality(quality, frontier)
    draw_gains(gains, frontier)
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw(axes: Axes, title: str, lines: Sequence[tuple[list[Bin], float]]) -> None:
    """Draw one panel from the bins and temperature of each depth from 1."""
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    for depth, (bins, temperature) in enumerate(lines, start=1):
        if bins:
            axes.plot(
                [part.confidence for part in bins],
                [part.accuracy for part in bins],
                marker=".",
                linewidth=1,
                label=f"depth {depth}, T = {temperature:.2f}",
            )
    finish_axes(axes, title=title, x="confidence (mean of the bin)", legend="lower right")
