"""Writes the demo's chat data: random tasks for training, and others that are held out."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from mars_platform.errors import UserError
from mars_train.data.demo_tasks import Task, TaskMaker

_MAX_MISSES = 1_000
_TOLD_EVERY = 500
"""Number of tasks between two reports of progress."""


def write_demo_data(
    out: Path,
    draw: TaskMaker,
    *,
    num_train: int,
    num_eval: int,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write ``train.jsonl`` and ``eval.jsonl``, which share no question.

    Held-out questions are distinct. Training questions may repeat, because some kinds have only
    some hundreds. ``on_progress`` gets the number of tasks drawn, and that of all.

    Raises:
        UserError: the directory has data already or cannot be made, or there are fewer distinct
            questions.
    """
    existing = [name for name in ("train.jsonl", "eval.jsonl") if (out / name).exists()]
    if existing:
        raise UserError(f"--out: {out} has {existing[0]} already; name another directory")
    rng = random.Random(seed)
    held_out: dict[str, Task] = {}
    misses = 0
    while len(held_out) < num_eval:
        task = draw(rng)
        misses = misses + 1 if task.question in held_out else 0
        if misses > _MAX_MISSES:
            raise UserError(f"--eval-examples: there are not {num_eval} distinct questions")
        held_out[task.question] = task
        if len(held_out) % _TOLD_EVERY == 0:
            on_progress(len(held_out), num_eval + num_train)
    _make(out)
    _write(out / "eval.jsonl", list(held_out.values()))
    train: list[Task] = []
    while len(train) < num_train:
        task = draw(rng)
        if task.question not in held_out:
            train.append(task)
            if len(train) % _TOLD_EVERY == 0:
                on_progress(num_eval + len(train), num_eval + num_train)
    _write(out / "train.jsonl", train)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out: {out} cannot be made ({error.strerror}); name another directory"
        ) from error


def _write(path: Path, tasks: list[Task]) -> None:
    with path.open("w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(task.row()) + "\n" for task in tasks)
