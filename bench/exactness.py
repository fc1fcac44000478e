"""Measures how often mode exact parts from mode ar, and how close the two tokens are there.

    python bench/exactness.py MODEL --data eval.jsonl --dtype bfloat16

Both modes read the same weights' logits, but in steps of different shapes, so a product may differ
in its last bits. In float32 that hardly ever matters. In bfloat16 two tokens whose logits differ by
about one rounding may change places. For each output that parts, the prompt and the common tokens
go through an ordinary forward pass without cache, in the given type and in float32. The gap is the
logit of mode ar's next token minus that of mode exact's. It should be at most a few roundings in
bfloat16, and about as small in float32, with either sign; a wide gap is an error of the engine.
Mode ar with one conversation after the other is measured too, since its steps also differ in shape.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table

from mars_platform.checkpoint.directory import load_model, read_checkpoint
from mars_platform.cli.report import output_console
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import Outcomes
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MANTISSA_BITS = {"float32": 23, "bfloat16": 7}


@dataclass(frozen=True)
class Parting:
    """The first place where two outputs of a prompt differ."""

    way: str
    """Decoding that parts from mode ar: mode exact with its outcomes, or mode ar one by one."""
    source: str
    """Source of the conversation."""
    place: int
    """Number of output tokens that both have in common."""
    tokens: tuple[int, int]
    """Next token of mode ar, and of the other decoding."""
    gap: float
    """Logit of the first token minus that of the second, in the type of the weights."""
    roundings: float
    """Size of the gap in distances of neighbouring numbers of that type at the larger logit."""
    gap_float32: float
    """Gap with activations in float32; the weights are rounded as before."""
    usual_gap: float
    """Median gap between the two likeliest tokens over the common tokens."""


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")],
    data: Annotated[list[Path], typer.Option(help="Conversations, JSONL or Parquet.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of weights, keys and values.")
    ] = "bfloat16",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run.")] = "cpu",
    max_items: Annotated[int | None, typer.Option(min=1, help="Most conversations.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Decode in modes ar and exact and measure the gaps where they part."""
    torch.set_num_threads(threads)
    checkpoint = read_checkpoint(model)
    items = read_items(
        data, checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=max_items
    )
    engine = evaluation_engine(
        checkpoint, items, max_tokens=max_tokens, max_num_seqs=batch, exact=True,
        dtype=_DTYPES[dtype], device=device,
    )  # fmt: skip
    run = partial(run_setting, engine, max_tokens=max_tokens)
    baseline = run(items, ONE_TOKEN)
    decoded = {
        f"exact, {outcomes}": run(items, DecodingSetting(Mode.EXACT, 1.0, outcomes=outcomes))
        for outcomes in (Outcomes.ALL, Outcomes.LAST)
    }
    decoded["ar, one by one"] = [run([item], ONE_TOKEN)[0] for item in items]
    del engine, run  # frees the weights before others are loaded
    reader = LogitReader(checkpoint.own_path, dtype, device)
    partings = [
        reader.parting(way, item, ours, theirs)
        for way, results in decoded.items()
        for item, ours, theirs in zip(items, baseline, results, strict=True)
        if ours.tokens != theirs.tokens
    ]
    num_tokens = sum(each.num_tokens for each in baseline)
    if as_json:
        figures = {"dtype": dtype, "num_items": len(items), "num_tokens": num_tokens}
        typer.echo(json.dumps({**figures, "partings": [asdict(each) for each in partings]}))
        return
    typer.echo(f"{len(items)} outputs, {num_tokens} tokens in mode ar, {dtype}")
    print_table(partings, decoded, len(items), dtype)


class LogitReader:
    """Reads logits of ordinary forward passes, in a given type and in float32."""

    def __init__(self, path: Path, dtype: str, device: str) -> None:
        """Load the weights twice; both copies are rounded to the given type."""
        self._dtype = dtype
        self._rounded = load_model(path, dtype=_DTYPES[dtype]).to(device)
        self._wide = load_model(path, dtype=_DTYPES[dtype]).to(device).float()
        self._device = device

    @torch.inference_mode()
    def parting(self, way: str, item: EvalItem, ours: DecodedItem, theirs: DecodedItem) -> Parting:
        """Return the first difference of two outputs of an item; ``ours`` is mode ar's."""
        pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
        place, tokens = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        ids = torch.tensor([[*item.prompt, *ours.tokens[:place]]], device=self._device)
        first = len(item.prompt) - 1
        rounded = self._rounded(input_ids=ids, use_cache=False).logits[0, first:].float()
        wide = self._wide(input_ids=ids, use_cache=False).logits[0, first:]
        pair, pair_float32 = rounded[-1, [*tokens]].tolist(), wide[-1, [*tokens]].tolist()
        largest, second = rounded.topk(2).values.unbind(-1)  # [place + 1] each
        gap, step = pair[0] - pair[1], _distance(max(map(abs, pair)), self._dtype)
        return Parting(
            way,
            item.source,
            place,
            tokens,
            gap,
            abs(gap) / step,
            pair_float32[0] - pair_float32[1],
            (largest - second).median().item(),
        )


def _distance(value: float, dtype: str) -> float:
    """Return the distance from a positive number to the next larger one of a type."""
    return float(2.0 ** (math.floor(math.log2(value)) - _MANTISSA_BITS[dtype]))


def print_table(
    partings: Sequence[Parting], ways: Iterable[str], num_items: int, dtype: str
) -> None:
    """Print how many outputs differ, and the distribution of the gaps' sizes."""
    table = Table("against mode ar", "outputs that differ", "gap", "least", "median", "most")
    for way in ways:
        own = [each for each in partings if each.way == way]
        share = f"{len(own)} ({100 * len(own) / num_items:.2f}%)"
        columns = {
            dtype: [abs(each.gap) for each in own],
            "in roundings": [each.roundings for each in own],
            "float32": [abs(each.gap_float32) for each in own],
            "likeliest two before": [each.usual_gap for each in own],
        }
        for index, (name, values) in enumerate(columns.items() if own else [("", list[float]())]):
            first = [way, share] if index == 0 else ["", ""]
            table.add_row(*first, name, *_spread(values))
        table.add_section()
    output_console(100).print(table)


def _spread(values: Sequence[float]) -> list[str]:
    if not values:
        return ["", "", ""]
    return [f"{value:.4g}" for value in (min(values), statistics.median(values), max(values))]


if __name__ == "__main__":
    typer.run(main)
