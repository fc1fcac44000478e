"""The demo's chat tasks, whose answers mix fixed phrases with results to be computed.

There are three kinds. Copying a number and adding two digits are learnt with certainty. Running
totals are not, because each total depends on the one before it: a model that emits several in one
forward pass has to add up internally, which a small model does with varying confidence. There a
lower threshold trades accuracy for speed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mars_platform.data.answers import ANSWER_MARK
from mars_platform.errors import UserError

_THINGS = ["apples", "bells", "books", "cards", "coins", "cups", "hats", "pens", "shells", "stamps"]
_NUM_STEPS, _MAX_CHANGE = 4, 5
_LOWEST, _HIGHEST = 10 + _NUM_STEPS * _MAX_CHANGE, 99 - _NUM_STEPS * _MAX_CHANGE  # two digits
_MAX_MISSES = 1_000


@dataclass(frozen=True)
class Task:
    """A question with a worked response and its answer."""

    kind: str
    question: str
    response: str
    answer: str

    def row(self) -> dict[str, object]:
        """Return the task as a row of chat data; ``answer`` makes it checkable."""
        messages = [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": f"{self.response} {ANSWER_MARK} {self.answer}"},
        ]
        return {"messages": messages, "answer": self.answer, "kind": self.kind}


def _boxes(rng: random.Random) -> Task:
    thing, count = rng.choice(_THINGS), rng.randint(10, 99)
    return Task(
        "boxes",
        f"Count a box of {count} {thing}",
        f"There are {count} {thing} in the box.",
        str(count),
    )


def _sums(rng: random.Random) -> Task:
    thing, first, second = rng.choice(_THINGS), rng.randint(1, 9), rng.randint(1, 9)
    return Task(
        "sums",
        f"Add {first} and {second} {thing}",
        f"Adding {second} to {first} gives {first + second} {thing}.",
        str(first + second),
    )


def _totals(rng: random.Random) -> Task:
    totals, steps = [rng.randint(_LOWEST, _HIGHEST)], []
    for _ in range(_NUM_STEPS):
        change = rng.choice([1, -1]) * rng.randint(1, _MAX_CHANGE)
        steps.append(f"{change:+d}")
        totals.append(totals[-1] + change)
    return Task(
        "totals",
        f"Start at {totals[0]}. Steps: {' '.join(steps)}",
        f"Totals: {' '.join(map(str, totals[1:]))}.",
        str(totals[-1]),
    )


_KINDS: list[tuple[Callable[[random.Random], Task], float]] = [
    (_boxes, 0.15),
    (_sums, 0.15),
    (_totals, 0.70),
]


def draw_task(rng: random.Random) -> Task:
    """Draw a random task; each kind has a fixed share."""
    makers, shares = zip(*_KINDS, strict=True)
    maker: Callable[[random.Random], Task] = rng.choices(makers, shares)[0]
    return maker(rng)


def write_demo_data(out: Path, *, num_train: int, num_eval: int, seed: int) -> None:
    """Write ``train.jsonl`` and ``eval.jsonl``, which share no question.

    Held-out questions are distinct. Training questions may repeat, because the simple kinds have
    only some hundreds.

    Raises:
        UserError: the directory has data already, or there are fewer distinct questions.
    """
    existing = [name for name in ("train.jsonl", "eval.jsonl") if (out / name).exists()]
    if existing:
        raise UserError(f"--out: {out} has {existing[0]} already; name another directory")
    rng = random.Random(seed)
    held_out: dict[str, Task] = {}
    misses = 0
    while len(held_out) < num_eval:
        task = draw_task(rng)
        misses = misses + 1 if task.question in held_out else 0
        if misses > _MAX_MISSES:
            raise UserError(f"--eval-examples: there are not {num_eval} distinct questions")
        held_out[task.question] = task
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "eval.jsonl", list(held_out.values()))
    train: list[Task] = []
    while len(train) < num_train:
        task = draw_task(rng)
        if task.question not in held_out:
            train.append(task)
    _write(out / "train.jsonl", train)


def _write(path: Path, tasks: list[Task]) -> None:
    with path.open("w", encoding="utf-8") as handle:
        handle.writelines(json.dumps(task.row()) + "\n" for task in tasks)
