"""Makes the varied bed: data, a model's AR checkpoint, its own responses, and its MARS checkpoint.

    python -m bench.beds.make WORK [--new 1000] [--set stages.0.max_steps=100]

``WORK/data`` has the conversations, ``WORK/new.jsonl`` further prompts for speed measurements, and
``WORK/model`` the run of `bench/recipes/varied.yaml`: ``stages/ar`` is the AR checkpoint,
``stages/generate`` its responses, and ``model`` the MARS checkpoint. A finished part is kept.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer
from bench.beds.tasks import draw_varied

from mars_train.cli.commands import train
from mars_train.data.demo import write_demo_data

RECIPE = Path(__file__).parents[1] / "recipes/varied.yaml"
_OTHER_SEED = 1_000


def write_new(out: Path, count: int, known: Path) -> None:
    """Write conversations whose questions the directory ``known`` does not have."""
    seen = {
        json.loads(line)["messages"][0]["content"]
        for name in ("train.jsonl", "eval.jsonl")
        for line in (known / name).read_text().splitlines()
    }
    rng, rows = random.Random(_OTHER_SEED), dict[str, str]()
    while len(rows) < count:
        task = draw_varied(rng)
        if task.question not in seen:
            rows[task.question] = json.dumps(task.row())
    out.write_text("".join(row + "\n" for row in rows.values()))


def main(
    work: Annotated[Path, typer.Argument(help="Directory for data and models.")],
    examples: Annotated[int, typer.Option(min=16, help="Training conversations.")] = 40_000,
    held_out: Annotated[int, typer.Option(min=1, help="Held-out conversations.")] = 300,
    new: Annotated[int, typer.Option(min=1, help="Further conversations.")] = 1_000,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Setting of the recipe.")] = None,
) -> None:
    """Make what is not there yet."""
    data = work / "data"
    if not (data / "train.jsonl").exists():
        write_demo_data(data, draw_varied, num_train=examples, num_eval=held_out, seed=0)
    write_new(work / "new.jsonl", new, data)
    places = [f"data.train=[{data / 'train.jsonl'}]", f"output={work / 'model'}"]
    train([str(RECIPE)], set_=[*places, *(set_ or [])])


if __name__ == "__main__":
    typer.run(main)
