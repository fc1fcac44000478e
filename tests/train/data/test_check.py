import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoConfig

from chats import GOOD, LONG, chat, write_lines
from mars_platform.cli import main as cli
from mars_train.run.scratch import TURN_END


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    """A model's directory without weights, which a check does not need."""
    path = tmp_path_factory.mktemp("model")
    config = AutoConfig.for_model("qwen2", vocab_size=1024, max_position_embeddings=64)
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def check(capsys):
    """Run the command; return its exit status and output."""

    def run(*arguments):
        status = cli.run(["data", "check", *map(str, arguments)])
        return status, capsys.readouterr().out

    return run


def test_a_check_counts_what_a_run_would_train_on(check, tmp_path, model, tokenizer):
    alpaca = json.dumps({"instruction": "Count", "output": "one"})
    file = write_lines(tmp_path / "chat.jsonl", GOOD, GOOD, LONG, "{", "[", alpaca, "")
    limit = ["--set", "data.max_bad_rows=2"]
    status, out = check(file, "--model", model, "--json", *limit)
    found = json.loads(out)
    assert status == 0
    assert found["shapes"] == {"messages": 3, "alpaca instructions": 1}
    assert (found["conversations"], found["cut"], found["dropped"]) == (4, 1, 2)
    texts = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        for line in (GOOD, GOOD, LONG)
    ]
    good, _, long = (len(tokenizer.encode(text)) for text in texts)
    assert found["longest"] == long > 64  # the model's context, to which it is cut
    short = found["tokens"] - 2 * good - 64
    assert 0 < short < good
    assert found["median_length"] == good
    assert [(each["what"], each["num_rows"]) for each in found["reasons"]] == [
        ("truncated", 1),
        ("dropped", 1),
        ("dropped", 1),
    ]
    assert found["reasons"][1]["first"].startswith(f"{file}:4: not valid JSON")
    assert found["refusals"] == []
    assert check(file, "--model", model, *limit)[1].startswith("data: 1 file, 3 rows of messages, ")


def test_what_is_supervised_is_shown_in_brackets(check, tmp_path, model):
    file = write_lines(tmp_path / "chat.jsonl", json.dumps(chat("Hi", "one", "Hi", "two")), GOOD)
    _, out = check(file, "--model", model, "--show", 1, "--set", "data.loss_on=all")
    turns = [f"<|im_start|>user\nHi{TURN_END}\n<|im_start|>assistant\n" for _ in range(2)]
    expected = f"{turns[0]}⟦one{TURN_END}⟧\n{turns[1]}⟦two{TURN_END}⟧\n"
    assert out.split("--- conversation 1\n")[1] == f"{expected}\n"


def test_a_run_that_would_be_refused_gives_status_1(check, tmp_path, model):
    file = write_lines(tmp_path / "chat.jsonl", LONG, LONG)
    nothing = ["--set", "data.max_length=8"]
    status, out = check(file, "--model", model, *nothing)
    assert status == 1
    refusal = "a run would be refused: data.train: none of the 2 rows read is usable: "
    assert f"{refusal}{file}:1: no supervised token within data.max_length = 8" in out
    status, out = check(file, "--model", model, "--set", "data.max_length=65")
    assert status == 1
    assert "data.max_length: 65 exceeds the 64 tokens" in out


def test_a_recipe_is_checked_with_its_stages_and_held_out_data(check, tmp_path, model):
    held_out = write_lines(tmp_path / "eval.jsonl", GOOD, "{")
    recipe = {
        "model": {"base": model},
        "data": {"train": [str(write_lines(tmp_path / "chat.jsonl", GOOD))], "max_length": 64},
        "evaluation": {"data": [str(held_out)]},
        "stages": [{"objective": "ar", "batch_size": 2}],
        "output": "out",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    status, out = check("--recipe", tmp_path / "recipe.yaml")
    assert status == 1
    assert "refused: data.train: 1 conversations do not fill one batch of stages.ar" in out
    assert f"refused: {held_out}:2: not valid JSON" in out
    write_lines(held_out, GOOD)
    status, out = check("--recipe", tmp_path / "recipe.yaml", "--set", "stages.0.batch_size=1")
    assert (status, "refused" in out) == (0, False)


def test_rows_are_read_without_a_model(check, tmp_path):
    status, out = check(write_lines(tmp_path / "chat.jsonl", GOOD, "{"))
    assert status == 1
    assert "1 conversations to train on, 0 of them cut; 1 rows dropped" in out
    assert "tokens are not counted: name a model with --model" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "FILES: name the data to check, or give --recipe"),
        (["nothing.jsonl"], "data.train: there is no file or directory nothing.jsonl"),
        (["x.jsonl", "--set", "data.maxlength=3"], "data.maxlength: unknown key"),
        (["x.jsonl", "--model", "./nothing"], "there is no directory ./nothing"),
    ],
)
def test_a_check_of_nothing_is_refused(capsys, arguments, named):
    assert cli.run(["data", "check", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_a_broken_file_ends_the_check(capsys, tmp_path):
    (tmp_path / "chat.parquet").write_bytes(b"PAR1 and then nothing")
    assert cli.run(["data", "check", str(tmp_path)]) == 2
    assert "chat.parquet cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_no_row_has_is_refused(capsys, tmp_path, kind):
    row = {"chat": chat("Count", "one")["messages"], "tools": None}
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "chat.parquet")
    else:
        write_lines(tmp_path / "chat.jsonl", "{", "[]", json.dumps(row))
    names = ["data", "check", str(tmp_path), "--set", "data.max_bad_rows=2", "--set"]
    assert cli.run([*names, "data.columns={messages: chat, tools: tools}"]) == 0
    assert cli.run([*names, "data.columns={messages: chat, tools: functions}"]) == 2
    problem = "data.columns.tools: none of the first rows has a column 'functions'; they have chat"
    assert problem in capsys.readouterr().err
    assert cli.run([*names, "data.columns={message: chat}"]) == 2
    assert "data.columns.message" in capsys.readouterr().err
