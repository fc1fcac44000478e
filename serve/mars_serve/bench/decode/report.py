"""Shows what `mars_serve.bench.decode.run` measured: tables, JSON and a plot."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import transformers
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mars_platform import __version__
from mars_serve.bench.decode.run import BatchResult, Comparison, DecodeOptions, Result
from mars_serve.config.hardware import cpu_name

RATIOS = (
    ("ar", "hf-generate"),
    ("ar", "hf-generate+packed"),
    ("ar", "hf-continuous"),
    ("ar", "hf-continuous+packed"),
    ("threshold", "ar"),
    ("threshold", "hf-generate"),
    ("threshold", "block-sync"),
    ("exact", "ar"),
    ("exact", "threshold"),
    ("exact", "hf-generate"),
    ("exact-all", "ar"),
    ("exact-last", "ar"),
)


class Range(NamedTuple):
    """Median of the rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float


def range_of(values: Sequence[float]) -> Range:
    """Median and range of at least one value."""
    return Range(median(values), min(values), max(values))


def ratio(above: Result, below: Result) -> Range:
    """Ratio of tokens a second, taken in each round, then its median and range."""
    pairs = zip(above.timings, below.timings, strict=True)
    return range_of([ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs])


def print_comparison(comparison: Comparison, console: Console, *, as_json: bool) -> None:
    """Print tables with their notes, or JSON."""
    if as_json:
        console.print_json(json.dumps(figures(comparison)))
        return
    console.print(_speeds(comparison))
    ratios = _ratios(comparison)
    if ratios.columns[1:]:
        console.print(ratios)
    for note in _notes(comparison):
        console.print(note, style="dim", highlight=False, markup=False)


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draw tokens a second over batch size, a line for each contender with the rounds' range.

    Args:
        comparison: what was measured.
        path: the picture; its suffix says the format.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    for name in comparison.options.contenders:
        points = [
            (result.batch, range_of([t.tokens_per_s for t in result.results[name].timings]))
            for result in comparison.batches
            if result.results[name].timings
        ]
        if points:
            middles = [speed.median for _, speed in points]
            below = [speed.median - speed.low for _, speed in points]
            above = [speed.high - speed.median for _, speed in points]
            axis.errorbar(
                [batch for batch, _ in points],
                middles,
                yerr=[below, above],
                marker=".",
                capsize=3,
                label=name,
                linestyle="--" if "hf" in name else "-",
            )
    batches = [result.batch for result in comparison.batches]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_xlabel("batch size")
    axis.set_ylabel("output tokens / s")
    axis.set_title(_label(comparison), fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def figures(comparison: Comparison) -> dict[str, Any]:
    """Everything that was measured and what it was measured with, for JSON."""
    options, draws = comparison.options, comparison.draws
    return {
        "benchmark": "decode",
        "label": _label(comparison),
        "model": comparison.model.name,
        "is_trained": comparison.model.is_trained,
        "config": comparison.model.checkpoint.config.to_diff_dict(),
        "block_size": getattr(comparison.model.checkpoint.metadata, "block_size", None),
        "device": options.device,
        "dtype": options.dtype,
        "threshold": options.threshold,
        "rounds": options.rounds,
        "compiled": options.compiled,
        "seed": options.seed,
        "workload": _workload(options),
        "acceptance": draws and draws.acceptance.model_dump(),
        "acceptance_exact": draws and draws.exact.model_dump(),
        "machine": _machine(options.device),
        "versions": {
            "marsray": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "batches": [_batch_figures(result) for result in comparison.batches],
    }


def _workload(options: DecodeOptions) -> dict[str, Any]:
    if options.prompts is not None:
        return {"prompts": str(options.prompts), "max_tokens": options.max_tokens}
    return {"prompts": None, **asdict(options.shape), "ends_early": False}


def _batch_figures(batch: BatchResult) -> dict[str, Any]:
    return {
        "batch": batch.batch,
        "num_requests": len(batch.requests),
        "num_prompt_tokens": sum(len(request.prompt) for request in batch.requests),
        "contenders": {
            name: _result_figures(result, batch.results.get("ar"))
            for name, result in batch.results.items()
        },
        "ratios": {
            f"{above}/{below}": ratio(batch.results[above], batch.results[below])._asdict()
            for above, below in _comparable(batch)
        },
    }


def _result_figures(result: Result, baseline: Result | None) -> dict[str, Any]:
    if result.unavailable is not None:
        return {"unavailable": result.unavailable}
    same = None
    if baseline is not None and baseline.outputs:
        pairs = zip(result.outputs, baseline.outputs, strict=True)
        same = sum(ours == theirs for ours, theirs in pairs) / len(result.outputs)
    return {
        "tokens_per_s": range_of([t.tokens_per_s for t in result.timings])._asdict(),
        "tokens_per_forward": _tokens_per_forward(result),
        "positions_per_forward": _positions_per_forward(result),
        "identical_to_ar": same,
        "settings": result.settings,
        "trials": result.trials,
        "rounds": [asdict(timing) for timing in result.timings],
    }


def _tokens_per_forward(result: Result) -> float:
    tokens = sum(timing.num_tokens for timing in result.timings)
    return tokens / sum(timing.num_passes for timing in result.timings)


def _positions_per_forward(result: Result) -> float | None:
    positions = [timing.num_positions for timing in result.timings]
    known = [number for number in positions if number is not None]
    return sum(known) / sum(timing.num_passes for timing in result.timings) if known else None


def _comparable(batch: BatchResult) -> list[tuple[str, str]]:
    measured = {name for name, result in batch.results.items() if result.timings}
    return [(above, below) for above, below in RATIOS if {above, below} <= measured]


def _speeds(comparison: Comparison) -> Table:
    table = Table(title=_label(comparison))
    table.add_column("batch", justify="right")
    table.add_column("contender", no_wrap=True)
    table.add_column("tokens/s (range)", justify="right", no_wrap=True)
    table.add_column("tok/fwd", justify="right")
    table.add_column("pos/fwd", justify="right")
    table.add_column("settings")
    for batch in comparison.batches:
        for index, (name, result) in enumerate(batch.results.items()):
            last = index == len(batch.results) - 1
            number = str(batch.batch) if index == 0 else ""
            table.add_row(number, name, *_speed_cells(result), end_section=last)
    return table


def _speed_cells(result: Result) -> list[str]:
    if result.unavailable is not None:
        return ["not available", "", "", result.unavailable]
    speed = range_of([timing.tokens_per_s for timing in result.timings])
    settings = ", ".join(f"{name}: {value}" for name, value in result.settings.items())
    positions = _positions_per_forward(result)
    return [
        f"{speed.median:,.1f} ({speed.low:,.1f}-{speed.high:,.1f})",
        f"{_tokens_per_forward(result):.2f}",
        "" if positions is None else f"{positions:.2f}",
        settings,
    ]


def _ratios(comparison: Comparison) -> Table:
    table = Table(title="tokens/s, one over the other: median of the rounds (range)")
    table.add_column("ratio", no_wrap=True)
    for batch in comparison.batches:
        table.add_column(f"batch {batch.batch}", justify="right")
    for pair in RATIOS:
        cells = [
            _ratio_cell(ratio(batch.results[pair[0]], batch.results[pair[1]]))
            if pair in _comparable(batch)
            else ""
            for batch in comparison.batches
        ]
        if any(cells):
            table.add_row(" / ".join(pair), *cells)
    return table


def _ratio_cell(value: Range) -> str:
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"


def _label(comparison: Comparison) -> str:
    name = comparison.model.name
    drawn = comparison.draws is not None
    if drawn and not comparison.model.is_trained:
        return f"{name}: step-cost measurement: accepted lengths drawn, weights untrained"
    return f"{name}: accepted lengths drawn" if drawn else name


def _notes(comparison: Comparison) -> list[str]:
    options = comparison.options
    sizes = ", ".join(f"{len(batch.requests)}" for batch in comparison.batches)
    notes = [
        f"{options.dtype} on {options.device}, {torch.get_num_threads()} CPU threads, "
        f"{options.rounds} rounds; requests a run: {sizes}. tok/fwd counts the passes of each "
        "request from its first token to its last, those in which it waited included; pos/fwd is "
        "what they fed, of a prompt its last token alone."
    ]
    if options.compiled:
        notes.append("The engine's model is compiled.")
    draws = comparison.draws
    if draws is not None:
        notes.append(
            f"Lengths of accepted runs are drawn, {draws.acceptance.mean:.2f} on average "
            f"where enough masks are fed: {draws.acceptance.source}"
        )
        if draws.exact is not draws.acceptance:
            notes.append(
                f"Lengths in mode exact are drawn otherwise, {draws.exact.mean:.2f} on average "
                f"where as many drafts are fed: {draws.exact.source}"
            )
    return notes


def _machine(device: str) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.platform(),
    }
