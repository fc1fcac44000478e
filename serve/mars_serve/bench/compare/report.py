"""Shows the result of ``marsray bench compare``: a table with notes, Markdown, and JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console

from mars_platform import __version__
from mars_platform.cli.report import Column, print_notes, table_of
from mars_platform.statistics import RoundRange
from mars_serve.bench.compare.run import Run, ServerComparison
from mars_serve.bench.options import ComparedName
from mars_serve.config.hardware import cpu_name

_FIGURES: dict[str, Callable[[Run], float | None]] = {
    "tokens_per_s": lambda run: run.figures.tokens_per_s or None,  # some tell no usage
    "tokens_per_pass": lambda run: run.tokens_per_pass,
    "ttft_p50_s": lambda run: run.figures.ttft_p50_s,
    "ttft_p99_s": lambda run: run.figures.ttft_p99_s,
    "itl_p50_s": lambda run: run.figures.itl_p50_s,
    "itl_p99_s": lambda run: run.figures.itl_p99_s,
    "accuracy": lambda run: run.figures.accuracy and run.figures.accuracy.value,
}


def print_servers(comparison: ServerComparison, console: Console) -> None:
    """Print the table and its notes."""
    rows = figures_by_level(comparison)
    levels = dict.fromkeys(row["clients"] for row in rows)
    sections = [[row for row in rows if row["clients"] == clients] for clients in levels]
    console.print(table_of(_columns(), *sections))
    print_notes(console, _notes(comparison))


def markdown_of(comparison: ServerComparison) -> str:
    """Return a table of speeds alone, that of all figures, and the notes as Markdown."""
    rows, text = figures_by_level(comparison), StringIO()
    console, speeds = Console(file=text, width=1000), dict[str, dict[str, str]]()
    for row in rows:
        found = speeds.setdefault(row["contender"], {"contender": row["contender"]})
        found[str(row["clients"])] = _text(row["tokens_per_s"], ",.0f")
    levels = dict.fromkeys(str(row["clients"]) for row in rows)
    columns = [Column("tokens/s by clients", "contender"), *(Column(n, n) for n in levels)]
    console.print(table_of(columns, speeds.values(), box=box.MARKDOWN))
    console.print(table_of(_columns(), rows, box=box.MARKDOWN))
    tables = "\n".join(line.strip() for line in text.getvalue().splitlines())
    return "\n\n".join([tables.strip(), *_notes(comparison)]) + "\n"


def figures_json(comparison: ServerComparison) -> dict[str, Any]:
    """Return all that was measured, and the conditions, for JSON."""
    return {
        "benchmark": "compare",
        "marsray": __version__,
        "options": comparison.options.model_dump(mode="json", exclude={"json_file"}),
        "dtype": comparison.dtype,
        "machine": {"cpu": cpu_name(), "num_cores": os.cpu_count()},
        "left_out": comparison.left_out,
        "figures": figures_by_level(comparison),
        "runs": [
            {key: value for key, value in vars(run).items() if key != "answers"}
            for run in comparison.runs
        ],
    }


def figures_by_level(comparison: ServerComparison) -> list[dict[str, Any]]:
    """Return for each number of clients and contender the range of each figure over the rounds.

    ``over_ar`` is the ratio of tokens/s to mode ar's in the same round, ``as_ar`` the share of
    answers that equal its.
    """
    runs, rows = comparison.runs, list[dict[str, Any]]()
    bases = {(run.clients, run.round): run for run in runs if run.contender == ComparedName.AR}
    for clients in dict.fromkeys(run.clients for run in runs):
        for name in dict.fromkeys(run.contender for run in runs):
            own = [run for run in runs if (run.clients, run.contender) == (clients, name)]
            pairs = [(run, bases.get((clients, run.round))) for run in own]
            row = {key: _range(map(value, own)) for key, value in _FIGURES.items()}
            row["over_ar"] = _range(_ratio(run, base) for run, base in pairs if base)
            row["as_ar"] = _range(_agreement(run, base) for run, base in pairs if base)
            rows.append({"clients": clients, "contender": name, **row})
    return rows


def _range(values: Iterable[float | None]) -> RoundRange | None:
    known = [each for each in values if each is not None]
    return RoundRange.of(known) if known else None


def _ratio(run: Run, base: Run) -> float | None:
    ours, theirs = run.figures.tokens_per_s, base.figures.tokens_per_s
    return ours / theirs if ours and theirs else None


def _agreement(run: Run, base: Run) -> float | None:
    both = run.answers.keys() & base.answers.keys()
    same = sum(run.answers[index] == base.answers[index] for index in both)
    return same / len(both) if both else None


def _text(found: RoundRange | None, spec: str, scale: float = 1.0) -> str:
    return RoundRange(*(scale * each for each in found)).text(spec) if found else ""


def _columns() -> list[Column]:
    def column(header: str, key: str, spec: str, scale: float = 1.0) -> Column:
        return Column(header, lambda row: _text(row[key], spec, scale), justify="right")

    return [
        Column("clients", "clients", justify="right"),
        Column("server", "contender"),
        column("tokens/s", "tokens_per_s", ",.0f"),
        column("over ar", "over_ar", ".2f"),
        column("tokens a pass", "tokens_per_pass", ".2f"),
        column("first token p50, ms", "ttft_p50_s", ",.0f", 1e3),
        column("p99", "ttft_p99_s", ",.0f", 1e3),
        column("between p50, ms", "itl_p50_s", ",.1f", 1e3),
        column("p99", "itl_p99_s", ",.1f", 1e3),
        column("right", "accuracy", ".1%"),
        column("as ar", "as_ar", ".1%"),
    ]


def _notes(comparison: ServerComparison) -> Iterable[str]:
    options = comparison.options
    work = options.prompts or f"{options.prompt_tokens} random tokens"
    sizes = [run.figures.num_sent for run in comparison.runs]
    num_rounds = len({run.round for run in comparison.runs})
    yield (
        f"Medians of {num_rounds} rounds, lowest and highest in brackets, of {min(sizes)} "
        f"to {max(sizes)} requests a run; {comparison.dtype} on {cpu_name()}, {os.cpu_count()} "
        f"cores; prompts of {work}, up to {options.max_tokens} output tokens, greedy, streamed; "
        f"marsray {__version__}. Between: from one event of a stream with text to the next, "
        "whatever the number of its tokens; those less than 1 ms apart are one. As ar: answers "
        "that are those of mode ar."
    )
    yield from comparison.left_out
    for run in comparison.runs:
        for problem in run.problems:
            yield f"{run.contender}, {run.clients} clients, round {run.round + 1}: {problem}"
