"""Draws the tasks of `marsray data demo --task varied`: the bed on which ways of training compare.

Three kinds of tasks are mixed, because what a mask can know differs between them. A ledger has a
result in every sentence that follows from the one before; a copy repeats a text of the question
with one word changed; a note says what the question says in sentences of free wording. Responses
have 60 to 150 tokens under the tokenizer that is trained on them, and their answers can be checked:
that of a copy is the whole text.

Each free place has three wordings with the shares `SHARES`, most of them of different numbers of
tokens. So a model cannot know which wording comes next, nor at which position the words behind it
will stand. The setting is fixed: figures compare only as long as it never changes.
"""

from __future__ import annotations

import random

from mars_train.data.demo_tasks import Task, TaskMaker

SHARES = (0.55, 0.3, 0.15)
"""Shares of the three wordings of a free place."""

Wordings = tuple[str, str, str]
"""The wordings of a free place, the most frequent one first."""

_THINGS = ["apples", "bells", "books", "cards", "coins", "cups", "hats", "pens", "shells", "stamps"]

_NUM_CHANGES = (5, 7)
_MAX_CHANGE = 3
_BEGINNINGS: Wordings = ("At first there are", "We begin with", "Here is a list that starts with")
_OPENINGS: Wordings = ("Then", "After that", "In the next step")
_GAINS: Wordings = ("adding", "we find", "someone brings us")
_LOSSES: Wordings = ("losing", "we sell", "someone takes from us")
_RESULTS: Wordings = ("makes", "so there are", "and that leaves us with")

_NUM_COPIED = (5, 6)
_ADJECTIVES = ["big", "blue", "cold", "dark", "green", "old", "red", "small", "warm", "young"]
_NOUNS = ["bird", "boat", "cat", "dog", "farmer", "fish", "girl", "horse", "king", "tree"]
_VERBS = ["finds", "follows", "hears", "helps", "likes", "meets", "needs", "sees", "takes", "wants"]
_PLACES = ["bridge", "castle", "city", "field", "forest", "garden", "house", "lake", "road", "shop"]
_COPY_OPENINGS: Wordings = (
    "Here is the text with the new word.",
    "This is how it reads now.",
    "Only one word of it is another one.",
)

_NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack"]
_MAX_GIFT = 3
_TRIPS: Wordings = ("went to", "took a walk to", "was on the way to")
_TIMES: Wordings = ("in the morning", "one day", "when the sun came up")
_FINDS: Wordings = ("saw", "came across", "stopped to look at")
_SPOTS: Wordings = ("on the ground", "under a tree", "where somebody left them")
_MEETINGS: Wordings = ("Then", "A little later", "On the way back")
_GIFTS: Wordings = ("gave", "came with", "was so kind as to bring")
_ENDINGS: Wordings = ("Now", "In the end", "When the day was over")
_COUNTS: Wordings = ("had", "could count", "was the owner of")
_MOODS: Wordings = ("and was happy", "and went home", "and told everybody about it")


def draw_varied(rng: random.Random) -> Task:
    """Draw a ledger, a copy with one word changed, or a note in free wording, by fixed shares."""
    makers, shares = zip(*_KINDS, strict=True)
    maker: TaskMaker = rng.choices(makers, shares)[0]
    return maker(rng)


def _choose(rng: random.Random, wordings: Wordings) -> str:
    return rng.choices(wordings, SHARES)[0]


def _ledger(rng: random.Random) -> Task:
    """Draw a count with some changes, each told in a sentence with the total behind it."""
    thing, total = rng.choice(_THINGS), rng.randint(20, 89)
    sentences = [f"{_choose(rng, _BEGINNINGS)} {total} {thing}."]
    start, changes = total, list[int]()
    num_changes = rng.randint(*_NUM_CHANGES)
    while len(changes) < num_changes:
        change = rng.choice([1, -1]) * rng.randint(1, _MAX_CHANGE)
        if 10 <= total + change <= 99:  # two digits
            total += change
            changes.append(change)
            told = f"{_choose(rng, _GAINS if change > 0 else _LOSSES)} {abs(change)}"
            sentences.append(f"{_choose(rng, _OPENINGS)} {told} {_choose(rng, _RESULTS)} {total}.")
    steps = " ".join(f"{change:+d}" for change in changes)
    question = f"Start with {start} {thing}. Steps: {steps}"
    return Task("ledger", question, " ".join(sentences), str(total))


def _copy(rng: random.Random) -> Task:
    """Draw a text in which one word is to be replaced by another; the answer is the new text.

    No adjective, verb or place comes twice in a text, so that each word stands for one place.
    """
    num = rng.randint(*_NUM_COPIED)
    adjectives, verbs, places = (
        rng.sample(words, num + 1) for words in (_ADJECTIVES, _VERBS, _PLACES)
    )
    sentences = [
        f"The {adjective} {rng.choice(_NOUNS)} {verb} the {rng.choice(_NOUNS)} near the {place}."
        for adjective, verb, place in zip(adjectives[:num], verbs[:num], places[:num], strict=True)
    ]
    text, words = " ".join(sentences), rng.choice([adjectives, verbs, places])
    old, new = rng.choice(words[:num]), words[num]
    question = f"Write {new} and not {old}: {text}"
    answer = text.replace(f" {old}", f" {new}")
    return Task("copy", question, _choose(rng, _COPY_OPENINGS), answer)


def _note(rng: random.Random) -> Task:
    """Draw a short story of what two people found, as free in its wording as three choices allow."""
    (name, friend), place = rng.sample(_NAMES, 2), rng.choice(_PLACES)
    thing, found, gift = rng.choice(_THINGS), rng.randint(10, 89), rng.randint(1, _MAX_GIFT)
    total = found + gift
    sentences = [
        f"{name} {_choose(rng, _TRIPS)} the {place} {_choose(rng, _TIMES)}.",
        f"There {name} {_choose(rng, _FINDS)} {found} {thing} {_choose(rng, _SPOTS)}.",
        f"{_choose(rng, _MEETINGS)} {friend} {_choose(rng, _GIFTS)} {gift} more {thing}.",
        f"{_choose(rng, _ENDINGS)} {name} {_choose(rng, _COUNTS)} {total} {thing} "
        f"{_choose(rng, _MOODS)}.",
    ]
    question = f"Tell about {name} in the {place}: {found} {thing}, and {gift} from {friend}"
    return Task("note", question, " ".join(sentences), str(total))


_KINDS: list[tuple[TaskMaker, float]] = [(_ledger, 0.4), (_copy, 0.3), (_note, 0.3)]
"""The kinds of tasks with their shares."""
