"""Shows the result of ``marsray bench decode``: tables with notes, and JSON."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from mars_platform import __version__
from mars_platform.cli.report import Column, print_json, print_notes, table_of
from mars_platform.statistics import RoundRange
from mars_serve.bench.decode.run import BatchResult, ContenderResult, DecodeComparison
from mars_serve.bench.options import DecodeOptions
from mars_serve.config.hardware import cpu_name

RATIOS = (
    ("threshold", "ar"),
    ("exact", "ar"),
    ("exact", "threshold"),
)


def ratio(above: ContenderResult, below: ContenderResult) -> RoundRange:
    """Return the ratio of tokens/s, taken within each round."""
    pairs = zip(above.timings, below.timings, strict=True)
    return RoundRange.of([ours.tokens_per_s / theirs.tokens_per_s for ours, theirs in pairs])


def _speed(result: ContenderResult) -> RoundRange:
    return RoundRange.of([timing.tokens_per_s for timing in result.timings])


def print_comparison(comparison: DecodeComparison, console: Console, *, as_json: bool) -> None:
    """Print the result as tables with their notes, or as JSON."""
    if as_json:
        print_json(console, figures_json(comparison))
        return
    console.print(_speed_table(comparison))
    ratios = _ratio_table(comparison)
    if ratios.columns[1:]:
        console.print(ratios)
    print_notes(console, _notes(comparison))


def figures_json(comparison: DecodeComparison) -> dict[str, Any]:
    """Return all that was measured, and the conditions, for JSON."""
    options, draws = comparison.options, comparison.draws
    return {
        "benchmark": "decode",
        "label": _label(comparison),
        "model": comparison.model.name,
        "is_trained": comparison.model.is_trained,
        "config": comparison.model.checkpoint.config.to_diff_dict(),
        "block_size": getattr(comparison.model.checkpoint.metadata, "block_size", None),
        "device": options.device,
        "dtype": comparison.model.dtype_name,
        "threshold": options.threshold,
        "temperature": options.temperature,
        "rounds": options.rounds,
        "seed": options.seed,
        "workload": _workload(options),
        "acceptance": draws and draws.acceptance.model_dump(),
        "machine": {
            "cpu": cpu_name(),
            "num_cores": os.cpu_count(),
            "num_threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if options.device == "cuda" else None,
            "system": platform.platform(),
        },
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
        return {"prompts": options.prompts, "max_tokens": options.max_tokens}
    return {
        "prompts": None,
        "prompt": options.prompt_tokens,
        "output": options.output_tokens,
        "ends_early": False,
    }


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
            f"{above}/{below}": ratio(batch.results[above], batch.results[below])
            for above, below in _measured_ratios(batch)
        },
    }


def _result_figures(result: ContenderResult, baseline: ContenderResult | None) -> dict[str, Any]:
    identical = None
    if baseline is not None:
        pairs = zip(result.outputs, baseline.outputs, strict=True)
        identical = sum(ours == theirs for ours, theirs in pairs) / len(result.outputs)
    return {
        "tokens_per_s": _speed(result),
        "tokens_per_forward": result.tokens_per_forward,
        "positions_per_forward": result.positions_per_forward,
        "identical_to_ar": identical,
        "rounds": result.timings,
    }


def _measured_ratios(batch: BatchResult) -> list[tuple[str, str]]:
    return [pair for pair in RATIOS if set(pair) <= batch.results.keys()]


def _speed_table(comparison: DecodeComparison) -> Table:
    columns = [
        Column("batch", "batch", justify="right"),
        Column("contender", "contender", no_wrap=True),
        Column("tokens/s (range)", "speed", justify="right", no_wrap=True),
        Column("tok/fwd", "tokens_per_forward", ".2f", justify="right"),
        Column("pos/fwd", "positions_per_forward", ".2f", justify="right"),
    ]
    return table_of(columns, *map(_speed_rows, comparison.batches), title=_label(comparison))


def _speed_rows(batch: BatchResult) -> list[dict[str, Any]]:
    return [
        {
            "batch": None if index else batch.batch,
            "contender": name,
            "speed": _speed(result).text(",.1f"),
            "tokens_per_forward": result.tokens_per_forward,
            "positions_per_forward": result.positions_per_forward,
        }
        for index, (name, result) in enumerate(batch.results.items())
    ]


def _ratio_table(comparison: DecodeComparison) -> Table:
    columns = [Column("ratio", "ratio", no_wrap=True)]
    rows: dict[tuple[str, str], dict[str, str]] = {pair: {} for pair in RATIOS}
    for index, batch in enumerate(comparison.batches):
        columns.append(Column(f"batch {batch.batch}", str(index), justify="right"))
        for above, below in _measured_ratios(batch):
            value = ratio(batch.results[above], batch.results[below])
            rows[above, below][str(index)] = value.text(".2f")
    return table_of(
        columns,
        [{"ratio": " / ".join(pair), **row} for pair, row in rows.items() if row],
        title="tokens/s, one over the other: median of the rounds (range)",
    )


def _label(comparison: DecodeComparison) -> str:
    name = comparison.model.name
    if comparison.draws is None:
        return name
    return f"{name}: step-cost measurement: accepted lengths drawn, weights untrained"


def _notes(comparison: DecodeComparison) -> list[str]:
    options, draws = comparison.options, comparison.draws
    sizes = ", ".join(f"{len(batch.requests)}" for batch in comparison.batches)
    notes = [
        f"{comparison.model.dtype_name} on {options.device}, {torch.get_num_threads()} CPU "
        f"threads, {options.rounds} rounds; requests a run: {sizes}. tok/fwd counts the passes of "
        "each request from its first token to its last, those in which it waited included; "
        "pos/fwd is what they fed, of a prompt its last token alone."
    ]
    if options.temperature > 0:
        notes.append(f"Sampled at temperature {options.temperature:g}, with the seeds 0, 1, ...")
    if draws is None:
        return notes
    notes.append(
        f"Lengths of accepted runs are drawn, {draws.acceptance.mean:.2f} on average "
        f"where enough masks are fed: {draws.acceptance.source}"
    )
    return notes
