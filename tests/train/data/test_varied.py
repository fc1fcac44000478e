import random
import re
from collections import Counter, defaultdict
from itertools import accumulate

import pytest

from mars_platform.data.conversations import is_correct
from mars_train.data import varied_tasks
from mars_train.data.varied_tasks import SHARES, draw_varied
from mars_train.run.scratch import train_tokenizer


@pytest.fixture(scope="module")
def tasks():
    rng = random.Random(3)
    return [draw_varied(rng) for _ in range(3000)]


def of_kind(tasks, kind):
    return [task for task in tasks if task.kind == kind]


def wordings():
    """Return all free places by name."""
    return {
        name: value
        for name, value in vars(varied_tasks).items()
        if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str)
    }


def test_each_kind_has_its_share(tasks):
    counts = Counter(task.kind for task in tasks)
    shares = {kind: count / len(tasks) for kind, count in counts.items()}
    assert shares == pytest.approx({"ledger": 0.4, "copy": 0.3, "note": 0.3}, abs=0.03)


def test_each_wording_has_its_share(tasks):
    text = "\n".join(task.response for task in tasks)
    places = wordings()
    assert len(places) == 15
    for name, phrases in places.items():
        if name in ("_OPENINGS", "_MEETINGS", "_GIFTS"):  # some words stand elsewhere, too
            continue
        counts = [len(re.findall(rf"\b{re.escape(phrase)}", text)) for phrase in phrases]
        shares = [count / sum(counts) for count in counts]
        assert shares == pytest.approx(SHARES, abs=0.06), name


def test_ledgers_add_up(tasks):
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    for task in of_kind(tasks, "ledger"):
        start, thing, steps = re.fullmatch(
            r"Start with (\d\d) ([a-z]+)\.((?: [A-Z][a-z]+ [-+][1-3]){5,7})", task.question
        ).groups()
        changes = [int(step) for step in re.findall(r"[-+]\d", steps)]
        totals = list(accumulate(changes, initial=int(start)))
        assert all(10 <= total <= 99 for total in totals)
        assert [int(total) for total in re.findall(r"\b\d\d\b", task.response)] == totals
        sizes = [int(size) for size in re.findall(r"\b\d\b", task.response)]
        assert sizes == [abs(change) for change in changes]
        assert re.findall("|".join(days), steps) == days[: len(changes)]
        assert re.findall("|".join(days), task.response) == days[: len(changes)]
        signs = re.findall(r"(adding|find|brings)|(?:losing|sell|takes)", task.response)
        assert [bool(gain) for gain in signs] == [change > 0 for change in changes]
        assert thing in task.response
        assert task.answer == str(totals[-1])


def test_copies_fill_the_gap_of_a_text_without_repeated_words(tasks):
    for task in of_kind(tasks, "copy"):
        word, text = re.fullmatch(r"Put (\w+) in the gap: ([a-z_ ]+)", task.question).groups()
        assert text.split().count("_") == 1
        assert text.replace("_", word) == task.answer
        words = task.answer.split()
        assert 45 <= len(words) == len({*words}) <= 50


def test_notes_tell_what_the_question_says(tasks):
    for task in of_kind(tasks, "note"):
        name, place, found, thing, gift, friend = re.fullmatch(
            r"Tell about (\w+) in the (\w+): (\d\d) (\w+), and (\d) from (\w+)", task.question
        ).groups()
        total = int(found) + int(gift)
        assert re.findall(r"\d+", task.response) == [found, gift, str(total)]
        assert task.response.count(thing) == 3
        assert all(word in task.response for word in (name, place, friend))
        assert task.answer == str(total)


def test_answers_can_be_checked(tasks):
    for task in tasks:
        row = task.row()
        assert is_correct(row["messages"][1]["content"], row["answer"])
        assert not is_correct(row["messages"][1]["content"], row["answer"][:-1])


def test_responses_have_60_to_150_tokens_and_wordings_differ_in_length(tasks):
    texts = [message["content"] for task in tasks for message in task.row()["messages"]]
    tokenizer = train_tokenizer(texts, 512)
    lengths = defaultdict(list)
    for task in tasks[:1500]:
        response = task.row()["messages"][1]["content"]
        lengths[task.kind].append(len(tokenizer(response)["input_ids"]) + 1)  # the end token
    assert all(min(each) >= 60 and max(each) <= 150 for each in lengths.values())
    varying = [
        name
        for name, phrases in wordings().items()
        if len({len(tokenizer(f" {phrase}")["input_ids"]) for phrase in phrases}) > 1
    ]
    assert len(varying) >= 12
