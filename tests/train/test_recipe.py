from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from mars_platform.config import apply_overrides, build_settings, load_settings
from mars_platform.errors import UserError
from mars_train.recipe import Recipe, Scaling


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


# --- reading ------------------------------------------------------------------------------------


def test_a_recipe_survives_writing_and_reading():
    scaling = {"num_workers": [1, 4], "resources_per_worker": {"memory": 1e9}}
    recipe = Recipe.model_validate(content(evaluation=EVALUATION, scaling=scaling))
    written = yaml.safe_dump(recipe.model_dump(mode="json"))
    assert Recipe.model_validate(yaml.safe_load(written)) == recipe


@pytest.mark.parametrize("written", ["no", '"no"', "false"])
def test_a_bare_no_is_float32_though_yaml_reads_it_as_false(written):
    recipe = Recipe.model_validate(content(precision=yaml.safe_load(written)))
    assert recipe.precision == "no"
    assert "precision" in refusal(precision=True)


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


# --- refusals -------------------------------------------------------------------------------------


def scratch(**config):
    return {"scratch": {"config": {"model_type": "qwen2", **config}}}


@pytest.mark.parametrize("model", [{}, {"base": "x", **scratch()}])
def test_a_model_has_exactly_one_source(model):
    assert "model: give either base (a directory or hub id) or scratch" in refusal(model=model)


INVALID = """
    data.train=[] data.max_length=7 data.max_bad_rows=-1 data.loss_on=first
    stages=[] stages.0.name=../up stages.0.epochs=0 stages.0.max_steps=0 stages.0.batch_size=0
    stages.0.micro_batch_size=0 stages.0.learning_rate=0 stages.0.learning_rate=fast
    stages.0.warmup_ratio=1 stages.0.warmup_ratio=-0.1 stages.0.weight_decay=-1
    stages.0.max_grad_norm=0 stages.0.row_slots=15
    stages.1.name=Upper stages.1.block_size=0 stages.1.block_size=65 stages.1.ar_weight=-0.1
    stages.1.block_size=[] stages.1.block_size=[4,65] stages.1.block_size=[8,4]
    stages.1.block_size=[4,4] stages.1.block_size=4.5 stages.1.block_size=[true]
    stages.1.ar_weight=.inf stages.0.learning_rate=.inf
    stages.1.distillation.weight=0 stages.1.distillation.weight=1.1
    stages.1.distillation.target=hard
    precision=fp16 attention=eager seed=-1 max_nonfinite_steps=-1
    scaling.cpus_per_worker=0 scaling.strategy=zero3 scaling.placement=ANYWHERE
    scaling.max_failures=-2 scaling.threads_per_worker=0
    checkpoints.every_steps=0 checkpoints.keep=0
    evaluation.data=[] evaluation.every_steps=0 evaluation.max_items=0 evaluation.max_tokens=0
    evaluation.thresholds.1=0 evaluation.thresholds.0=1.01 evaluation.max_accuracy_drop=1.1
    evaluation.max_loss_rise=-1
    model.scratch.vocabulary_size=263 model.scratch.config={}
    evaluation.data=[s3://bucket/held-out.jsonl]
    stages.0.name=start stages.0.name=start-mars stages.0.name=data stages.0.name=ray
"""


@pytest.mark.parametrize("override", INVALID.split())
def test_invalid_settings_are_refused_by_name(override):
    changes = content(evaluation=EVALUATION | {"thresholds": [1, 0.5]})
    if override.startswith("model.scratch"):
        changes["model"] = scratch()
    apply_overrides(changes, [override])
    assert f"{override.partition('=')[0]}: " in refusal(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": {}}, "data.train: required, but not given"),
        ({"stages": [{"objective": "sft"}]}, "stages.0: "),
        ({"stages": [{"epochs": 3}]}, "stages.0: "),
        ({"evaluation": {}}, "evaluation.data: required, but not given"),
    ],
)
def test_missing_settings_are_named(changes, named):
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
    changes = {"scaling": {"num_workers": num_workers}}
    assert refusal(stages=stages(batch_size=10), **changes) == (
        "recipe.yaml: stages.0.batch_size: 10 conversations cannot be shared by "
        "scaling.num_workers = 11; make it larger"
    )
    assert Recipe.model_validate(content(stages=stages(batch_size=11), **changes))


def test_a_block_longer_than_the_data_is_refused():
    changes = {"data": {"train": ["a"], "max_length": 31}}
    message = refusal(stages=stages(block_size=32), **changes)
    assert "stages.0.block_size: 32 exceeds data.max_length = 31" in message
    assert Recipe.model_validate(content(stages=stages(block_size=31), **changes))


def test_the_model_of_several_block_sizes_has_the_largest():
    (stage,) = Recipe.model_validate(content(stages=stages(block_size=[2, 8, 31]))).stages
    assert stage.block_sizes == (2, 8, 31)
    assert Recipe.model_validate(content(stages=stages(block_size=8))).stages[0].block_sizes == (8,)
    message = refusal(stages=stages(block_size=[2, 32]), data={"train": ["a"], "max_length": 31})
    assert "stages.0.block_size: 32 exceeds data.max_length = 31" in message


GENERATE, OWN = {"objective": "generate"}, {"objective": "mars", "responses": "generate"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            [{"objective": "ar"}, OWN],
            "stages.1.responses: no stage of objective generate has the name 'generate'; add one "
            "before this stage",
        ),
        (
            [{"objective": "ar"}, OWN | {"responses": "ar"}],
            "stages.1.responses: no stage of objective generate has the name 'ar'; add one before "
            "this stage",
        ),
        (
            [OWN, GENERATE],
            "stages.0.responses: stage generate comes later; move it before this one",
        ),
        (
            [{"objective": "ar"}, GENERATE],
            "stages.1: no later stage has responses: generate; name it in a stage of objective "
            "mars, or leave it out",
        ),
    ],
)
def test_responses_need_a_stage_that_writes_them_before(found, expected):
    assert refusal(stages=found) == f"recipe.yaml: {expected}"


def test_each_stage_may_have_responses_of_its_own():
    found = [GENERATE, OWN, GENERATE | {"name": "more"}]
    found.append(OWN | {"name": "last", "responses": "more"})
    recipe = Recipe.model_validate(content(stages=found))
    assert [stage.name for stage in recipe.trained_stages] == ["mars", "last"]


def test_a_new_model_is_trained_before_it_responds():
    message = refusal(stages=[GENERATE, OWN], model=scratch())
    assert message.startswith("recipe.yaml: stages.0: a new model has learned nothing that it")
    assert Recipe.model_validate(content(stages=[GENERATE, OWN]))  # of a trained model
    trained = [{"objective": "ar"}, GENERATE, OWN]
    recipe = Recipe.model_validate(content(stages=trained, model=scratch()))
    assert [stage.name for stage in recipe.trained_stages] == ["ar", "mars"]


@pytest.mark.parametrize(
    "setting",
    [
        "temperature=-1",
        "temperature=3",
        "temperature=true",
        "temperature=.nan",
        "temperature=[]",
        "temperature=[0, 3]",
        "temperature=[1, 0]",
        "temperature=[1, 1]",
        "max_responses=0",
        "max_tokens=0",
        "seed=-1",
        "max_num_seqs=0",
        "shard_size=0",
        "batch_size=4",
        "name=data",
    ],
)
def test_invalid_settings_of_a_generating_stage_are_refused(setting):
    changes = content(stages=[dict(GENERATE), OWN])
    apply_overrides(changes, [f"stages.0.{setting}"])
    assert f"stages.0.{setting.partition('=')[0]}: " in refusal(**changes)


def test_temperatures_are_one_number_or_several():
    for given, expected in [(0, (0.0,)), (0.8, (0.8,)), ([0, 0.7, 1], (0.0, 0.7, 1.0))]:
        changes = content(stages=[GENERATE | {"temperature": given}, OWN])
        assert Recipe.model_validate(changes).stages[0].temperatures == expected


@pytest.mark.parametrize("key", ["vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"])
def test_a_new_models_tokenizer_decides_about_its_tokens(key):
    message = refusal(model=scratch(**{key: 100}))
    assert f"model.scratch.config: {key} follows from the new tokenizer; leave it out" in message


def test_data_longer_than_a_new_models_context_is_refused():
    model = scratch(max_position_embeddings=64)
    data = {"train": ["a"], "max_length": 65}
    assert refusal(model=model, data=data) == (
        "recipe.yaml: data.max_length: 65 exceeds the 64 tokens that the model's context holds; "
        "lower it"
    )
    assert Recipe.model_validate(content(model=model, data=data | {"max_length": 64}))


def test_flex_attention_needs_gpus():
    assert "attention: flex trains on GPUs only; use sdpa" in refusal(attention="flex")
    assert Recipe.model_validate(content(attention="flex", scaling={"use_gpu": True}))


def test_an_ar_stage_has_no_block_size():
    message = refusal(stages=[{"objective": "ar", "block_size": 4}])
    assert "block_size: unknown key" in message


RECIPES = Path(__file__).parents[2] / "bench" / "recipes"


@pytest.mark.parametrize(
    "file",
    [Path(str(files("mars_platform.demo"))) / "recipe.yaml", *sorted(RECIPES.glob("*.yaml"))],
    ids=lambda file: file.name,
)
def test_a_recipe_of_the_project_lacks_nothing_but_data(file):
    recipe = load_settings(file, Recipe, ["data.train=[train.jsonl]", "output=out"])
    assert [stage.objective for stage in recipe.trained_stages] == ["ar", "mars"]


# --- adapters -------------------------------------------------------------------------------------


def test_an_adapter_learns_from_its_model_unless_told_otherwise():
    (stage,) = Recipe.model_validate(content(stages=stages(adapter={}))).stages
    assert (stage.ar_weight, stage.learning_rate) == (0.0, 2e-4)
    assert (stage.distillation.weight, stage.distillation.target) == (1.0, "soft")
    assert (stage.adapter.rank, stage.adapter.scale) == (32, 2.0)
    given = stages(adapter={"rank": 8, "alpha": 8}, distillation=None, learning_rate=1e-3)
    recipe = Recipe.model_validate(content(stages=given))
    assert recipe.stages[0].distillation is None
    assert recipe.stages[0].adapter.scale == 1.0
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_a_head_learns_from_its_model_where_that_is_fixed():
    alone, joint = (
        Recipe.model_validate(content(stages=[each])).stages[0]
        for each in (HEAD, HEAD | {"train": "all"})
    )
    assert (alone.ar_weight, alone.distillation.weight) == (0.0, 1.0)
    assert (joint.ar_weight, joint.distillation) == (1.0, None)
    rates = [(stage.learning_rate, stage.draft_head.learning_rate) for stage in (alone, joint)]
    assert rates == [(2e-4, 5e-3), (5e-6, 5e-3)]
    behind = content(model=scratch(), stages=[{"objective": "mars", "name": "masks"}, HEAD])
    recipe = Recipe.model_validate(behind)
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_lora_has_a_rate_of_its_own_unless_told_otherwise():
    found = Recipe.model_validate(content(stages=[LORA, AR, {**LORA, "name": "two"} | SLOW]))
    assert [stage.learning_rate for stage in found.stages] == [2e-4, 5e-6, 1e-5]
    assert found.stages[0].lora.merge
    assert Recipe.model_validate(found.model_dump(mode="json")) == found


AR = {"objective": "ar"}
ADAPTED = {"objective": "mars", "adapter": {}}
LORA = {"objective": "ar", "name": "lora", "lora": {}}
HEAD = {"objective": "mars", "draft_head": {}, "train": "head"}
SLOW = {"learning_rate": 1e-5}
SEPARATE = {**LORA, "lora": {"merge": False}}
FOUR_BITS = {**LORA, "lora": {"quantization": "nf4"}}
SHARDED = {"use_gpu": True, "strategy": "fsdp2", "num_workers": 2}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stages": [ADAPTED, AR]}, "stages.0.adapter: the next stage would train the model"),
        ({"model": scratch(), "stages": [ADAPTED]}, "stages.0.adapter: a new model has learned"),
        ({"stages": [ADAPTED | {"ar_weight": 1}]}, "stages.0: ar_weight: an adapter does not"),
        ({"stages": [ADAPTED], "compile": True}, "compile: layers with an adapter are not"),
        ({"stages": [ADAPTED | {"lora": {}}]}, "stages.0: lora: a stage trains a LoRA adapter or"),
        ({"stages": [SEPARATE, AR]}, "make it the last stage, or set merge"),
        ({"model": scratch(), "stages": [LORA]}, "stages.0.lora: a new model has learned"),
        ({"stages": [FOUR_BITS]}, "stages.0.lora.quantization: weights of 4 bits are trained"),
        ({"stages": [FOUR_BITS], "scaling": SHARDED}, "quantization: fsdp2 does not shard"),
        ({"stages": [HEAD], "model": scratch()}, "stages: a new model has no masks beside which"),
        ({"stages": [HEAD], "compile": True}, "compile: a head alone is trained without it"),
        ({"stages": [HEAD | {"adapter": {}}]}, "stages.0: adapter: a head alone is trained beside"),
        ({"stages": [HEAD | {"ar_weight": 1}]}, "stages.0: ar_weight: a head alone is trained"),
        ({"stages": stages(train="head")}, "stages.0: train: there is no head to train; set draft"),
        ({"stages": stages(draft_head={}, lora={})}, "stages.0: lora: is not trained with a draft"),
        ({"stages": stages(draft_head={"kind": "gru"})}, "stages.0.draft_head.kind: "),
        ({"stages": stages(adapter={"rank": 0})}, "stages.0.adapter.rank: "),
        ({"stages": stages(adapter={"applies_to": "all"})}, "stages.0.adapter.applies_to: "),
        ({"stages": stages(adapter={"target_modules": []})}, "stages.0.adapter.target_modules: "),
    ],
)
def test_an_adapter_without_its_model_or_with_a_loss_of_it_is_refused(changes, problem):
    assert problem in refusal(**changes)


def test_an_adapter_of_a_new_model_comes_behind_an_ar_stage():
    assert len(Recipe.model_validate(content(model=scratch(), stages=[AR, ADAPTED])).stages) == 2
