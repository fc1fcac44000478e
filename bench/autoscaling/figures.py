"""Computes the figures of live runs, prints them as a table and draws a burst."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from bench.autoscaling.live import OBJECTIVE_TTFT_S, Run
from bench.autoscaling.watch import Seen
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

MAX_LATENESS_S = 0.05
"""Largest delay of the sender, at the 99th percentile."""
_SMOOTH_S = 5.0
"""Seconds before and after each moment over which the drawn τ is averaged."""


@dataclass(frozen=True)
class Window:
    """A part of a trace, in seconds since its beginning."""

    begin_s: float
    end_s: float

    def holds(self, time_s: float) -> bool:
        return self.begin_s <= time_s < self.end_s


@dataclass(frozen=True)
class Figures:
    """Figures of one run; None if there was nothing to measure."""

    attainment: float
    """Share of requests whose first token came within the objective."""
    burst_attainment: float
    """The same share among the requests that were sent during the burst."""
    ttft_p99_s: float
    """Infinite if one request in a hundred was not served."""
    burst_accuracy: float | None
    """Accuracy of the answers to requests that were sent during the burst."""
    threshold: float | None
    """Mean over requests of the τ that they were decoded with."""
    replica_s: float
    """Replica-seconds during the trace, counted from each replica's order to its end."""
    ready_replica_s: float
    """Replica-seconds of ready replicas."""
    num_requests: int
    num_rejected: int
    """Number of requests that were answered with status 503."""
    num_failed: int
    tokens_per_s: float
    tokens_per_forward: float | None
    lateness_p99_s: float
    is_too_slow: bool
    """Whether this machine was too slow for the pace."""
    cold_start_s: float | None
    """Seconds from the first order of a further replica until it was ready, to a second."""

    def problems(self) -> list[str]:
        """Return the reasons for which the run does not count; none if it counts."""
        found = []
        if self.lateness_p99_s > MAX_LATENESS_S:
            found.append(f"the sender was {self.lateness_p99_s:.2f} s late at the 99th percentile")
        if self.is_too_slow:
            found.append("computing took too much of the paced time")
        if self.num_failed:
            found.append(f"{self.num_failed} requests failed")
        return found


def figures_of(run: Run, burst: Window, duration_s: float) -> Figures:
    """Compute the figures of a run.

    Args:
        run: The run.
        burst: The part of the trace whose requests are also counted by themselves.
        duration_s: Length of the trace; replicas are counted until its end.
    """
    whole = Window(run.began_s, run.began_s + duration_s)
    in_burst = [each for each in run.requests if burst.holds(each.sent_s)]
    checked = [each.correct for each in in_burst if each.correct is not None]
    seen, told = run.watched.seen, run.load["all"]
    return Figures(
        attainment=_in_time([each.ttft_s for each in run.requests]),
        burst_attainment=_in_time([each.ttft_s for each in in_burst]),
        ttft_p99_s=quantile([each.ttft_s for each in run.requests], 0.99),
        burst_accuracy=statistics.fmean(checked) if checked else None,
        threshold=told["threshold_mean"],
        replica_s=_integral(seen, [each.num_billed for each in seen], whole),
        ready_replica_s=_integral(seen, [each.num_ready for each in seen], whole),
        num_requests=len(run.requests),
        num_rejected=sum(each.status == 503 for each in run.requests),
        num_failed=told["failed"],
        tokens_per_s=told["tokens_per_s"],
        tokens_per_forward=told["tokens_per_forward"],
        lateness_p99_s=run.load["lateness_p99_s"],
        is_too_slow=run.is_too_slow,
        cold_start_s=_cold_start_s([each for each in seen if each.time_s >= whole.begin_s]),
    )


def quantile(values: Sequence[float], q: float) -> float:
    """Return the value at a quantile; it is one of the values, since some may be infinite."""
    return float(np.quantile(values, q, method="higher"))


def _in_time(ttft: Sequence[float]) -> float:
    return statistics.fmean(seconds <= OBJECTIVE_TTFT_S for seconds in ttft)


def _integral(seen: Sequence[Seen], numbers: Sequence[int], window: Window) -> float:
    """Integrate a number over a window; each value lasts until the next look."""
    total = 0.0
    for (one, other), number in zip(pairwise(seen), numbers, strict=False):
        begin_s, end_s = max(one.time_s, window.begin_s), min(other.time_s, window.end_s)
        total += number * max(0.0, end_s - begin_s)
    return total


def _cold_start_s(seen: Sequence[Seen]) -> float | None:
    """Return the seconds from the first order of a replica until one more was ready."""
    ordered = [each.time_s for each in seen if each.num_starting]
    grown = [b.time_s for a, b in pairwise(seen) if b.num_ready > a.num_ready]
    return grown[0] - ordered[0] if ordered and grown else None


def table_of(by_contender: dict[str, list[Figures]], title: str) -> Table:
    """Return a table of each policy's medians, least and largest values over the rounds."""
    columns: dict[str, tuple[str, str]] = {
        "in time": ("attainment", ".1%"),
        "of the burst": ("burst_attainment", ".1%"),
        "p99, s": ("ttft_p99_s", ".2f"),
        "burst's accuracy": ("burst_accuracy", ".1%"),
        "τ": ("threshold", ".3f"),
        "replica-s": ("replica_s", ".0f"),
        "ready": ("ready_replica_s", ".0f"),
        "503": ("num_rejected", ".0f"),
        "sender late, ms": ("lateness_p99_s", ".0f"),
    }
    table = Table("policy", *columns, title=title)
    for name, rows in by_contender.items():
        cells = []
        for key, spec in columns.values():
            scale = 1000 if key == "lateness_p99_s" else 1
            values = [getattr(row, key) for row in rows]
            cells.append(_cell([scale * value for value in values if value is not None], spec))
        table.add_row(name, *cells)
    return table


def _cell(values: Sequence[float], spec: str) -> str:
    if not values:
        return ""
    middle, *ends = (
        format(value, spec) if math.isfinite(value) else "never"
        for value in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({ends[0]}-{ends[1]})"


def json_of(run: Run, figures: Figures) -> dict[str, Any]:
    """Return a run as JSON, second by second; times count from the beginning of the load."""
    replicas = [asdict(each) | {"time_s": each.time_s - run.began_s} for each in run.watched.seen]
    decisions = [each | {"time_s": each["time_s"] - run.began_s} for each in run.watched.decisions]
    return {
        "contender": run.contender,
        "round": run.round,
        "problems": figures.problems(),
        **finite(asdict(figures)),
        "samples": run.load["samples"],
        "replicas": replicas,
        "decisions": decisions,
    }


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """Replace infinite numbers by None, since JSON has no infinity."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in figures.items()
    }


def draw_burst(run: Run, burst: Window, file: Path) -> None:
    """Draw load, τ, replicas and first-token times of a run over time."""
    samples = run.load["samples"]
    times = [each["time_s"] for each in samples]
    figure, (load, threshold, replicas, first) = stacked(4)
    load.step(times, [each["requests_per_s"] for each in samples], where="post", color="black")
    load.set_ylabel("requests/s")
    draw_threshold(threshold, times, [each["live_threshold"] for each in samples], "C0", "")
    draw_replicas(replicas, run, "C0", "")
    line(first, times, [each["ttft_p95_s"] for each in samples], "p95")
    first.axhline(OBJECTIVE_TTFT_S, color="gray", linestyle=":")
    first.set_ylabel("first token\np95, s")
    for axes in (load, threshold, replicas, first):
        axes.axvspan(burst.begin_s, burst.end_s, color="gray", alpha=0.12, linewidth=0)
    save(figure, file)


def draw_threshold(
    axes: Axes, times: Sequence[float], values: Sequence[float | None], color: str, name: str
) -> None:
    """Draw the mean live τ of the replicas faintly, and its moving average."""
    known = [(time, value) for time, value in zip(times, values, strict=True) if value is not None]
    moments = [time for time, _ in known]
    axes.plot(moments, [value for _, value in known], color=color, alpha=0.3, linewidth=0.8)
    smooth = [
        statistics.fmean(value for time, value in known if abs(time - moment) <= _SMOOTH_S)
        for moment in moments
    ]
    axes.plot(moments, smooth, color=color, label=f"{name}mean of {2 * _SMOOTH_S:.0f} s")
    axes.set_ylabel("τ")
    axes.legend(loc="lower right", fontsize="small", frameon=False)


def draw_replicas(axes: Axes, run: Run, color: str, name: str) -> None:
    """Draw the ready replicas of a run, and the ordered ones."""
    seen = [each for each in run.watched.seen if each.time_s >= run.began_s]
    times = [each.time_s - run.began_s for each in seen]
    asked = [each.num_ready + each.num_starting for each in seen]
    axes.step(times, asked, where="post", label=f"{name}ordered", color=color, linestyle=":")
    ready = [each.num_ready for each in seen]
    axes.step(times, ready, where="post", label=f"{name}ready", color=color)
    axes.set_ylim(0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("replicas")
    axes.legend(loc="lower right", fontsize="small", frameon=False)


def stacked(number: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of stacked panels over one time axis."""
    figure = Figure(figsize=(8, 1.5 * number + 0.6), layout="constrained")
    panels = list(figure.subplots(number, 1, sharex=True))
    panels[-1].set_xlabel("time, s")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def line(axes: Axes, times: Sequence[float], values: Sequence[float | None], label: str) -> None:
    """Draw a line with gaps at unknown values."""
    known = [math.nan if value is None else value for value in values]
    axes.plot(times, known, label=label)


def save(figure: Figure, file: Path) -> None:
    """Write a figure; an SVG keeps its text as text, a tenth of the size, and has no date."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "marsray"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
