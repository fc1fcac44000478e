"""Measures the MARS paper's ways to draft (arXiv 2604.07023, section 4.6 and table 6).

    python -m bench.draft_table TARGET --draft DRAFT --plain-draft DRAFT_AR --data eval.jsonl

For each configuration, the table shows the tokens per forward pass of the target model and the
speed as a multiple of ordinary speculative decoding's. The configurations decode the same prompts
in turn, round after round; a ratio compares two runs of the same round.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from bench.engine_runs import EngineRun, decode, settings_for, warm_engine
from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.drafting.drafter import Drafter, drafting_checkpoint
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.measure.evaluation.items import EvalItem, read_items

_BASELINE = "AR drafts, no masks"
"""Label of ordinary speculative decoding."""


class Configuration(NamedTuple):
    """A drafting model and the way in which the target decodes."""

    label: str
    drafts: str
    """Drafting model: ``none``, ``ar`` or ``mars``."""
    options: DecodingOptions


def _configurations(max_tokens: int, threshold: float) -> list[Configuration]:
    def options(mode: Mode, window: int | None) -> DecodingOptions:
        return DecodingOptions(max_tokens, mode, threshold, window=window)

    one_token, verified = options(Mode.AR, None), options(Mode.EXACT, None)
    no_masks, by_threshold = options(Mode.EXACT, 0), options(Mode.THRESHOLD, None)
    return [
        Configuration("one token a pass", "none", one_token),
        Configuration(_BASELINE, "ar", no_masks),
        Configuration("MARS drafts, no masks", "mars", no_masks),
        Configuration("MARS drafts, masks verified", "mars", verified),
        Configuration(f"MARS drafts, masks by τ={threshold:g}", "mars", by_threshold),
        Configuration("no drafts, masks verified", "none", verified),
        Configuration(f"no drafts, masks by τ={threshold:g}", "none", by_threshold),
    ]


def _engine(target: Checkpoint, draft: Path | None, num_drafts: int, batch: int) -> Engine:
    settings = settings_for(target, batch)
    if draft is None:
        return warm_engine(target, settings)
    checkpoint = drafting_checkpoint(read_checkpoint(str(draft)), target)
    return warm_engine(target, settings, Drafter(Engine(checkpoint, settings), num_drafts))


def _requests(items: list[EvalItem], options: DecodingOptions) -> list[Request]:
    return [Request(str(index), list(item.prompt), options) for index, item in enumerate(items)]


def _table(runs: dict[str, list[EngineRun]], title: str) -> Table:
    columns = ("configuration", "tokens/forward", "tokens/s", "over AR drafts", "same")
    table = Table(*columns, title=title)
    first = next(iter(runs.values()))[0]
    for label, rounds in runs.items():
        pairs = zip(rounds, runs[_BASELINE], strict=True)
        ratios = [baseline.seconds / run.seconds for run, baseline in pairs]
        outputs = zip(rounds[0].outputs, first.outputs, strict=True)
        same = statistics.mean(output == expected for output, expected in outputs)
        table.add_row(
            label,
            f"{rounds[0].tokens_per_forward:.2f}",
            f"{statistics.median(run.tokens_per_s for run in rounds):,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{same:.1%}",
        )
    return table


def main(
    target: Annotated[Path, typer.Argument(help="MARS checkpoint that is decoded.")],
    draft: Annotated[Path, typer.Option(help="A smaller MARS checkpoint.")],
    plain_draft: Annotated[Path, typer.Option(help="The AR checkpoint it was trained from.")],
    data: Annotated[Path, typer.Option(help="Conversations, JSONL or Parquet.")],
    num_items: Annotated[int, typer.Option(min=1, help="Conversations to decode.")] = 100,
    num_drafts: Annotated[int, typer.Option(min=1, help="Drafts in each step.")] = 4,
    batch: Annotated[
        list[int] | None, typer.Option(help="Concurrent requests; may be repeated; 1 and 8.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="τ of mode threshold.")] = 0.95,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each configuration.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """Print one table for each batch size."""
    torch.set_num_threads(threads)
    checkpoint = read_checkpoint(str(target))
    length = checkpoint.max_length
    items = read_items([data], checkpoint.tokenizer, max_length=length, max_items=num_items)
    max_tokens = length - max(len(item.prompt) for item in items)
    paths = {"none": None, "ar": plain_draft, "mars": draft}
    for size in batch or [1, 8]:
        engines = {
            name: _engine(checkpoint, path, num_drafts, size) for name, path in paths.items()
        }
        configurations = _configurations(max_tokens, threshold)
        runs: dict[str, list[EngineRun]] = {each.label: [] for each in configurations}
        for index in range(rounds):
            for each in configurations[index:] + configurations[:index]:
                requests = _requests(items, each.options)
                runs[each.label].append(decode(engines[each.drafts], requests))
        title = f"batch {size}, {num_drafts} drafts, {len(items)} prompts, {rounds} rounds"
        Console().print(_table(runs, title))


if __name__ == "__main__":
    typer.run(main)
