import json
import random
import re
from collections import Counter
from functools import partial
from itertools import accumulate

import pytest

from mars_platform.data.conversations import is_correct
from mars_platform.errors import UserError
from mars_train.data.demo import write_demo_data
from mars_train.data.demo_tasks import draw_ledger, draw_short

DRAWS = [draw_short, *(partial(draw_ledger, difficulty=count) for count in range(1, 5))]


@pytest.fixture(scope="module", params=DRAWS)
def draw(request):
    return request.param


@pytest.fixture(scope="module")
def written(tmp_path_factory, draw):
    out = tmp_path_factory.mktemp("demo") / "data"
    write_demo_data(out, draw, num_train=3000, num_eval=300, seed=5)
    return out


def rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def questions(file):
    return [row["messages"][0]["content"] for row in rows(file)]


def expected_response(question):
    """Compute the response from the question's text alone."""
    if match := re.fullmatch(r"Count a box of (\d+) ([a-z]+)", question):
        count, thing = match.groups()
        return f"There are {count} {thing} in the box. Answer: {count}"
    if match := re.fullmatch(r"Add (\d+) and (\d+) ([a-z]+)", question):
        first, second, thing = match.groups()
        total = int(first) + int(second)
        return f"Adding {second} to {first} gives {total} {thing}. Answer: {total}"
    match = re.fullmatch(r"Start at (\d+)\. Steps: ([-+\d ]+)", question)
    totals = [int(match[1])]
    for sign, change in re.findall(r"([-+])(\d+)", match[2]):
        totals.append(totals[-1] + (int(change) if sign == "+" else -int(change)))
    return f"Totals: {' '.join(map(str, totals[1:]))}. Answer: {totals[-1]}"


def test_held_out_questions_are_distinct_and_not_trained_on(written):
    held_out = questions(written / "eval.jsonl")
    trained_on = questions(written / "train.jsonl")
    assert (len(trained_on), len(held_out), len(set(held_out))) == (3000, 300, 300)
    assert not set(held_out) & set(trained_on)


def check_ledger(question, response, difficulty):
    """Read a ledger's response word by word, and check each statement against the question."""
    start, thing, steps = re.fullmatch(
        r"Start with (\d\d) ([a-z]+)\. Steps: ((?:[-+][1-3] ?){8})", question
    ).groups()
    changes = [int(step) for step in steps.split()]
    totals = list(accumulate(changes, initial=int(start)))[1:]
    assert all(10 <= total <= 99 for total in totals)
    sentences = re.findall(
        rf"(?:Then|Next|Now) ((?:[a-z]+ \d(?:, | and | ))+)makes ([\d, ]+) {thing}\.", response
    )
    assert response.startswith(f"There are {start} {thing}. ")
    signs = dict.fromkeys(["adding", "gaining", "finding"], 1)
    signs |= dict.fromkeys(["giving", "losing", "selling"], -1)
    said = [re.findall(r"([a-z]+) (\d)", listed) for listed, _ in sentences]
    assert [signs[verb] * int(size) for each in said for verb, size in each] == changes
    shown = [[int(total) for total in shown.split(", ")] for _, shown in sentences]
    assert [total for each in shown for total in each] == totals
    sizes = [len(each) for each in shown]
    assert sizes == [len(each) for each in said]
    assert all(size == difficulty for size in sizes[:-1])
    assert 0 < sizes[-1] <= difficulty
    assert response.endswith(f" {totals[-1]} {thing}. Answer: {totals[-1]}")


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_responses_follow_from_the_questions(written, draw, name):
    for row in rows(written / name):
        question, response = (message["content"] for message in row["messages"])
        if row["kind"] == "ledger":
            check_ledger(question, response, draw.keywords["difficulty"])
        else:
            assert response == expected_response(question)
        assert response.endswith(f"Answer: {row['answer']}")
        assert is_correct(response, row["answer"])


def test_each_kind_of_task_has_its_share():
    rng = random.Random(0)
    counts = Counter(draw_short(rng).kind for _ in range(4000))
    shares = {kind: count / 4000 for kind, count in counts.items()}
    assert shares == pytest.approx({"boxes": 0.15, "sums": 0.15, "totals": 0.7}, abs=0.03)


def test_totals_have_two_digits_and_four_steps():
    rng = random.Random(1)
    for task in (draw_short(rng) for _ in range(2000)):
        if task.kind == "totals":
            numbers = re.findall(r"\d+", task.question)[:1] + re.findall(r"\d+", task.response)
            assert len(numbers) == 5
            assert all(len(number) == 2 for number in numbers)
            assert re.fullmatch(r"([-+][1-5] ?){4}", task.question.partition("Steps: ")[2])


def test_each_wording_of_the_ledger_has_its_share():
    rng = random.Random(2)
    text = " ".join(draw_ledger(rng, 2).response for _ in range(2000))
    for wordings in (["Then", "Next", "Now"], ["adding", "gaining", "finding"]):
        counts = [len(re.findall(rf"\b{word}\b", text)) for word in wordings]
        shares = [count / sum(counts) for count in counts]
        assert shares == pytest.approx([0.6, 0.25, 0.15], abs=0.02)


def files(out):
    return [(out / name).read_bytes() for name in ("train.jsonl", "eval.jsonl")]


def test_the_seed_determines_the_data(written, draw, tmp_path):
    write_demo_data(tmp_path / "same", draw, num_train=3000, num_eval=300, seed=5)
    write_demo_data(tmp_path / "other", draw, num_train=3000, num_eval=300, seed=6)
    assert files(tmp_path / "same") == files(written)
    assert all(a != b for a, b in zip(files(tmp_path / "other"), files(written), strict=True))


def test_held_out_questions_do_not_depend_on_the_training_size(written, draw, tmp_path):
    write_demo_data(tmp_path / "small", draw, num_train=1, num_eval=300, seed=5)
    assert files(tmp_path / "small")[1] == files(written)[1]


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_existing_data_is_kept(tmp_path, name):
    (tmp_path / name).write_text("mine\n")
    with pytest.raises(UserError, match="--out: .* has " + name):
        write_demo_data(tmp_path, draw_short, num_train=3, num_eval=3, seed=0)
    assert (tmp_path / name).read_text() == "mine\n"
    assert len(list(tmp_path.iterdir())) == 1


def test_more_questions_than_exist_are_refused(tmp_path):
    few = [draw_short(random.Random(seed)) for seed in range(3)]
    with pytest.raises(UserError, match="--eval-examples: there are not 5 distinct questions"):
        write_demo_data(
            tmp_path / "data", lambda rng: rng.choice(few), num_train=3, num_eval=5, seed=0
        )
    assert not (tmp_path / "data").exists()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(UserError, match=r"^--out: .*file.* cannot be made"):
            write_demo_data(out, draw_short, num_train=2, num_eval=2, seed=0)
