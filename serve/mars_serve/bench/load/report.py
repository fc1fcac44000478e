"""Shows the result of ``marsray bench load``: tables with notes, JSON, CSV and a picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from mars_platform import __version__
from mars_platform.cli.pictures import write_pictures
from mars_platform.cli.report import (
    Column,
    finish_axes,
    interval,
    print_notes,
    table_of,
    write_json,
    writing,
)
from mars_serve.bench.load.compared import compared_json, compared_notes, compared_table
from mars_serve.bench.load.figures import LoadFigures
from mars_serve.bench.load.run import LoadTest
from mars_serve.bench.load.send import SentRequest

MAX_LATENESS_S = 0.05
"""Most seconds by which the sender may be late at the 99th percentile and still send the trace."""
_FILES = {"json_file", "csv_file", "plot_file", "page_file"}
"""Options that say nothing of the test."""
_MAX_MESSAGE = 200  # characters of an error's text


def print_load(test: LoadTest, console: Console) -> None:
    """Print both tables, their notes, the errors, and a warning if the sender was late."""
    columns = _columns(test.options.objective_ttft_s)
    tiers = [{"class": tier, **vars(each)} for tier, each in test.figures.classes.items()]
    everyone = {"class": "all", **vars(test.figures.all)}
    console.print(table_of(columns, tiers, [everyone], infinite="never"))
    console.print(compared_table(test))
    print_notes(console, [*_notes(test), *compared_notes(test), *_error_notes(test.replayed.sent)])
    warning = lateness_warning(test.figures)
    if warning is not None:
        print_notes(console, [warning], style="bold red")


def lateness_warning(figures: LoadFigures) -> str | None:
    """Return a warning if the sender was late, else None."""
    lateness_s = figures.lateness_p99_s
    if lateness_s is None or lateness_s <= MAX_LATENESS_S:
        return None
    return (
        f"WARNING: the sender itself was late, {lateness_s * 1000:,.0f} ms at the 99th percentile: "
        "the load was not the trace's. Lower --speedup, or run it where a core is free."
    )


def write_files(test: LoadTest) -> None:
    """Write the files that the options name.

    Raises:
        UserError: a file cannot be written.
    """
    options = test.options
    if options.json_file is not None:
        write_json(options.json_file, figures_json(test))
    if options.csv_file is not None:
        _write_csv(options.csv_file, test.replayed.sent)
    write_pictures(
        lambda: _picture(test),
        title=f"marsray bench load {options.trace.name}",
        show=lambda console: print_load(test, console),
        plot=options.plot_file,
        page=options.page_file,
    )


def figures_json(test: LoadTest) -> dict[str, Any]:
    """Return the content of the JSON file; a time that never came and the unknown become null."""
    options = test.options
    return {
        "benchmark": "load",
        "marsray": __version__,
        "options": options.model_dump(mode="json", exclude=_FILES),
        "live_refusal": test.replayed.live_refusal,
        "loss_refusal": test.losses.refusal,
        "policies": [compared_json(test)],
        **vars(test.figures),
    }


def _columns(objective_ttft_s: float) -> list[Column]:
    return [
        Column("class", "class"),
        Column("sent", "num_sent"),
        Column(f"first token in {objective_ttft_s:g} s", "slo_attainment", ".1%"),
        Column("p50, s", "ttft_p50_s", ".2f"),
        Column("p99, s", "ttft_p99_s", ".2f"),
        Column("end p50, s", "e2e_p50_s", ".2f"),
        Column("p99, s", "e2e_p99_s", ".2f"),
        Column("τ", "threshold_mean", ".3f"),
        Column("lowest", "threshold_min", ".3f"),
        Column("tok/fwd", "tokens_per_forward", ".2f"),
        Column("tok/s", "tokens_per_s", ",.1f"),
        Column("accuracy", lambda row: interval(row["accuracy"], ".1f", scale=100, unit="%")),
        Column("503", "rejected_503", ".1%"),
        Column("429", "rejected_429", ".1%"),
        Column("failed", "failed"),
    ]


def _notes(test: LoadTest) -> Iterable[str]:
    figures, refusal = test.figures, test.replayed.live_refusal
    if figures.was_interrupted:
        num_running = figures.all.num_sent - figures.all.num_ended
        yield (
            f"Interrupted: {figures.all.num_sent} of {figures.num_planned} requests were sent, and "
            f"{num_running} had not ended."
        )
    if figures.lateness_p99_s is not None:
        yield (
            f"{figures.duration_s:.1f} s; the sender was {figures.lateness_p99_s * 1000:.1f} ms "
            "late at the 99th percentile. A request that was not served never got its first token."
        )
    if figures.num_capped:
        yield (
            f"{figures.num_capped} of {figures.num_planned} requests were longer than the model "
            "takes, and were cut."
        )
    if refusal is not None:
        yield f"The live τ is left out: /admin/threshold gave {refusal}."


def _error_notes(sent: Sequence[SentRequest]) -> Iterable[str]:
    """Yield the number of each kind of error, with the first message of that kind."""
    messages: dict[str, list[str]] = {}
    for each in sent:
        if each.error is not None:
            messages.setdefault(each.error, []).append(each.message)
    for kind, (message, *others) in messages.items():
        example = f", such as: {message[:_MAX_MESSAGE]}" if message else ""
        yield f"{1 + len(others)}x {kind}{example}"


def _write_csv(path: Path, sent: Sequence[SentRequest]) -> None:
    rows = [_csv_row(each) for each in sent]
    with writing(path), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(sent: SentRequest) -> Mapping[str, Any]:
    """Return a request's cells; None leaves a cell empty."""
    request = sent.request
    return {
        "index": request.index,
        "class": request.tier,
        "at_s": round(request.at_s, 6),
        "sent_s": round(sent.sent_s, 6),
        "ttft_s": round(sent.ttft_s, 6) if math.isfinite(sent.ttft_s) else None,
        "e2e_s": round(sent.e2e_s, 6) if math.isfinite(sent.e2e_s) else None,
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "is_capped": request.is_capped,
        "completion_tokens": sent.num_tokens,
        "forward_passes": sent.num_passes,
        "threshold_mean": sent.threshold_mean,
        "threshold_min": sent.threshold_min,
        "correct": sent.correct,
        "status": sent.status,
        "error": sent.error,
        "source": request.question and request.question.source,
    }


def _picture(test: LoadTest) -> Figure:
    """Draw load, time to the first token, τ and replicas over the time of the test."""
    samples, options = test.figures.samples, test.options
    figure = Figure(figsize=(11, 9), layout="constrained")
    load, first, threshold, replicas = figure.subplots(4, 1, sharex=True)
    times = [sample.time_s for sample in samples]
    load.step(times, [each.requests_per_s for each in samples], label="sent a second", where="post")
    load.plot(times, [each.in_flight for each in samples], label="in flight")
    _draw_line(first, times, [each.ttft_p95_s for each in samples], "first token, p95")
    first.axhline(options.objective_ttft_s, color="gray", linestyle=":", label="objective")
    _draw_line(threshold, times, [each.threshold_mean for each in samples], "served, mean")
    _draw_line(threshold, times, [each.live_threshold for each in samples], "live")
    _draw_line(replicas, times, [each.num_replicas for each in samples], "replicas")
    replicas.set_xlabel("time, s")
    labels = {load: "requests", first: "first token, s", threshold: "τ", replicas: "replicas"}
    for axes, label in labels.items():
        finish_axes(axes, y=label, legend="upper right")
    load.set_title(f"{options.model}: {options.trace.name}, {options.speedup:g}x", fontsize="small")
    return figure


def _draw_line(
    axes: Axes, times: Sequence[float], values: Sequence[float | None], label: str
) -> None:
    """Draw a line with a gap at each value that is unknown or infinite."""
    known = [math.nan if each is None or math.isinf(each) else each for each in values]
    axes.plot(times, known, marker=".", markersize=3, label=label)
