"""Repeats the MARS paper's comparisons at the demo's scale (arXiv 2604.07023, tables 2, 3 and 8).

For every seed it trains AR SFT, AR SFT with as much computing as both MARS stages, and MARS for
every block size with and without the AR loss. The trainer's own loop trains each model on one
thread without Ray, and the engine scores it. A bench that was interrupted continues where it was;
the results are in `WORK/results`.

    python -m bench.training.tables WORK [--seeds 3] [--jobs 2]
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from bench.training.quiet import Quiet
from rich.console import Console

from mars_platform.cluster.session import ray_session
from mars_platform.cluster.settings import ClusterSettings
from mars_serve.measure.evaluation.evaluate import EvalOptions, evaluate
from mars_train.data.demo import write_demo_data
from mars_train.data.demo_tasks import draw_short
from mars_train.data.files import read_conversations
from mars_train.data.pipeline import prepare
from mars_train.recipe import Recipe
from mars_train.run.scratch import create_model
from mars_train.stage.job import StageJob
from mars_train.stage.parallel import Workers
from mars_train.stage.trainer import MODEL, StageTrainer
from mars_train.storage.directories import Storage

_RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
THRESHOLDS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
BLOCK_SIZES = (4, 8, 16)
AR_WEIGHTS = (1.0, 0.0)
MAX_TOKENS = 48


@dataclass(frozen=True)
class Run:
    """A model to train and score."""

    seed: int
    name: str
    stage: dict[str, Any]
    """Fields that differ from the demo's first stage."""
    from_ar: bool = True
    """Whether training starts from the seed's AR SFT model."""

    @property
    def key(self) -> str:
        return f"seed{self.seed}-{self.name}"


def execute(run: Run, work: Path) -> None:
    """Train and score one model, unless that is done already."""
    torch.set_num_threads(1)
    result = work / "results" / f"{run.key}.json"
    if result.exists():
        return
    storage = Storage(str(work / "models" / run.key))
    if MODEL not in storage.names():
        train(run, work, storage)
    options = EvalOptions(storage.path(MODEL), [work / "data/eval.jsonl"], max_tokens=MAX_TOKENS)
    rows = evaluate(options, Console(quiet=True)).rows
    result.parent.mkdir(exist_ok=True)
    result.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    typer.echo(f"{run.key}: done")


def train(run: Run, work: Path, storage: Storage) -> None:
    content = demo_recipe(work)
    stage = {**content["stages"][0], **run.stage}
    recipe = Recipe.model_validate({**content, "stages": [stage], "seed": run.seed})
    start = work / "start" / f"seed{run.seed}"
    if run.from_ar:
        start = work / "models" / f"seed{run.seed}-ar" / MODEL
    job = StageJob(
        recipe=recipe,
        stage=recipe.stages[0],
        storage=storage.root,
        start=str(start),
        data=str(work / "tokens"),
        held_out=None,
        provenance={},
    )
    StageTrainer(job, Workers("ddp", use_gpu=False, precision="no"), Quiet()).run()


def demo_recipe(work: Path) -> dict[str, Any]:
    content = yaml.safe_load(_RECIPE.read_text())
    content["data"]["train"] = [str(work / "data/train.jsonl")]
    content |= {"scaling": {"num_workers": 1}, "checkpoints": {"every_steps": 200}}
    return dict(content)


def make_ready(work: Path, seeds: int, examples: int, items: int) -> None:
    """Write data, tokens and a start model for each seed; all seeds share the tokenizer."""
    if not (work / "data").exists():
        write_demo_data(work / "data", draw_short, num_train=examples, num_eval=items, seed=0)
    recipe = Recipe.model_validate(demo_recipe(work))
    assert recipe.model.scratch is not None
    for seed in range(seeds):
        start = work / "start" / f"seed{seed}"
        if not start.exists():
            conversations = read_conversations(recipe.data.train)
            texts = [message.content for talk in conversations for message in talk.messages]
            create_model(recipe.model.scratch, texts, recipe.data.max_length, start, seed)
    if not (work / "tokens").exists():
        with ray_session(ClusterSettings(), min_cpus=2):
            prepare(recipe.data, work / "start" / "seed0", work / "tokens")


def runs_of(seed: int, ar_steps: int, mars_steps: int, matched_steps: int) -> list[Run]:
    """Return all runs of a seed; the others start from the first one's model."""
    ar = {"objective": "ar", "name": "ar"}
    second = {"learning_rate": 1.5e-3}
    runs = [
        Run(seed, "ar", {**ar, "max_steps": ar_steps}, from_ar=False),
        Run(seed, "ar-matched", {**ar, **second, "max_steps": matched_steps}),
    ]
    for block_size in BLOCK_SIZES:
        for weight in AR_WEIGHTS:
            stage = {
                "objective": "mars",
                "name": "mars",
                "block_size": block_size,
                "ar_weight": weight,
                "max_steps": mars_steps,
                **second,
            }
            runs.append(Run(seed, f"mars-b{block_size}-w{weight:g}", stage))
    return runs


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a model at one threshold, over the seeds."""

    accuracies: list[float]  # percent
    speed: float  # tokens per forward pass

    def __str__(self) -> str:
        low, high = min(self.accuracies), max(self.accuracies)
        return f"{statistics.mean(self.accuracies):.1f} ({low:.1f}-{high:.1f})"


def cells(work: Path, seeds: int, name: str) -> dict[float, Cell]:
    """Return a model's cells by threshold."""
    by_threshold: dict[float, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for row in json.loads((work / f"results/seed{seed}-{name}.json").read_text()):
            by_threshold.setdefault(row["setting"]["threshold"], []).append(row["score"])
    return {
        threshold: Cell(
            [100 * score["accuracy"][0] for score in scores],
            statistics.mean(score["tokens_per_forward"][0] for score in scores),
        )
        for threshold, scores in by_threshold.items()
    }


def markdown(header: list[str], rows: list[list[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def tables(work: Path, seeds: int) -> str:
    """Return three tables in Markdown, with means over the seeds and ranges of accuracy."""
    found = partial(cells, work, seeds)
    mars = {(size, w): found(f"mars-b{size}-w{w:g}") for size in BLOCK_SIZES for w in AR_WEIGHTS}
    quality: list[list[object]] = [
        ["AR SFT", found("ar")[1.0]],
        ["AR SFT, as much computing as both stages", found("ar-matched")[1.0]],
        *([f"MARS, B = {size}", mars[size, 1.0][1.0]] for size in BLOCK_SIZES),
    ]
    frontier: list[list[object]] = []
    for threshold in THRESHOLDS:
        row = [mars[size, 1.0][threshold] for size in BLOCK_SIZES]
        frontier.append([f"{threshold:g}", *(f"{cell}, {cell.speed:.2f}" for cell in row)])
    losses: list[list[object]] = [
        [size, "with" if w else "without", cell[1.0], cell[0.95], f"{cell[0.95].speed:.2f}"]
        for (size, w), cell in mars.items()
    ]
    return "\n".join(
        [
            markdown(["one-token mode", "accuracy, %"], quality),
            markdown(["τ", *(f"B = {size}" for size in BLOCK_SIZES)], frontier),
            markdown(["B", "AR loss", "one-token", "at .95", "tokens/forward at .95"], losses),
        ]
    )


def main(
    work: Annotated[Path, typer.Argument(help="Directory for data, models and results.")],
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Concurrent runs, each on one thread.")] = 2,
    ar_steps: Annotated[int, typer.Option(min=1, help="Steps of AR SFT.")] = 1200,
    mars_steps: Annotated[int, typer.Option(min=1, help="Steps of MARS.")] = 400,
    matched_steps: Annotated[
        int, typer.Option(min=1, help="AR steps that cost as much as the MARS steps.")
    ] = 640,
    examples: Annotated[int, typer.Option(min=1, help="Training conversations.")] = 40_000,
    items: Annotated[int, typer.Option(min=1, help="Conversations to score.")] = 500,
) -> None:
    """Train and score every model, then print the tables."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_ready(work, seeds, examples, items)
    plans = [runs_of(seed, ar_steps, mars_steps, matched_steps) for seed in range(seeds)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        list(pool.map(partial(execute, work=work), [plan[0] for plan in plans]))
        list(pool.map(partial(execute, work=work), [run for plan in plans for run in plan[1:]]))
    typer.echo(tables(work, seeds))


if __name__ == "__main__":
    typer.run(main)
