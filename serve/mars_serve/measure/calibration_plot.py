"""Draws what ``marsray calibrate`` measured: reliability by depth, and the frontier."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mars_platform.checkpoint.calibration import Bin
from mars_platform.cli.report import finish_axes
from mars_serve.measure.calibration.collect import MeasuredCalibration
from mars_serve.measure.frontier.measure import MeasuredFrontier
from mars_serve.measure.frontier.report import name_of_rung, rungs_of


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
    _draw_quality(quality, frontier)
    _draw_gains(gains, frontier)
    figure.suptitle(title, fontsize="medium")
    return figure


def _draw(axes: Axes, title: str, lines: Sequence[tuple[list[Bin], float]]) -> None:
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


def _draw_quality(axes: Axes, measured: MeasuredFrontier) -> None:
    """Draw quality with its interval over tokens per forward pass, with τ beside the points."""
    for mode, marker in (("ar", "s"), ("threshold", "o"), ("exact", "D")):
        points = [point for point in measured.frontier.points if point.mode == mode]
        below = [point.quality - point.quality_low for point in points]
        above = [point.quality_high - point.quality for point in points]
        speeds = [point.tokens_per_forward for point in points]
        qualities = [point.quality for point in points]
        axes.errorbar(
            speeds, qualities, yerr=[below, above], fmt=marker, markersize=4, capsize=3, label=mode
        )
    for point in measured.frontier.points:
        if point.mode == "threshold":
            axes.annotate(
                f"{point.threshold:g}",
                (point.tokens_per_forward, point.quality),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize="small",
            )
    finish_axes(
        axes,
        title="quality by τ, with 95% intervals",
        x="tokens a forward pass",
        y=f"{measured.frontier.measure}, %",
        legend="best",
    )


def _draw_gains(axes: Axes, measured: MeasuredFrontier) -> None:
    """Draw gains over the base of each batch, with a ring at each break-even batch."""
    capacity = measured.capacity
    axes.axhline(1.0, color="grey", linestyle=":", linewidth=1)
    last = 4 * measured.max_num_seqs
    batches = range(1, last + 1)
    for _, rung in rungs_of(measured):
        gains = [capacity.gain(rung, batch) for batch in batches]
        (line,) = axes.plot(batches, gains, label=name_of_rung(rung), linewidth=1)
        even = capacity.break_even_batch(rung)
        if 1 <= even <= last:
            axes.plot([even], [capacity.gain(rung, even)], "o", mfc="none", color=line.get_color())
    axes.axvline(measured.max_num_seqs, color="grey", linewidth=0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    finish_axes(
        axes,
        title="speed over the fastest lossless mode; rings mark break-even",
        x=f"rows of a step (max_num_seqs is {measured.max_num_seqs})",
        y="times as fast",
        legend="best",
    )
