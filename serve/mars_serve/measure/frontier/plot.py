"""Draws a measured frontier: quality over speed, and speed over the batch."""

from __future__ import annotations

from matplotlib.axes import Axes

from mars_serve.measure.frontier.measure import MeasuredFrontier
from mars_serve.measure.frontier.report import rungs_of


def draw_quality(axis: Axes, measured: MeasuredFrontier) -> None:
    """Quality with its interval over tokens a forward pass; τ stands beside the points."""
    for mode, marker in (("ar", "s"), ("threshold", "o"), ("exact", "D")):
        points = [point for point in measured.frontier.points if point.mode == mode]
        below = [point.quality - point.quality_low for point in points]
        above = [point.quality_high - point.quality for point in points]
        speeds = [point.tokens_per_forward for point in points]
        qualities = [point.quality for point in points]
        axis.errorbar(
            speeds, qualities, yerr=[below, above], fmt=marker, markersize=4, capsize=3, label=mode
        )
    for point in measured.frontier.points:
        if point.mode == "threshold":
            axis.annotate(
                f"{point.threshold:g}",
                (point.tokens_per_forward, point.quality),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize="small",
            )
    axis.set_xlabel("tokens a forward pass")
    axis.set_ylabel(f"{measured.frontier.measure}, %")
    axis.set_title("quality by τ, with 95% intervals", fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")


def draw_gains(axis: Axes, measured: MeasuredFrontier) -> None:
    """Speed over plain AR decoding against the batch; a ring marks each break-even batch."""
    capacity = measured.capacity
    axis.axhline(1.0, color="grey", linestyle=":", linewidth=1)
    last = 4 * measured.max_num_seqs
    batches = range(1, last + 1)
    for (mode, threshold), rung in rungs_of(measured).items():
        if mode == "ar":
            continue
        gains = [capacity.gain(rung, batch) for batch in batches]
        label = f"τ {threshold:g}" if mode == "threshold" else f"mode {mode}"
        (line,) = axis.plot(batches, gains, label=label, linewidth=1)
        even = capacity.break_even_batch(rung)
        if 1 <= even <= last:
            axis.plot([even], [capacity.gain(rung, even)], "o", mfc="none", color=line.get_color())
    axis.axvline(measured.max_num_seqs, color="grey", linewidth=0.5)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(f"rows of a step ({measured.max_num_seqs} slots)")
    axis.set_ylabel("times as fast as mode ar")
    axis.set_title("speed over mode ar; rings mark break-even", fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
