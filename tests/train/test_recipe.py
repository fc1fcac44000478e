from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_train.recipe import ArStage, DataSettings, MarsStage, Recipe, Scaling, ScratchModel


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


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("epochs", 5),
        ("batch_size", 384),
        ("learning_rate", 5e-6),
        ("warmup_ratio", 0.03),
        ("weight_decay", 0.0),
        ("max_grad_norm", 1.0),
        ("max_steps", None),
    ],
)
def test_defaults_of_both_stages(field, expected):
    for stage in (ArStage(objective="ar"), MarsStage(objective="mars")):
        assert getattr(stage, field) == expected


def test_defaults_of_the_mars_stage():
    stage = MarsStage(objective="mars")
    assert (stage.block_size, stage.ar_weight, stage.name) == (4, 1.0, "mars")


def test_defaults_of_the_data():
    data = DataSettings(train=["data.jsonl"])
    assert (data.max_length, data.loss_on, data.max_bad_rows) == (512, "last", 0)


def test_defaults_of_the_run():
    recipe = Recipe.model_validate(content())
    assert (recipe.precision, recipe.seed, recipe.scaling.num_workers) == ("bf16", 0, 1)
    assert (recipe.scaling.strategy, recipe.scaling.use_gpu) == ("ddp", False)
    assert (recipe.checkpoints.every_steps, recipe.checkpoints.keep) == (100, 2)
    assert recipe.checkpoints.storage is None
    assert recipe.evaluation is None
    assert recipe.cluster.address is None


def test_defaults_of_the_evaluation():
    evaluation = Recipe.model_validate(content(evaluation=EVALUATION)).evaluation
    assert (evaluation.every_steps, evaluation.max_items, evaluation.max_tokens) == (100, 200, 256)
    assert evaluation.thresholds == (1.0, 0.95, 0.7)
    assert (evaluation.max_accuracy_drop, evaluation.max_loss_rise) == (0.02, 0.05)


# --- reading --------------------------------------------------------------------------------------


def test_stages_are_told_apart_by_their_objective():
    recipe = Recipe.model_validate(content())
    assert [type(stage) for stage in recipe.stages] == [ArStage, MarsStage]
    assert recipe.data.train == ["data.jsonl"]
    assert recipe.output == Path("out")


def test_scratch_model():
    model = {"scratch": {"config": {"model_type": "qwen2"}}}
    recipe = Recipe.model_validate(content(model=model))
    assert recipe.model.scratch == ScratchModel(config={"model_type": "qwen2"})
    assert recipe.model.base is None


def test_recipe_survives_writing_and_reading():
    scaling = {"num_workers": [1, 4], "resources_per_worker": {"memory": 1e9}}
    recipe = Recipe.model_validate(content(evaluation=EVALUATION, scaling=scaling))
    written = yaml.safe_dump(recipe.model_dump(mode="json"))
    assert Recipe.model_validate(yaml.safe_load(written)) == recipe


@pytest.mark.parametrize(("given", "least", "most"), [(3, 3, 3), ([2, 4], 2, 4), ([2, 2], 2, 2)])
def test_workers_are_a_number_or_a_range(given, least, most):
    scaling = Recipe.model_validate(content(scaling={"num_workers": given})).scaling
    assert (scaling.least_workers, scaling.most_workers) == (least, most)


def test_resources_of_a_worker():
    scaling = Scaling(
        use_gpu=True, cpus_per_worker=2.5, resources_per_worker={"memory": 1e9, "trn": 1}
    )
    assert scaling.worker_resources == {"CPU": 2.5, "GPU": 1, "memory": 1e9, "trn": 1}
    assert Scaling().worker_resources == {"CPU": 1}


# --- whether two recipes train the same -----------------------------------------------------------


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
def test_differences_are_the_settings_that_train_something_else(changes, differing):
    one, other = (Recipe.model_validate(content(**values)) for values in ({}, changes))
    assert one.differences(other) == other.differences(one) == differing
    assert other.differences(other) == []


def test_recipe_does_not_change():
    recipe = Recipe.model_validate(content())
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1


def test_block_as_long_as_the_data_is_allowed():
    changes = {"data": {"train": ["a"], "max_length": 16}, "stages": stages(block_size=16)}
    assert Recipe.model_validate(content(**changes)).stages[0].block_size == 16


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [{}, {"base": "x", "scratch": {"config": {}}}])
def test_model_has_exactly_one_source(model):
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
def test_stage_values(field, value):
    message = refusal(stages=stages(**{field: value}))
    assert f"{field}: " in message
    assert "stages.0" in message


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"train": []}, "data.train: "),
        ({}, "data.train: required, but not given"),
        ({"train": ["a"], "max_length": 7}, "data.max_length: "),
        ({"train": ["a"], "max_bad_rows": -1}, "data.max_bad_rows: "),
        ({"train": ["a"], "loss_on": "first"}, "data.loss_on: "),
    ],
)
def test_data_values(data, named):
    assert named in refusal(data=data)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
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
def test_other_values(changes, named):
    assert named in refusal(**changes)


def test_names_of_stages_differ():
    two = [{"objective": "mars"}, {"objective": "mars"}]
    assert "stages: names must differ, got ['mars', 'mars']" in refusal(stages=two)
    two[1]["name"] = "mars-2"
    assert len(Recipe.model_validate(content(stages=two)).stages) == 2


@pytest.mark.parametrize("num_workers", [0, -1, [0, 2], "two", [1], [1, 2, 3], 1.5, True])
def test_what_is_no_number_of_workers(num_workers):
    assert refusal(scaling={"num_workers": num_workers}).startswith(
        "recipe.yaml: scaling.num_workers: give a number from 1, or a range [least, most]"
    )


def test_range_of_workers_is_in_order():
    message = refusal(scaling={"num_workers": [3, 2]})
    assert message == "recipe.yaml: scaling: num_workers: give the range as [least, most]"


@pytest.mark.parametrize("num_workers", [11, [1, 11]])
def test_every_worker_gets_a_conversation(num_workers):
    message = refusal(stages=stages(batch_size=10), scaling={"num_workers": num_workers})
    assert "stages.0.batch_size: 10 conversations cannot be shared by scaling.num_work" in message
    assert "num_workers = 11; make it larger" in message


def test_batch_need_not_be_shared_evenly():
    changes = {"stages": stages(batch_size=10), "scaling": {"num_workers": [3, 10]}}
    assert Recipe.model_validate(content(**changes)).stages[0].batch_size == 10


def test_block_fits_into_the_data():
    message = refusal(stages=stages(block_size=32), data={"train": ["a"], "max_length": 31})
    assert "stages.0.block_size: 32 exceeds data.max_length = 31" in message


def test_checks_across_fields_do_not_print_the_recipe():
    message = refusal(stages=stages(batch_size=3), scaling={"num_workers": 4})
    assert "some/model" not in message
    assert message.startswith("recipe.yaml: stages.0.batch_size: ")


def test_unknown_key_of_a_stage():
    message = refusal(stages=stages(learning_rte=1))
    assert message.startswith("recipe.yaml: stages.0.learning_rte: unknown key; known keys: ")
    assert "learning_rate" in message


def test_ar_stage_has_no_block_size():
    message = refusal(stages=[{"objective": "ar", "block_size": 4}])
    assert "block_size: unknown key" in message
