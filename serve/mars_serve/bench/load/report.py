"""``marsray bench load``: the table with its notes, the files and the picture."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mars_platform import __version__
from mars_platform.errors import UserError
from mars_platform.statistics import Estimate
from mars_serve.bench.load.compared import compared_json, compared_notes, compared_table
from mars_serve.bench.load.figures import ClassFigures, LoadFigures
from mars_serve.bench.load.run import LoadTest
from mars_serve.bench.load.send import Outcome

MAX_LATENESS_S = 0.05
"""A sender that is later at its 99th percentile has not sent the trace."""
_MAX_MESSAGE = 200  # characters of an error's text


def print_load(test: LoadTest, console: Console) -> None:
    """Print the table, and what has to be known with it."""
    console.print(_table(test.figures, test.options.objective_ttft_s))
    console.print(compared_table(test))
    for note in [*_notes(test), *compared_notes(test)]:
        console.print(note, style="dim", highlight=False, markup=False)
    for kind, (number, message) in _errors(test.replayed.outcomes).items():
        text = f"{number}x {kind}" + (f", such as: {message[:_MAX_MESSAGE]}" if message else "")
        console.print(text, style="dim", highlight=False, markup=False)
    warning = lateness_warning(test.figures)
    if warning is not None:
        console.print(warning, style="bold red", highlight=False, markup=False)


def lateness_warning(figures: LoadFigures) -> str | None:
    """What to say of a sender that was late; None where it was not."""
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
        UserError: one cannot be written.
    """
    options = test.options
    try:
        if options.json_file is not None:
            text = json.dumps(json_of(test), indent=1, allow_nan=False) + "\n"
            options.json_file.write_text(text, encoding="utf-8")
        if options.csv_file is not None:
            _write_csv(options.csv_file, test.replayed.outcomes)
        if options.plot_file is not None:
            _draw(test, options.plot_file)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror})") from error


def json_of(test: LoadTest) -> dict[str, Any]:
    """What ``--json`` writes; a time that never came is null, as is what is not known."""
    options, replayed = test.options, test.replayed
    shown = options.model_dump(mode="json", exclude={"json_file", "csv_file", "plot_file"})
    content = {
        "benchmark": "load",
        "marsray": __version__,
        "options": shown,
        "live_refusal": replayed.live_refusal,
        "loss_refusal": test.losses.refusal,
        "policies": [compared_json(test)],
        **asdict(test.figures),
    }
    finite: dict[str, Any] = _finite(content)
    return finite


def _finite(value: Any) -> Any:
    """Values that JSON knows; an `Estimate` becomes an object."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Estimate):
        return _finite(value._asdict())
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list) else value


def _table(figures: LoadFigures, objective_s: float) -> Table:
    table = Table(
        "class",
        "sent",
        f"first token in {objective_s:g} s",
        "p50, s",
        "p99, s",
        "end p50, s",
        "p99, s",
        "τ",
        "lowest",
        "tok/fwd",
        "tok/s",
        "accuracy",
        "503",
        "429",
        "failed",
    )
    for name, each in figures.classes.items():
        table.add_row(name, *_cells(each))
    table.add_section()
    table.add_row("all", *_cells(figures.all))
    return table


def _cells(figures: ClassFigures) -> list[str]:
    return [
        str(figures.num_sent),
        _cell(figures.slo_attainment, ".1%"),
        _cell(figures.ttft_p50_s, ".2f"),
        _cell(figures.ttft_p99_s, ".2f"),
        _cell(figures.e2e_p50_s, ".2f"),
        _cell(figures.e2e_p99_s, ".2f"),
        _cell(figures.threshold_mean, ".3f"),
        _cell(figures.threshold_min, ".3f"),
        _cell(figures.tokens_per_forward, ".2f"),
        _cell(figures.tokens_per_s, ",.1f"),
        _accuracy(figures.accuracy),
        _cell(figures.rejected_503, ".1%"),
        _cell(figures.rejected_429, ".1%"),
        str(figures.failed),
    ]


def _cell(value: float | None, spec: str) -> str:
    if value is None:
        return ""
    return format(value, spec) if math.isfinite(value) else "never"


def _accuracy(accuracy: Estimate | None) -> str:
    if accuracy is None:
        return ""
    return f"{accuracy.value:.1%} [{accuracy.low * 100:.1f}, {accuracy.high * 100:.1f}]"


def _notes(test: LoadTest) -> Iterable[str]:
    figures, refusal = test.figures, test.replayed.live_refusal
    if figures.was_interrupted:
        num_cut = figures.all.num_sent - figures.all.num_ended
        yield (
            f"Interrupted: {figures.all.num_sent} of {figures.num_planned} requests were sent, and "
            f"{num_cut} had not ended."
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


def _errors(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, str]]:
    """Number and first message of each kind."""
    found: dict[str, tuple[int, str]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            number, message = found.get(outcome.error, (0, outcome.message))
            found[outcome.error] = (number + 1, message)
    return found


def _write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = [_csv_row(outcome) for outcome in outcomes]
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _csv_row(outcome: Outcome) -> dict[str, Any]:
    """A cell without a value is empty."""
    request = outcome.request
    return {
        "index": request.index,
        "class": request.tier,
        "at_s": round(request.at_s, 6),
        "sent_s": round(outcome.sent_s, 6),
        "ttft_s": round(outcome.ttft_s, 6) if math.isfinite(outcome.ttft_s) else None,
        "e2e_s": round(outcome.e2e_s, 6) if math.isfinite(outcome.e2e_s) else None,
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "is_capped": request.is_capped,
        "completion_tokens": outcome.num_tokens,
        "forward_passes": outcome.num_passes,
        "threshold_mean": outcome.threshold_mean,
        "threshold_min": outcome.threshold_min,
        "correct": outcome.correct,
        "status": outcome.status,
        "error": outcome.error,
        "source": request.question and request.question.source,
    }


def _draw(test: LoadTest, path: Path) -> None:
    samples, options = test.figures.samples, test.options
    figure = Figure(figsize=(11, 9), layout="constrained")
    load, first, threshold, replicas = figure.subplots(4, 1, sharex=True)
    times = [sample.time_s for sample in samples]
    load.step(times, [each.requests_per_s for each in samples], label="sent a second", where="post")
    load.plot(times, [each.in_flight for each in samples], label="in flight")
    load.set_ylabel("requests")
    _line(first, times, [each.ttft_p95_s for each in samples], "first token, p95")
    first.axhline(options.objective_ttft_s, color="gray", linestyle=":", label="objective")
    first.set_ylabel("s")
    _line(threshold, times, [each.threshold_mean for each in samples], "served, mean")
    _line(threshold, times, [each.live_threshold for each in samples], "live")
    threshold.set_ylabel("τ")
    _line(replicas, times, [each.num_replicas for each in samples], "replicas")
    replicas.set_xlabel("time, s")
    for axes in (load, first, threshold, replicas):
        axes.legend(loc="upper right", fontsize="small")
        axes.grid(alpha=0.3)
    load.set_title(f"{options.model}: {options.trace.name}, {options.speedup:g}x", fontsize="small")
    figure.savefig(path)


def _line(axes: Axes, times: Sequence[float], values: Sequence[float | None], label: str) -> None:
    """What is not known, or infinite, is a gap."""
    known = [math.nan if each is None or math.isinf(each) else each for each in values]
    axes.plot(times, known, marker=".", markersize=3, label=label)
