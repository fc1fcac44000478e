"""How often mode exact parts from mode ar, and by how little the model prefers one token there.

    python bench/exactness.py MODEL --data eval.jsonl --dtype bfloat16

Both modes read the same weights' logits, but in steps of different shapes, so that a product may
differ in its last bits. In float32 that hardly ever matters; in bfloat16 two tokens whose logits
are as near as a rounding may change places. For each output that parts, the prompt and the tokens
that both have in common go through an ordinary forward pass, without cache, in the given type and
in float32. The gap is the logit of mode ar's next token minus that of mode exact's: in bfloat16 it
should be no more than a few roundings, in float32 about as small, of either sign. A wide gap would
be an error of the engine. Mode ar with one conversation after the other is measured beside, for its
steps differ in shape too.
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
from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.directory import load_model, read_checkpoint
from mars_platform.method.mode import Mode
from mars_serve.engine.request import Outcomes
from mars_serve.measure.evaluation.scoring import (
    ONE_TOKEN,
    EvalItem,
    Outcome,
    Setting,
    evaluation_engine,
    read_items,
    run_setting,
)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MANTISSA_BITS = {"float32": 23, "bfloat16": 7}


@dataclass(frozen=True)
class Parting:
    """The first place where two outputs of a prompt differ."""

    way: str
    """What parts from mode ar: mode exact in a layout, or mode ar one by one."""
    source: str
    place: int
    """Output tokens that both have in common."""
    tokens: tuple[int, int]
    """Mode ar's next token and the other's."""
    gap: float
    """Logit of the first minus that of the second, in the type of the weights."""
    roundings: float
    """The gap's size over the distance of neighbouring numbers of that type at the larger logit."""
    gap_float32: float
    """The gap with weights and activations in float32, the weights rounded as before."""
    usual_gap: float
    """Logit of the likeliest token minus that of the second one, median up to there."""


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")],
    data: Annotated[list[Path], typer.Option(help="Conversations, JSONL or Parquet.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of weights, keys and values.")
    ] = "bfloat16",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run.")] = "cpu",
    max_items: Annotated[int | None, typer.Option(min=1, help="Conversations at most.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens at the most.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Conversations that run at once.")] = 32,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Decode in modes ar and exact and look at where they part."""
    torch.set_num_threads(threads)
    checkpoint = read_checkpoint(model)
    items = read_items(
        data, checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=max_items
    )
    engine = evaluation_engine(
        checkpoint,
        items,
        max_tokens=max_tokens,
        max_num_seqs=batch,
        exact=True,
        dtype=_DTYPES[dtype],
        device=device,
    )
    run = partial(run_setting, engine, max_tokens=max_tokens)
    baseline = run(items, ONE_TOKEN)
    decoded = {
        f"exact, {outcomes}": run(items, Setting(Mode.EXACT, 1.0, outcomes=outcomes))
        for outcomes in (Outcomes.ALL, Outcomes.LAST)
    }
    decoded["ar, one by one"] = [run([item], ONE_TOKEN)[0] for item in items]
    del engine, run  # its weights go before others come
    assert checkpoint.path is not None
    reader = LogitReader(checkpoint.path, dtype, device)
    partings = [
        reader.parting(way, item, ours, theirs)
        for way, results in decoded.items()
        for item, ours, theirs in zip(items, baseline, results, strict=True)
        if ours.tokens != theirs.tokens
    ]
    if as_json:
        figures = {"dtype": dtype, "num_items": len(items), "num_tokens": num_tokens(baseline)}
        typer.echo(json.dumps({**figures, "partings": [asdict(each) for each in partings]}))
        return
    typer.echo(f"{len(items)} outputs, {num_tokens(baseline)} tokens in mode ar, {dtype}")
    print_table(partings, decoded, len(items), dtype)


class LogitReader:
    """Logits of ordinary forward passes, in the type asked for and in float32."""

    def __init__(self, path: Path, dtype: str, device: str) -> None:
        """Load the weights twice, rounded alike."""
        self._dtype = dtype
        self._rounded = load_model(path, dtype=_DTYPES[dtype]).to(device)
        self._wide = load_model(path, dtype=_DTYPES[dtype]).to(device).float()
        self._device = device

    @torch.inference_mode()
    def parting(self, way: str, item: EvalItem, ours: Outcome, theirs: Outcome) -> Parting:
        """Where two outputs of an item part, ``ours`` of mode ar."""
        pairs = enumerate(zip(ours.tokens, theirs.tokens, strict=False))
        place, tokens = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        ids = torch.tensor([[*item.prompt, *ours.tokens[:place]]], device=self._device)
        first = len(item.prompt) - 1
        rounded = self._rounded(input_ids=ids, use_cache=False).logits[0, first:].float()
        wide = self._wide(input_ids=ids, use_cache=False).logits[0, first:]
        pair, pair_float32 = rounded[-1, [*tokens]].tolist(), wide[-1, [*tokens]].tolist()
        largest, second = rounded.topk(2).values.unbind(-1)  # [common + 1] each
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
    """From a positive number to the next larger one of a type."""
    return float(2.0 ** (math.floor(math.log2(value)) - _MANTISSA_BITS[dtype]))


def num_tokens(outcomes: Iterable[Outcome]) -> int:
    """Output tokens of all items."""
    return sum(outcome.num_tokens for outcome in outcomes)


def print_table(
    partings: Sequence[Parting], ways: Iterable[str], num_items: int, dtype: str
) -> None:
    """Print counts and the distribution of the gaps' sizes."""
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
    console = Console()
    if not console.is_terminal:
        console.width = 100
    console.print(table)


def _spread(values: Sequence[float]) -> list[str]:
    if not values:
        return ["", "", ""]
    return [f"{value:.4g}" for value in (min(values), statistics.median(values), max(values))]


if __name__ == "__main__":
    typer.run(main)
