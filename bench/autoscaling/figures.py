"""Figures of live runs, their table, and the picture of a burst."""

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
from live import OBJECTIVE_TTFT_S, Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from watch import Seen

MAX_COMPUTE_SHARE = 0.5
"""Of a replica's paced time: past it, replicas share the machine and not only its name."""
MAX_LATENESS_S = 0.05
_SMOOTH_S = 5.0
"""Before and after each moment: what replicas choose twice a second is noise from afar."""


@dataclass(frozen=True)
class Window:
    """Of a trace, in seconds after its begin."""

    begin_s: float
    end_s: float

    def holds(self, time_s: float) -> bool:
        return self.begin_s <= time_s < self.end_s


@dataclass(frozen=True)
class Figures:
    """One run; None where there is nothing to measure."""

    attainment: float
    """Share of requests whose first token came in time."""
    burst_attainment: float
    """Of those that were sent in the burst."""
    ttft_p99_s: float
    """Infinite where so many were not served."""
    burst_accuracy: float | None
    """Of the answers to requests that were sent in the burst."""
    threshold: float | None
    """τ that was served, mean over requests."""
    replica_s: float
    """Replica-seconds from the order to the end, over the trace's length."""
    ready_replica_s: float
    """Of replicas that serve."""
    num_requests: int
    num_rejected: int
    """Answered with 503."""
    num_failed: int
    tokens_per_s: float
    tokens_per_forward: float | None
    lateness_p99_s: float
    compute_share: float | None
    """Real over paced seconds of a minute, the most of any replica."""
    cold_start_s: float | None
    """From the first order of a further replica to its service, to a second."""

    def problems(self) -> list[str]:
        """Why the run does not count; empty where it does."""
        found = []
        if self.lateness_p99_s > MAX_LATENESS_S:
            found.append(f"the sender was {self.lateness_p99_s:.2f} s late at the 99th percentile")
        if self.compute_share is None or self.compute_share >= MAX_COMPUTE_SHARE:
            found.append(f"computing took {self.compute_share} of the paced time")
        if self.num_failed:
            found.append(f"{self.num_failed} requests failed")
        return found


def figures_of(run: Run, burst: Window, duration_s: float) -> Figures:
    """Sum up a run.

    Args:
        run: the run.
        burst: requests that were sent in it are looked at by themselves.
        duration_s: of the trace; replicas count as long.
    """
    whole = Window(run.began_s, run.began_s + duration_s)
    in_burst = [each for each in run.requests if burst.holds(each.sent_s)]
    checked = [each.correct for each in in_burst if each.correct is not None]
    shares = [share for time_s, share in run.watched.compute_shares if whole.holds(time_s)]
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
        compute_share=max(shares, default=None),
        cold_start_s=_cold_start_s([each for each in seen if each.time_s >= whole.begin_s]),
    )


def quantile(values: Sequence[float], q: float) -> float:
    """One of the values, so that infinite ones do not spoil others."""
    return float(np.quantile(values, q, method="higher"))


def _in_time(ttft: Sequence[float]) -> float:
    return statistics.fmean(seconds <= OBJECTIVE_TTFT_S for seconds in ttft)


def _integral(seen: Sequence[Seen], numbers: Sequence[int], window: Window) -> float:
    """Of a number over a window; it holds until the next look."""
    total = 0.0
    for (one, other), number in zip(pairwise(seen), numbers, strict=False):
        begin_s, end_s = max(one.time_s, window.begin_s), min(other.time_s, window.end_s)
        total += number * max(0.0, end_s - begin_s)
    return total


def _cold_start_s(seen: Sequence[Seen]) -> float | None:
    """Of the first replica that came later."""
    ordered = [each.time_s for each in seen if each.num_starting]
    grown = [b.time_s for a, b in pairwise(seen) if b.num_ready > a.num_ready]
    return grown[0] - ordered[0] if ordered and grown else None


def table_of(by_contender: dict[str, list[Figures]], title: str) -> Table:
    """Medians over the rounds with the least and the most."""
    columns: dict[str, tuple[str, str]] = {
        "in time": ("attainment", ".1%"),
        "of the burst": ("burst_attainment", ".1%"),
        "p99, s": ("ttft_p99_s", ".2f"),
        "burst's accuracy": ("burst_accuracy", ".1%"),
        "τ": ("threshold", ".3f"),
        "replica-s": ("replica_s", ".0f"),
        "ready": ("ready_replica_s", ".0f"),
        "503": ("num_rejected", ".0f"),
        "computing": ("compute_share", ".0%"),
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
    """A run with what was seen each second; times count from the begin of the load."""
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
    """JSON has no infinity."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in figures.items()
    }


def draw_burst(run: Run, burst: Window, file: Path) -> None:
    """Load, τ, replicas and waiting of one run over time."""
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
    """Live τ, mean over the replicas, faintly, and its mean over some seconds."""
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
    """Those ready, and those asked for, of a run."""
    seen = [each for each in run.watched.seen if each.time_s >= run.began_s]
    times = [each.time_s - run.began_s for each in seen]
    asked = [each.num_ready + each.num_starting for each in seen]
    axes.step(times, asked, where="post", label=f"{name}asked for", color=color, linestyle=":")
    ready = [each.num_ready for each in seen]
    axes.step(times, ready, where="post", label=f"{name}ready", color=color)
    axes.set_ylim(0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("replicas")
    axes.legend(loc="lower right", fontsize="small", frameon=False)


def stacked(number: int) -> tuple[Figure, list[Axes]]:
    """A figure of panels over one time axis."""
    figure = Figure(figsize=(8, 1.5 * number + 0.6), layout="constrained")
    panels = list(figure.subplots(number, 1, sharex=True))
    panels[-1].set_xlabel("time, s")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def line(axes: Axes, times: Sequence[float], values: Sequence[float | None], label: str) -> None:
    """What is not known is a gap."""
    known = [math.nan if value is None else value for value in values]
    axes.plot(times, known, label=label)


def save(figure: Figure, file: Path) -> None:
    """Write a figure; text of an SVG stays text, which is a tenth of the size, and no date."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "marsray"}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
