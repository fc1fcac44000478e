"""Compares the time of an engine's step with and without an adapter, on random weights.

    python bench/adapter_steps.py --untrained qwen2-100m --dtype bfloat16 --rank 32

Two engines of one model, one of them with an adapter, run the same steps in turns, so that other
programs disturb both alike. The table gives the median step of each and the median of the ratios
of neighbours, with its quartiles: for steps of mode ar, and for steps that feed masks. On a busy
machine, ``--clock cpu --threads 1`` counts the seconds that this process computes, which is the
whole step where nothing else runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.adapter.layers import adapter_parameters, attach_adapter
from mars_platform.checkpoint.adapter.settings import AdapterSettings
from mars_serve.bench.decode.models import BenchModel, untrained_model
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings

_PAGE_SIZE = 16


def _engine(
    model: BenchModel, most_rows: int, cached: int, rank: int | None, *, compiled: bool
) -> Engine:
    weights = model.create()
    metadata = model.checkpoint.metadata
    assert metadata is not None
    if rank is not None:
        attach_adapter(weights, AdapterSettings(rank=rank), metadata.mask_token_id)
        with torch.no_grad():
            for parameter in adapter_parameters(weights).values():
                parameter.normal_(std=0.02)
    pages = most_rows * (cached // _PAGE_SIZE + 2)
    settings = EngineSettings(
        num_pages=pages, page_size=_PAGE_SIZE, max_num_seqs=most_rows, compile=compiled
    )
    return Engine(model.checkpoint, settings, model=weights.requires_grad_(False).eval())


def _rows(engine: Engine, count: int, cached: int, masks: int) -> list[ScheduledRow]:
    rows = []
    for index in range(count):
        request = Request(str(index), [5] * (cached + 1), DecodingOptions(1))
        request.num_cached = cached
        request.pages = engine._pool.allocate(engine._pool.pages_for(cached + 1))
        rows.append(ScheduledRow(request, 1, (masks,), reads_logits=True))
    return rows


def _times(
    engines: list[Engine],
    rows: list[list[ScheduledRow]],
    repeats: int,
    clock: Callable[[], float],
) -> list[list[float]]:
    """Return the seconds of each engine's steps, which take turns."""
    times = [list[float]() for _ in engines]
    for turn in range(repeats + 3):
        for index in (0, 1) if turn % 2 else (1, 0):
            begin = clock()
            engines[index]._runner.run(rows[index])
            if turn >= 3:
                times[index].append(clock() - begin)
    return times


def main(
    untrained: Annotated[str, typer.Option(help="Size, or a config.json.")] = "qwen2-100m",
    dtype: Annotated[str, typer.Option(help="Type of the weights.")] = "float32",
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter.")] = 32,
    batch: Annotated[list[int] | None, typer.Option(help="Rows of a step.")] = None,
    masks: Annotated[int, typer.Option(min=1, help="Masks of a row.")] = 8,
    cached: Annotated[int, typer.Option(min=1, help="Cached tokens of a row.")] = 256,
    repeats: Annotated[int, typer.Option(min=2, help="Timed steps of each engine.")] = 40,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    clock: Annotated[Literal["wall", "cpu"], typer.Option(help="Clock to time by.")] = "wall",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile both models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time steps with and without an adapter, in turns."""
    if threads is not None:
        torch.set_num_threads(threads)
    clock_of = {"wall": time.perf_counter, "cpu": time.process_time}
    batches = batch or [1, 4, 16]
    model = untrained_model(untrained, getattr(torch, dtype), "cpu", 0)
    metadata = model.checkpoint.metadata
    assert metadata is not None
    metadata = metadata.model_copy(update={"block_size": masks})
    model = replace(model, checkpoint=replace(model.checkpoint, metadata=metadata))
    engines = [
        _engine(model, max(batches), cached, each, compiled=compiled) for each in (None, rank)
    ]
    found = []
    for count in batches:
        for num_masks in (0, masks):
            rows = [_rows(engine, count, cached, num_masks) for engine in engines]
            alone, adapted = _times(engines, rows, repeats, clock_of[clock])
            for engine, own in zip(engines, rows, strict=True):
                for row in own:
                    engine._pool.release(row.request.pages)
            low, ratio, high = statistics.quantiles(
                [ours / theirs for ours, theirs in zip(adapted, alone, strict=True)]
            )
            found.append(
                {
                    "batch": count,
                    "masks": num_masks,
                    "alone_ms": 1000 * statistics.median(alone),
                    "adapted_ms": 1000 * statistics.median(adapted),
                    "ratio": ratio,
                    "low": low,
                    "high": high,
                }
            )
    if as_json:
        print(json.dumps(found))
        return
    table = Table("rows", "masks a row", "alone, ms", "adapter, ms", "ratio", "quartiles")
    for each in found:
        table.add_row(
            *(f"{each[name]:g}" for name in ("batch", "masks")),
            *(f"{each[name]:.2f}" for name in ("alone_ms", "adapted_ms")),
            f"{each['ratio']:.3f}",
            f"{each['low']:.3f} to {each['high']:.3f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
