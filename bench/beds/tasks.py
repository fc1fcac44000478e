"""Draws the varied tasks: three kinds are mixed, because what a mask can know differs between them.

A ledger has a result in every sentence that follows from the one before; a copy repeats a text of
the question with a word put into its gap; a note says what the question says in sentences of free
wording. Responses have 60 to 150 tokens under a tokenizer of 512 entries that is trained on them,
and their answers can be checked: that of a copy is the whole text.

Each free place has three wordings with the shares `SHARES`, most of them of different numbers of
tokens. So a model cannot know which wording comes next, nor at which position the words behind it
will stand. The setting is fixed: figures compare only as long as it never changes.
"""

from __future__ import annotations

import random

from mars_train.data.demo_tasks import Task, TaskMaker

SHARES = (0.55, 0.3, 0.15)
"""Shares of the three wordings of a free place."""

_THINGS = ["apples", "bells", "books", "cards", "coins", "cups", "hats", "pens", "shells", "stamps"]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
_NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack"]
_PLACES = ["bridge", "castle", "city", "field", "forest", "garden", "house", "lake", "road", "shop"]
_WORDS = [
    ["big", "blue", "cold", "dark", "green", "new", "old", "red", "small", "warm", "young"],
    ["bird", "cat", "cow", "dog", "farmer", "fish", "girl", "horse", "king", "man", "tree"],
    ["finds", "gets", "hears", "helps", "hits", "likes", "meets", "needs", "sees", "takes", "has"],
    ["bread", "corn", "gold", "iron", "milk", "rice", "salt", "sand", "tea", "wood", "wool"],
    ["again", "daily", "here", "never", "now", "often", "once", "soon", "there", "today", "twice"],
]
"""Words of a copied text, one list for each place in a group."""


def draw_varied(rng: random.Random) -> Task:
    """Draw a ledger, a copy with one gap to fill, or a note in free wording, by fixed shares."""
    makers, shares = zip(*_KINDS, strict=True)
    maker: TaskMaker = rng.choices(makers, shares)[0]
    return maker(rng)


def _ledger(rng: random.Random) -> Task:
    """Draw a count with a change on each day, told in a sentence with the total behind it."""

    def choose(*wordings: str) -> str:
        return rng.choices(wordings, SHARES)[0]

    thing, total = rng.choice(_THINGS), rng.randint(20, 89)
    beginning = choose("At first there are", "We begin with", "Here is a list that starts with")
    sentences, question = [f"{beginning} {total} {thing}."], [f"Start with {total} {thing}."]
    for day in _DAYS[: rng.randint(5, 7)]:
        change = rng.choice([1, -1]) * rng.randint(1, 3)
        if not 10 <= total + change <= 99:  # totals keep two digits
            change = -change
        total += change
        question.append(f"{day} {change:+d}")
        if change > 0:
            told = choose("adding", "we find", "someone brings us")
        else:
            told = choose("losing", "we sell", "someone takes from us")
        opening = choose("On", "Then, on", "The next day is")
        result = choose("makes", "so there are", "and that leaves us with")
        sentences.append(f"{opening} {day} {told} {abs(change)} {result} {total}.")
    return Task("ledger", " ".join(question), " ".join(sentences), str(total))


def _copy(rng: random.Random) -> Task:
    """Draw a text with a gap and the word that fills it; the answer is the whole text.

    No word comes twice in a text, so that each word tells what follows it.
    """
    num = rng.randint(9, 10)
    columns = [rng.sample(words, num) for words in _WORDS]
    text = [word for group in zip(*columns, strict=True) for word in group]
    gap = rng.randrange(len(text))
    shown = " ".join([*text[:gap], "_", *text[gap + 1 :]])
    openings = [
        "Here is the text with the word in its place.",
        "This is how it reads now, without any gap.",
        "The word that you gave me stands where the gap was.",
    ]
    opening = rng.choices(openings, SHARES)[0]
    return Task("copy", f"Put {text[gap]} in the gap: {shown}", opening, " ".join(text))


def _note(rng: random.Random) -> Task:
    """Draw a story of what two people found, as free in its wording as three choices allow."""

    def choose(*wordings: str) -> str:
        return rng.choices(wordings, SHARES)[0]

    (name, friend), place = rng.sample(_NAMES, 2), rng.choice(_PLACES)
    thing, found, gift = rng.choice(_THINGS), rng.randint(10, 89), rng.randint(1, 3)
    total = found + gift
    sentences = [
        f"{name} {choose('went to', 'took a walk to', 'was on the way to')} the {place} "
        f"{choose('in the morning', 'one day', 'when the sun came up')}.",
        f"There {name} {choose('saw', 'came across', 'stopped to look at')} {found} {thing} "
        f"{choose('on the ground', 'under a tree', 'where somebody left them')}.",
        f"{choose('Then', 'A little later', 'On the way back')} {friend} "
        f"{choose('gave', 'came with', 'was so kind as to bring')} {gift} more {thing}.",
        f"{choose('Now', 'In the end', 'When the day was over')} {name} "
        f"{choose('had', 'could count', 'was the owner of')} {total} {thing} "
        f"{choose('and was happy', 'and went home', 'and told everybody about it')}.",
    ]
    question = f"Tell about {name} in the {place}: {found} {thing}, and {gift} from {friend}"
    return Task("note", question, " ".join(sentences), str(total))


_KINDS: list[tuple[TaskMaker, float]] = [(_ledger, 0.4), (_copy, 0.3), (_note, 0.3)]
"""The kinds of tasks with their shares."""
