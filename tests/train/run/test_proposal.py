import json
import re
from dataclasses import replace

import pytest
import yaml

from mars_platform.cli.main import run
from mars_platform.errors import UserError
from mars_train.data.demo import write_demo_data
from mars_train.data.demo_tasks import draw_short
from mars_train.recipe import Recipe
from mars_train.run.checks import check_before_start
from mars_train.run.proposal import Hardware, propose
from mars_train.run.run_directory import RunDirectory
from stage_runs import write_start

MEBI = 2**20
CPU = Hardware("cpu", "a CPU", 1, 64 * MEBI, "no", 1e9)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return write_start(tmp_path_factory.mktemp("start") / "start")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    write_demo_data(path, draw_short, num_train=200, num_eval=4, seed=0)
    return path


def proposed(start, files, hardware=CPU):
    found = propose(str(start), [str(file) for file in files], hardware)
    return Recipe.model_validate(yaml.safe_load(found.text)), found


def test_a_proposed_recipe_fits_model_and_data_and_would_be_run(start, data, tmp_path):
    recipe, found = proposed(start, [data / "train.jsonl", data / "eval.jsonl"])
    assert recipe.data.train == [str(data / "train.jsonl")]
    assert recipe.evaluation.data == [str(data / "eval.jsonl")]
    assert recipe.data.loss_on == "last"
    assert recipe.data.max_length == 128
    assert [stage.objective for stage in recipe.stages] == ["ar", "generate", "mars"]
    assert recipe.stages[0].batch_size == 8
    assert check_before_start(RunDirectory(recipe, tmp_path / "out")) == start
    tokens = int(
        re.search(r"([\d,]+) tokens an epoch", "\n".join(found.estimate))[1].replace(",", "")
    )
    assert 200 * 10 < tokens < 200 * 96


@pytest.mark.parametrize(
    ("devices", "memory", "expected"),
    [
        (2, 64 * MEBI, ("ddp", False)),
        (2, 0.4 * MEBI, ("fsdp2", False)),
        (1, 0.4 * MEBI, ("ddp", True)),
    ],
)
def test_memory_decides_what_is_trained(start, data, devices, memory, expected):
    hardware = replace(CPU, kind="cuda", num_devices=devices, memory=int(memory), precision="bf16")
    recipe, _ = proposed(start, [data / "train.jsonl"], hardware)
    has_adapters = recipe.stages[-1].adapter is not None
    assert (recipe.scaling.strategy, has_adapters) == expected
    assert recipe.scaling.num_workers == devices
    assert has_adapters == (recipe.stages[0].lora is not None)


def test_a_model_that_does_not_fit_is_refused(start, data):
    with pytest.raises(UserError, match=r"^--init: .* take a larger machine or a smaller model$"):
        proposed(start, [data / "train.jsonl"], replace(CPU, memory=1000))


def test_conversations_of_several_answers_are_supervised_in_all_of_them(start, tmp_path):
    turns = [{"role": role, "content": "a b"} for role in ("user", "assistant")] * 2
    file = tmp_path / "odd name, with: 'signs'.jsonl"
    file.write_text((json.dumps({"messages": turns}) + "\n") * 3)
    recipe, _ = proposed(start, [file])
    assert recipe.data.loss_on == "all"
    assert recipe.data.train == [str(file)]
    assert recipe.stages[0].batch_size == 3


def test_the_command_writes_a_file_once(start, data, tmp_path, capsys):
    arguments = ["train", "--init", str(start), str(data / "train.jsonl")]
    output = tmp_path / "recipe.yaml"
    assert run([*arguments, "--output", str(output)]) == 0
    assert run(arguments) == 0
    assert capsys.readouterr().out == output.read_text()
    assert run([*arguments, "--output", str(output)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert run([*arguments, "--output", str(tmp_path / "none" / "recipe.yaml")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert run([*arguments, "--set", "data.max_length=32"]) == 2
    assert "--set and --json go with a recipe" in capsys.readouterr().err
    assert run(["train", str(output), "another.yaml"]) == 2
