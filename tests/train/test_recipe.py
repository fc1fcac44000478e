from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_train.recipe import ArStage, MarsStage, Recipe, Scaling, ScratchModel


def content(**changes):
    return {
        "model": {"base": "some/model"},
        "data": {"train": ["data.jsonl"]},
        "stages": [{"objective": "ar"}, {"objective": "mars"}],
        "output": "out",
        **changes,
    }


def refusal(**changes):
    with pytest.raises(UserError) as caught:
        build_settings(content(**changes), Recipe, "recipe.yaml")
    message = str(caught.value)
    assert message.startswith("recipe.yaml: ")
    assert "\n" not in message
    return message


EVALUATION = {"data": ["held-out.jsonl"]}


def stages(**values):
    return [{"objective": "mars", **values}]


# --- defaults -------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_paper():
    recipe = Recipe.model_validate(content())
    for stage in recipe.stages:
        assert (stage.epochs, stage.batch_size, stage.max_steps) == (5, 384, None)
        assert (stage.learning_rate, stage.warmup_ratio, stage.weight_decay) == (5e-6, 0.03, 0.0)
    assert (recipe.stages[1].block_size, recipe.stages[1].ar_weight) == (4, 1.0)
    assert (recipe.data.max_length, recipe.precision) == (512, "bf16")


# --- reading --------------------------------------------------------------------------------------


def test_stages_are_told_apart_by_their_objective():
    recipe = Recipe.model_validate(content())
    assert [type(stage) for stage in recipe.stages] == [ArStage, MarsStage]
    assert recipe.data.train == ["data.jsonl"]
    assert recipe.output == Path("out")


def test_a_recipe_may_start_from_a_new_model():
    model = {"scratch": {"config": {"model_type": "qwen2"}}}
    recipe = Recipe.model_validate(content(model=model))
    assert recipe.model.scratch == ScratchModel(config={"model_type": "qwen2"})
    assert recipe.model.base is None


def test_a_recipe_survives_writing_and_reading():
    scaling = {"num_workers": [1, 4], "resources_per_worker": {"memory": 1e9}}
    recipe = Recipe.model_validate(content(evaluation=EVALUATION, scaling=scaling))
    written = yaml.safe_dump(recipe.model_dump(mode="json"))
    assert Recipe.model_validate(yaml.safe_load(written)) == recipe


@pytest.mark.parametrize(("given", "least", "most"), [(3, 3, 3), ([2, 4], 2, 4), ([2, 2], 2, 2)])
def test_workers_are_a_number_or_a_range(given, least, most):
    scaling = Recipe.model_validate(content(scaling={"num_workers": given})).scaling
    assert (scaling.least_workers, scaling.most_workers) == (least, most)


def test_resources_of_a_worker_are_cpus_gpus_and_further_ones():
    scaling = Scaling(
        use_gpu=True, cpus_per_worker=2.5, resources_per_worker={"memory": 1e9, "trn": 1}
    )
    assert scaling.worker_resources == {"CPU": 2.5, "GPU": 1, "memory": 1e9, "trn": 1}
    assert Scaling().worker_resources == {"CPU": 1}


# --- differences between recipes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({}, []),
        ({"output": "elsewhere"}, []),
        ({"scaling": {"num_workers": [1, 8], "strategy": "fsdp2"}}, []),
        ({"checkpoints": {"every_steps": 7, "storage": "s3://bucket"}}, []),
        ({"cluster": {"address": "auto"}}, []),
        ({"max_nonfinite_steps": 99}, []),
        ({"seed": 1}, ["seed"]),
        ({"precision": "no", "compile": True}, ["precision", "compile"]),
        ({"model": {"base": "other/model"}}, ["model"]),
        ({"data": {"train": ["data.jsonl"], "max_length": 64}}, ["data"]),
        ({"stages": [{"objective": "ar"}]}, ["stages"]),
        ({"evaluation": {"data": ["held-out.jsonl"]}}, ["evaluation"]),
        ({"gradient_checkpointing": True}, ["gradient_checkpointing"]),
        ({"attention": "sdpa"}, ["attention"]),
    ],
)
def test_differences_are_the_settings_that_change_the_trained_model(changes, differing):
    one, other = (Recipe.model_validate(content(**values)) for values in ({}, changes))
    assert one.differences(other) == other.differences(one) == differing
    assert other.differences(other) == []


def test_a_recipe_is_immutable():
    recipe = Recipe.model_validate(content())
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1


def test_a_block_may_be_as_long_as_the_data():
    changes = {"data": {"train": ["a"], "max_length": 16}, "stages": stages(block_size=16)}
    assert Recipe.model_validate(content(**changes)).stages[0].block_size == 16


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, {"base": "x", "scratch": {"config": {}}}])
def test_a_model_has_exactly_one_source(model):
    assert "model: give either base (a directory or hub id) or scratch" in refusal(model=model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", 65),
        ("ar_weight", -0.1),
        ("epochs", 0),
        ("max_steps", 0),
        ("batch_size", 0),
        ("micro_batch_size", 0),
        ("learning_rate", 0),
        ("warmup_ratio", 1),
        ("warmup_ratio", -0.1),
        ("weight_decay", -1),
        ("max_grad_norm", 0),
        ("row_slots", 15),
        ("name", "Not A Name"),
        ("name", "../up"),
        ("learning_rate", "fast"),
    ],
)
def test_invalid_settings_of_a_stage_are_refused_by_name(field, value):
    message = refusal(stages=stages(**{field: value}))
    assert f"{field}: " in message
    assert "stages.0" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": {"train": []}}, "data.train: "),
        ({"data": {}}, "data.train: required, but not given"),
        ({"data": {"train": ["a"], "max_length": 7}}, "data.max_length: "),
        ({"data": {"train": ["a"], "max_bad_rows": -1}}, "data.max_bad_rows: "),
        ({"data": {"train": ["a"], "loss_on": "first"}}, "data.loss_on: "),
        ({"stages": []}, "stages: "),
        ({"stages": [{"objective": "sft"}]}, "stages.0: "),
        ({"stages": [{"epochs": 3}]}, "stages.0: "),
        ({"precision": "fp16"}, "precision: "),
        ({"seed": -1}, "seed: "),
        ({"scaling": {"cpus_per_worker": 0}}, "scaling.cpus_per_worker: "),
        ({"scaling": {"strategy": "zero3"}}, "scaling.strategy: "),
        ({"scaling": {"placement": "ANYWHERE"}}, "scaling.placement: "),
        ({"scaling": {"max_failures": -2}}, "scaling.max_failures: "),
        ({"checkpoints": {"every_steps": 0}}, "checkpoints.every_steps: "),
        ({"checkpoints": {"keep": 0}}, "checkpoints.keep: "),
        ({"evaluation": {}}, "evaluation.data: required, but not given"),
        ({"evaluation": {"data": []}}, "evaluation.data: "),
        ({"evaluation": EVALUATION | {"every_steps": 0}}, "evaluation.every_steps: "),
        ({"evaluation": EVALUATION | {"max_items": 0}}, "evaluation.max_items: "),
        ({"evaluation": EVALUATION | {"max_tokens": 0}}, "evaluation.max_tokens: "),
        ({"evaluation": EVALUATION | {"thresholds": [0.5, 0]}}, "evaluation.thresholds.1: "),
        ({"evaluation": EVALUATION | {"thresholds": [1.01]}}, "evaluation.thresholds.0: "),
        ({"evaluation": EVALUATION | {"max_accuracy_drop": 1.1}}, "evaluation.max_accuracy_drop: "),
        ({"evaluation": EVALUATION | {"max_loss_rise": -1}}, "evaluation.max_loss_rise: "),
        ({"attention": "eager"}, "attention: "),
        ({"max_nonfinite_steps": -1}, "max_nonfinite_steps: "),
        ({"scaling": {"threads_per_worker": 0}}, "scaling.threads_per_worker: "),
        ({"model": {"scratch": {"config": {}, "vocabulary_size": 263}}}, "vocabulary_size: "),
    ],
)
def test_invalid_settings_are_refused_by_name(changes, named):
    assert named in refusal(**changes)


def test_names_of_stages_must_differ():
    two = [{"objective": "mars"}, {"objective": "mars"}]
    assert "stages: names must differ, got ['mars', 'mars']" in refusal(stages=two)
    two[1]["name"] = "mars-2"
    assert len(Recipe.model_validate(content(stages=two)).stages) == 2


@pytest.mark.parametrize("num_workers", [0, -1, [0, 2], "two", [1], [1, 2, 3], 1.5, True])
def test_an_invalid_number_of_workers_is_refused(num_workers):
    assert refusal(scaling={"num_workers": num_workers}).startswith(
        "recipe.yaml: scaling.num_workers: give a number from 1, or a range [least, most]"
    )


def test_a_range_of_workers_must_be_in_order():
    message = refusal(scaling={"num_workers": [3, 2]})
    assert message == "recipe.yaml: scaling: num_workers: give the range as [least, most]"


@pytest.mark.parametrize("num_workers", [11, [1, 11]])
def test_a_batch_smaller_than_the_number_of_workers_is_refused(num_workers):
    message = refusal(stages=stages(batch_size=10), scaling={"num_workers": num_workers})
    assert "stages.0.batch_size: 10 conversations cannot be shared by scaling.num_work" in message
    assert "num_workers = 11; make it larger" in message


def test_a_batch_need_not_be_shared_evenly():
    changes = {"stages": stages(batch_size=10), "scaling": {"num_workers": [3, 10]}}
    assert Recipe.model_validate(content(**changes)).stages[0].batch_size == 10


def test_a_block_longer_than_the_data_is_refused():
    message = refusal(stages=stages(block_size=32), data={"train": ["a"], "max_length": 31})
    assert "stages.0.block_size: 32 exceeds data.max_length = 31" in message


def test_checks_across_fields_do_not_print_the_recipe():
    message = refusal(stages=stages(batch_size=3), scaling={"num_workers": 4})
    assert "some/model" not in message
    assert message.startswith("recipe.yaml: stages.0.batch_size: ")


def test_an_unknown_key_of_a_stage_is_refused():
    message = refusal(stages=stages(learning_rte=1))
    assert message.startswith("recipe.yaml: stages.0.learning_rte: unknown key; known keys: ")
    assert "learning_rate" in message


def test_an_ar_stage_has_no_block_size():
    message = refusal(stages=[{"objective": "ar", "block_size": 4}])
    assert "block_size: unknown key" in message
