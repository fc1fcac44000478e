"""Shows the result of ``marsray bench load``: a table with notes, and JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from mars_platform import __version__
from mars_platform.cli.report import Column, interval, print_notes, table_of
from mars_serve.bench.load.figures import LoadFigures
from mars_serve.bench.load.run import LoadTest
from mars_serve.bench.load.send import SentRequest

MAX_LATENESS_S = 0.05
"""Most seconds by which the sender may be late at the 99th percentile and still send the trace."""
_MAX_MESSAGE = 200  # characters of an error's text


def print_load(test: LoadTest, console: Console) -> None:
    """Print the table, its notes, the errors, and a warning if the sender was late."""
    columns = _columns(test.options.objective_ttft_s)
    tiers = [{"class": tier, **vars(each)} for tier, each in test.figures.classes.items()]
    everyone = {"class": "all", **vars(test.figures.all)}
    console.print(table_of(columns, tiers, [everyone], infinite="never"))
    print_notes(console, [*_notes(test), *error_notes(test.replayed.sent)])
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


def figures_json(test: LoadTest) -> dict[str, Any]:
    """Return the content of the JSON file; a time that never came and the unknown become null."""
    options = test.options
    return {
        "benchmark": "load",
        "marsray": __version__,
        "options": options.model_dump(mode="json", exclude={"json_file"}),
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
    figures = test.figures
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


def error_notes(sent: Sequence[SentRequest]) -> Iterable[str]:
    """Yield the number of each kind of error, with the first message of that kind."""
    messages: dict[str, list[str]] = {}
    for each in sent:
        if each.error is not None:
            messages.setdefault(each.error, []).append(each.message)
    for kind, (message, *others) in messages.items():
        example = f", such as: {message[:_MAX_MESSAGE]}" if message else ""
        yield f"{1 + len(others)}x {kind}{example}"
