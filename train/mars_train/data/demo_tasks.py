"""Chat tasks with checkable answers, drawn at random: what the demo and the tests train on.

Two families of tasks are for two purposes. `draw_short` is for tests: its answers of 22 tokens have
one wording each, so that a model of any size is soon certain of nearly all of it. `draw_ledger` is
the demo's: its answers are four times as long, and their wording is free. A model cannot know which
of several wordings comes next, so the tokens behind appended masks are as uncertain as those of
natural text, and each result depends on the one before it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from mars_platform.data.conversations import ANSWER_MARK

_THINGS = ["apples", "bells", "books", "cards", "coins", "cups", "hats", "pens", "shells", "stamps"]
_MAX_CHANGE = 5
_NUM_SHORT_CHANGES = 4
_LOWEST = 10 + _NUM_SHORT_CHANGES * _MAX_CHANGE  # totals keep two digits
_HIGHEST = 99 - _NUM_SHORT_CHANGES * _MAX_CHANGE

_NUM_LEDGER_CHANGES = 8
_MAX_LEDGER_CHANGE = 3
"""Largest change of a ledger. A tiny model learns sums with few different changes in far fewer
steps."""
_WEIGHTS = (0.6, 0.25, 0.15)
"""Shares of the three wordings. The tokenizer gives those of one place equal numbers of tokens, so
that the wording moves no digit to another place."""
_OPENINGS = ("Then", "Next", "Now")
_GAINS, _LOSSES = ("adding", "gaining", "finding"), ("giving", "losing", "selling")


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


TaskMaker = Callable[[random.Random], Task]


def draw_ledger(rng: random.Random, difficulty: int) -> Task:
    """Draw a count of things with eight changes, answered sentence by sentence.

    The difficulty is the number of changes in each sentence, 1 to 4. The totals of a sentence
    follow each other directly; a model that emits several in one forward pass has to add up
    internally.
    """
    thing, total = rng.choice(_THINGS), rng.randint(20, 89)
    start, changes, totals = total, list[int](), list[int]()
    while len(changes) < _NUM_LEDGER_CHANGES:
        change = rng.choice([1, -1]) * rng.randint(1, _MAX_LEDGER_CHANGE)
        if 10 <= total + change <= 99:  # two digits
            total += change
            changes.append(change)
            totals.append(total)
    sentences = [
        _sentence(rng, thing, changes[at : at + difficulty], totals[at : at + difficulty])
        for at in range(0, len(changes), difficulty)
    ]
    steps = " ".join(f"{change:+d}" for change in changes)
    question = f"Start with {start} {thing}. Steps: {steps}"
    response = " ".join([f"There are {start} {thing}.", *sentences])
    return Task("ledger", question, response, str(total))


def _sentence(rng: random.Random, thing: str, changes: list[int], totals: list[int]) -> str:
    def choose(wordings: tuple[str, ...]) -> str:
        return rng.choices(wordings, _WEIGHTS)[0]

    opening = choose(_OPENINGS)
    parts = [f"{choose(_GAINS if each > 0 else _LOSSES)} {abs(each)}" for each in changes]
    listed = " and ".join([*filter(None, [", ".join(parts[:-1])]), parts[-1]])
    return f"{opening} {listed} makes {', '.join(map(str, totals))} {thing}."


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
    for _ in range(_NUM_SHORT_CHANGES):
        change = rng.choice([1, -1]) * rng.randint(1, _MAX_CHANGE)
        steps.append(f"{change:+d}")
        totals.append(totals[-1] + change)
    return Task(
        "totals",
        f"Start at {totals[0]}. Steps: {' '.join(steps)}",
        f"Totals: {' '.join(map(str, totals[1:]))}.",
        str(totals[-1]),
    )


_KINDS: list[tuple[TaskMaker, float]] = [
    (_boxes, 0.15),
    (_sums, 0.15),
    (_totals, 0.70),
]


def draw_short(rng: random.Random) -> Task:
    """Draw a count to copy, a sum of two digits, or running totals; each kind has a fixed share."""
    makers, shares = zip(*_KINDS, strict=True)
    maker: TaskMaker = rng.choices(makers, shares)[0]
    return maker(rng)
