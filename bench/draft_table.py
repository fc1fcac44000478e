"""The MARS paper's drafting configurations (arXiv 2604.07023, section 4.6 and table 6), through the
engine: tokens a forward pass of the target, and speed over ordinary speculative decoding.

    python bench/draft_table.py TARGET --draft DRAFT --plain-draft DRAFT_AR --data eval.jsonl

The contenders decode the same prompts in turn, in rounds; a ratio is taken in each round.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.method.mode import Mode
from mars_serve.engine.drafter import Drafter, drafting_checkpoint
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import DecodingOptions, Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.evaluation.scoring import EvalItem, read_items


class Configuration(NamedTuple):
    """Who drafts, and how the target decodes."""

    label: str
    drafts: str
    """``none``, ``ar`` or ``mars``."""
    options: DecodingOptions


class Run(NamedTuple):
    """All prompts once."""

    outputs: list[list[int]]
    num_passes: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Of the target; a prompt's own pass counts."""
        return sum(map(len, self.outputs)) / self.num_passes


def _configurations(max_tokens: int, threshold: float) -> list[Configuration]:
    def options(mode: Mode, window: int | None) -> DecodingOptions:
        return DecodingOptions(max_tokens, mode, threshold, window=window)

    return [
        Configuration("one token a pass", "none", options(Mode.AR, None)),
        Configuration("AR drafts, no masks", "ar", options(Mode.EXACT, 0)),
        Configuration("MARS drafts, no masks", "mars", options(Mode.EXACT, 0)),
        Configuration("MARS drafts, masks checked", "mars", options(Mode.EXACT, None)),
        Configuration(
            f"MARS drafts, masks by τ={threshold:g}", "mars", options(Mode.THRESHOLD, None)
        ),
        Configuration("no drafts, masks checked", "none", options(Mode.EXACT, None)),
        Configuration(
            f"no drafts, masks by τ={threshold:g}", "none", options(Mode.THRESHOLD, None)
        ),
    ]


def _engine(target: Checkpoint, draft: Path | None, num_drafts: int, batch: int) -> Engine:
    pages = batch * -(-target.max_length // 16)
    sizes = EngineSettings(max_num_seqs=batch, num_pages=pages, enable_prefix_caching=False)
    drafter = None
    if draft is not None:
        checkpoint = drafting_checkpoint(read_checkpoint(str(draft)), target)
        drafter = Drafter(Engine(checkpoint, sizes), num_drafts)
    engine = Engine(target, sizes, drafter=drafter)
    engine.warm_up()
    return engine


def _run(engine: Engine, items: list[EvalItem], options: DecodingOptions) -> Run:
    requests = [Request(str(i), list(item.prompt), options) for i, item in enumerate(items)]
    for request in requests:
        engine.add(request)
    num_passes, begin = 0, time.perf_counter()
    while engine.has_work:
        num_passes += len(engine.step())
    seconds = time.perf_counter() - begin
    return Run([r.tokens[r.num_prompt :] for r in requests], num_passes, seconds)


def _table(runs: dict[str, list[Run]], baseline: str, title: str) -> Table:
    table = Table(
        "configuration", "tokens/forward", "tokens/s", "over AR drafts", "same", title=title
    )
    first = next(iter(runs.values()))[0]
    for label, rounds in runs.items():
        ratios = [
            other.seconds / run.seconds for run, other in zip(rounds, runs[baseline], strict=True)
        ]
        speed = statistics.median(sum(map(len, run.outputs)) / run.seconds for run in rounds)
        pairs = zip(rounds[0].outputs, first.outputs, strict=True)
        same = statistics.mean(ours == theirs for ours, theirs in pairs)
        table.add_row(
            label,
            f"{rounds[0].tokens_per_forward:.2f}",
            f"{speed:,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{same:.1%}",
        )
    return table


def main(
    target: Path,
    draft: Annotated[Path, typer.Option(help="A smaller MARS checkpoint.")],
    plain_draft: Annotated[Path, typer.Option(help="The AR checkpoint it was trained from.")],
    data: Annotated[Path, typer.Option(help="Conversations, JSONL or Parquet.")],
    num_items: Annotated[int, typer.Option(min=1)] = 100,
    num_drafts: Annotated[int, typer.Option(min=1)] = 4,
    batch: Annotated[list[int] | None, typer.Option(help="Else 1 and 8.")] = None,
    threshold: Annotated[float, typer.Option()] = 0.95,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Print the table."""
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
        runs: dict[str, list[Run]] = {each.label: [] for each in configurations}
        for index in range(rounds):
            for each in configurations[index:] + configurations[:index]:
                runs[each.label].append(_run(engines[each.drafts], items, each.options))
        title = f"batch {size}, {num_drafts} drafts, {len(items)} prompts, {rounds} rounds"
        Console().print(_table(runs, "AR drafts, no masks", title))


if __name__ == "__main__":
    typer.run(main)
