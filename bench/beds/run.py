"""Compares ways of training on the varied tasks: every variant of `variants.py`, for every seed.

One AR checkpoint is trained; all variants continue from it, each seed on one thread. A
variant and seed that has its result in ``WORK/results`` is not run again, so an interrupted run
goes on where it was. The tables are printed and written to ``WORK/table.md``.

    python -m bench.beds.run WORK [--seeds 3] [--jobs 2] [--only NAME ...]
"""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.beds.command import telling_mistakes
from bench.beds.models import AR, Bed, Sizes
from bench.beds.report import Result, table
from bench.beds.scores import score_checkpoint
from bench.beds.variants import BASELINE, VARIANTS, Responses, Variant

from mars_platform.errors import UserError


def run_ar(bed: Bed) -> None:
    """Train and score the AR checkpoint, unless that is done."""
    _run(bed, 0, AR, bed.train_ar)


def generate(kind: Responses, bed: Bed) -> None:
    """Write responses of the AR checkpoint, unless they are there."""
    torch.set_num_threads(1)
    bed.generate(kind)


def run_variant(task: tuple[int, Variant], bed: Bed) -> None:
    """Train and score a variant, unless that is done."""
    seed, variant = task
    _run(bed, seed, variant.name, partial(bed.train_variant, seed, variant))


def _run(bed: Bed, seed: int, name: str, train: Any) -> None:
    result = _result(bed, seed, name)
    if result.exists():
        return
    torch.set_num_threads(1)
    found = train()
    found |= score_checkpoint(bed.model(seed, name), bed.ar_model, bed.held_out)
    result.parent.mkdir(exist_ok=True)
    partial_file = result.with_suffix(".partial")
    partial_file.write_text(json.dumps(found))
    partial_file.rename(result)
    typer.echo(f"seed {seed}, {name}: trained in {found['train']['cpu_s']:.0f} s of CPU time, "
               f"scored in {found['score_s']:.0f} s")  # fmt: skip


def _result(bed: Bed, seed: int, name: str) -> Path:
    return bed.work / "results" / f"seed{seed}-{name}.json"


def read_results(bed: Bed) -> dict[str, dict[int, Result]]:
    """Return the results that there are, by variant in the order of the list, and by seed.

    Raises:
        UserError: a result is damaged.
    """
    found: dict[str, dict[int, Result]] = {}
    for file in sorted((bed.work / "results").glob("seed*.json")):
        seed, _, name = file.stem.removeprefix("seed").partition("-")
        try:
            result = json.loads(file.read_text())
        except ValueError as error:
            raise UserError(f"{file} is damaged; delete it, and it is measured again") from error
        found.setdefault(name, {})[int(seed)] = result
    order = [AR, *(variant.name for variant in VARIANTS)]
    return {
        name: found[name]
        for name in (*(n for n in order if n in found), *sorted({*found} - {*order}))
    }


def chosen(only: list[str]) -> list[Variant]:
    """Return the variants of these names; all of them without a name.

    Raises:
        UserError: there is no variant of a name.
    """
    names = [variant.name for variant in VARIANTS]
    if unknown := [name for name in only if name not in names]:
        raise UserError(f"--only: there is no variant {unknown[0]}; name one of {', '.join(names)}")
    return [variant for variant in VARIANTS if variant.name in only or not only]


def with_blocks(variant: Variant, block_size: int) -> Variant:
    """Return a variant with another block size, under a name of its own.

    It becomes the largest of several sizes; the others keep their ratio to it.
    """
    sizes = variant.stage.get("block_size", [block_size])
    scaled = sorted({max(1, size * block_size // sizes[-1]) for size in sizes})
    stage = {**variant.stage, "block_size": scaled}
    return replace(variant, name=f"{variant.name}-b{block_size}", stage=stage)


@contextmanager
def _workers(jobs: int) -> Iterator[Callable[[Callable[[Any], None], Iterable[Any]], object]]:
    """Give a function that runs another one on all tasks, by as many processes as there are jobs.

    A single job runs in this process.
    """
    if jobs == 1:
        yield lambda run, tasks: deque(map(run, tasks), maxlen=0)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda run, tasks: deque(pool.map(run, tasks), maxlen=0)


def main(
    work: Annotated[Path, typer.Argument(help="Directory for data, models and results.")],
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Concurrent runs, each on one thread.")] = 2,
    only: Annotated[list[str] | None, typer.Option(help="Variants to run; all if none.")] = None,
    examples: Annotated[int, typer.Option(min=16, help="Training conversations.")] = 40_000,
    items: Annotated[int, typer.Option(min=1, help="Conversations to score.")] = 300,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Block size to train with, part of the names then.")
    ] = None,
    ar_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of stage ar, for a trial.")
    ] = None,
    mars_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the baseline's stage mars, for a trial.")
    ] = None,
) -> None:
    """Train and score every variant, then print the tables."""
    bed = Bed(work.resolve(), Sizes(examples, items, ar_steps=ar_steps, mars_steps=mars_steps))
    with telling_mistakes():
        variants = chosen(only or [])
        read_results(bed)  # a damaged one is named now, not after hours of training
        bed.make_ready()
    if block_size is not None:
        variants = [with_blocks(variant, block_size) for variant in variants]
    run_ar(bed)
    kinds = {each.responses for each in variants if each.responses is not None}
    with _workers(jobs) as run_all:
        run_all(partial(generate, bed=bed), sorted(kinds))
        tasks = [(seed, variant) for variant in variants for seed in range(seeds)]
        run_all(partial(run_variant, bed=bed), tasks)
    text = table(read_results(bed), BASELINE, AR)
    (bed.work / "table.md").write_text(text)
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
