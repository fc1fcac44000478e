"""Refusals that come before torch is loaded or Ray started, and those that come before Ray."""

import gzip
import json
import shutil
import subprocess
import sys

import pytest
import yaml
from rich.console import Console

from chats import GOOD, LONG, chat, write_lines
from mars_platform.errors import UserError
from mars_train.data.token_store import TOKENS_FILE
from mars_train.recipe import Recipe
from mars_train.run.checks import check_before_start
from mars_train.run.preparation import prepare_start
from mars_train.run.recipe_run import run_recipe
from mars_train.run.run_directory import RunDirectory
from mars_train.storage.directories import SingleWriter, Storage
from stage_runs import write_rows, write_start

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_start(tmp_path_factory.mktemp("made") / "model", texts=[GOOD, LONG])


@pytest.fixture
def model(made, tmp_path):
    """A copy of the model, which tests change."""
    return shutil.copytree(made, tmp_path / "model")


@pytest.fixture
def content(model, tmp_path):
    """A recipe that passes every check."""
    answered = json.dumps({**json.loads(GOOD), "answer": "12"})
    train = str(write_lines(tmp_path / "train.jsonl", *[GOOD] * 3))
    held_out = str(write_lines(tmp_path / "held-out.jsonl", answered, answered))
    return {
        "model": {"base": str(model)},
        "data": {"train": [train], "max_length": 128},
        "stages": [{"objective": "ar", "batch_size": 2}, {"objective": "mars", "batch_size": 2}],
        "evaluation": {"data": [held_out]},
        "output": str(tmp_path / "out"),
    }


def directory_of(content):
    recipe = Recipe.model_validate(content)
    return RunDirectory(recipe, recipe.output)


def check(content):
    return check_before_start(directory_of(content))


def refusal(content, call=check):
    with pytest.raises(UserError) as caught:
        call(content)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# --- before torch is loaded -----------------------------------------------------------------------


def test_a_usable_recipe_passes_and_nothing_is_written(content, model, tmp_path):
    content["checkpoints"] = {"storage": str(tmp_path / "out" / "checkpoints")}
    assert check(content) == model
    assert not (tmp_path / "out").exists()


def test_a_relative_path_of_a_model_is_made_absolute_for_the_workers(content, model, monkeypatch):
    monkeypatch.chdir(model.parent)
    content["model"]["base"] = model.name
    assert check(content) == model


def test_a_recipe_of_a_new_model_passes(content):
    content["model"] = {"scratch": {"config": {"model_type": "qwen2"}}}
    assert check(content) is None


def test_a_missing_model_is_refused(content, tmp_path):
    content["model"]["base"] = str(tmp_path / "none")
    assert refusal(content).startswith(f"model: there is no directory {tmp_path / 'none'}; give")


def test_a_finished_run_succeeds_again_at_once_and_stays_as_it_is(content, model, tmp_path):
    content["output"] = str(tmp_path / "run [/b]")  # which is no markup
    directory = directory_of(content)
    directory.model.mkdir(parents=True)
    directory.keep_recipe()
    shutil.rmtree(model)  # what only training needs may be gone
    content["scaling"] = {"num_workers": 2}
    before = sorted(directory.path.rglob("*"))
    with (tmp_path / "printed.txt").open("w+") as printed:
        recipe = Recipe.model_validate(content)
        assert run_recipe(recipe, Console(file=printed, width=20)) == directory.model
        printed.seek(0)
        said = printed.read()
    assert said == f"the run in {directory.path} is finished; its model is {directory.model}\n"
    assert sorted(directory.path.rglob("*")) == before
    content["seed"] = 1
    message = refusal(content, lambda new: run_recipe(Recipe.model_validate(new), QUIET))
    assert message.startswith(
        f"output: {directory.path} holds a finished run of another recipe, which differs in seed; "
    )


def test_data_longer_than_the_models_context_is_refused(content):
    content["data"]["max_length"] = 193
    assert refusal(content) == (
        "data.max_length: 193 exceeds the 192 tokens that the model's context holds; lower it"
    )


def test_a_head_alone_needs_masks_that_are_trained(content):
    content["stages"][-1] = {"objective": "mars", "draft_head": {}, "train": "head"}
    assert "has no masks beside which a head could be trained alone" in refusal(content)
    content["stages"].insert(0, {"objective": "mars", "name": "masks"})
    check(content)


def test_a_mask_token_without_a_row_of_the_embedding_is_refused(content, model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    last = tokenizer["added_tokens"][-1]
    token_id = len(tokenizer["model"]["vocab"])
    tokenizer["added_tokens"].append({**last, "id": token_id, "content": "<|mask|>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    change(model / "config.json", vocab_size=token_id + 1)
    check(content)
    change(model / "config.json", vocab_size=token_id)
    message = refusal(content)
    assert f"has the mask token at {token_id}, but the embedding has {token_id} rows" in message
    mars = content["stages"].pop()
    check(content)  # an AR stage needs no mask
    content["stages"].append(mars | {"adapter": {}})
    check(content)  # an adapter brings the row along


def test_an_adapter_of_layers_that_the_model_has_not_is_refused(content):
    for unknown in ("query", "embed_tokens", "input_layernorm", "norm"):
        content["stages"][1]["adapter"] = {"target_modules": ["q_proj", unknown]}
        message = refusal(content)
        assert message.startswith("stages.1.adapter.target_modules: ")
        assert message.endswith(
            f"has no layer called {unknown!r}; it has down_proj, gate_proj, k_proj, o_proj, "
            "q_proj, up_proj, v_proj"
        )
    content["stages"][1]["adapter"] = {"target_modules": ["q_proj"]}
    check(content)
    content["stages"][0]["lora"] = {"target_modules": ["lm_head"]}
    assert refusal(content).startswith("stages.0.lora.target_modules: ")


def test_weights_of_4_bits_without_their_library_are_refused(content, monkeypatch):
    monkeypatch.setattr("mars_train.run.checks.find_spec", lambda name: None)
    content["stages"][0]["lora"] = {"quantization": "nf4"}
    content["scaling"] = {"use_gpu": True}
    assert "nf4 needs bitsandbytes; install marsray[qlora] on every node" in refusal(content)


@pytest.mark.parametrize("setting", ["data.train", "evaluation.data"])
def test_missing_files_are_refused_by_their_setting(content, setting, tmp_path):
    section, key = setting.split(".")
    content[section][key] = [str(tmp_path / "none.jsonl")]
    assert refusal(content).startswith(f"{setting}: there is no file or directory {tmp_path}/none")


def test_an_output_that_is_used_is_refused(content, tmp_path):
    write_lines(tmp_path / "out" / "notes.txt")
    assert refusal(content).startswith(f"output: {tmp_path / 'out'} is not empty; name a new")


def test_an_output_that_is_a_file_is_refused(content, tmp_path):
    write_lines(tmp_path / "out")
    assert refusal(content) == f"output: {tmp_path / 'out'} is a file; name a directory"
    content["output"] = str(tmp_path / "out" / "below")
    message = refusal(content, lambda content: run_recipe(Recipe.model_validate(content), QUIET))
    assert message.startswith(f"output: {tmp_path / 'out' / 'below'} cannot be written (Not a dir")


def kept(content):
    """Leave an unfinished run of the recipe whose data is tokenised."""
    directory = directory_of(content)
    directory.path.mkdir()
    directory.keep_recipe()
    write_rows(directory.data, 4)
    return directory


def test_a_run_of_another_recipe_is_refused(content):
    kept(content)
    message = refusal({**content, "seed": 7})
    assert "holds an unfinished run of another recipe, which differs in seed; " in message


def test_a_resumed_run_needs_its_tokenised_data_only(content, tmp_path):
    directory = kept(content)
    (tmp_path / "train.jsonl").unlink()
    check(content)
    (directory.data / TOKENS_FILE).unlink()
    message = refusal(content)
    assert message.startswith(f"{directory.data / TOKENS_FILE}: cannot be read")
    assert message.endswith("; prepare the data again")


# --- the storage ----------------------------------------------------------------------------------


def store(content, root, **changes):
    """Store a checkpoint of a run of the recipe, with some settings changed."""
    recipe = Recipe.model_validate({**content, **changes}).model_dump(mode="json")
    state = json.dumps({"recipe": recipe, "data_fingerprint": "0"})
    storage = Storage(f"{root}/mars")
    storage.save(
        "step-00000005", lambda path: path.joinpath("state.json").write_text(state), SingleWriter()
    )
    return storage


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_storage_with_checkpoints_of_another_recipe_is_refused(content, kind, tmp_path):
    root = str(tmp_path / "storage") if kind == "local" else f"memory://{tmp_path.name}"
    content["checkpoints"] = {"storage": root}
    storage = store(content, root, output="elsewhere")
    check(content)
    storage.remove("step-00000005")
    store(content, root, seed=7)
    message = refusal(content)
    assert "step-00000005 belongs to another run, which differs in seed; name another" in message


def test_a_damaged_checkpoint_is_left_to_the_workers(content, tmp_path):
    content["checkpoints"] = {"storage": str(tmp_path / "storage")}
    storage = store(content, tmp_path / "storage", seed=7)
    (storage.fetch("step-00000005") / "state.json").write_text("{")
    check(content)
    assert storage.names() == ["step-00000005"]  # nothing is set aside


@pytest.mark.parametrize("storage", ["foo://bucket", "train.jsonl"])
def test_a_storage_that_cannot_be_used_is_refused(content, storage, tmp_path):
    root = storage if "://" in storage else str(tmp_path / storage)
    content["checkpoints"] = {"storage": root}
    assert refusal(content).startswith(f"checkpoints.storage: {root} cannot be used (")


def test_a_refused_command_imports_neither_torch_nor_ray(content, tmp_path):
    content["checkpoints"] = {"storage": str(tmp_path / "train.jsonl")}  # the last check of all
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    code = (
        "import sys; from mars_platform.cli import main as cli\n"
        "assert cli.run(['train', 'recipe.yaml']) == 2\n"
        "print(*sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True)
    assert ended.stdout == "\n"
    assert ended.stderr.startswith("error: checkpoints.storage: ")


# --- before Ray starts ----------------------------------------------------------------------------


def prepare(content):
    directory = directory_of(content)
    base = check_before_start(directory)
    with directory.claimed():
        return prepare_start(directory, base, QUIET)


def refused(content):
    """Return the error message of `prepare`, which must leave a directory that can be used."""
    message = refusal(content, prepare)
    assert {item.name for item in directory_of(content).path.iterdir()} == {".lock"}
    return message


def test_a_usable_recipe_is_prepared(content, model):
    start = prepare(content)
    assert start.checkpoint.path == model
    assert [item.answer for item in start.held_out.items] == ["12", "12"]
    assert directory_of(content).kept_recipe.is_file()


def test_a_new_model_is_created_once(content):
    config = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}
    content["model"] = {"scratch": {"config": config}}
    first = prepare(content).checkpoint
    assert first.path == directory_of(content).new_model
    weights = first.path / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert prepare(content).checkpoint.path == first.path
    assert weights.stat().st_mtime_ns == written


def test_a_new_model_of_an_impossible_config_is_refused(content):
    content["model"] = {"scratch": {"config": {"model_type": "no-such-model"}}}
    assert refused(content).startswith("model.scratch.config: ")


def test_a_model_that_is_no_causal_language_model_is_refused(content, model):
    (model / "config.json").write_text('{"model_type": "t5"}')
    assert "is of the family 't5', which has no causal language model; use" in refused(content)


def test_a_context_that_only_transformers_knows_is_compared_too(content, model):
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]  # 32,768 by default
    (model / "config.json").write_text(json.dumps(config))
    content["data"]["max_length"] = 32_769
    assert refused(content).startswith("data.max_length: 32769 exceeds the 32768 tokens")


def test_data_that_the_template_cannot_render_is_refused(content, model):
    (model / "chat_template.jinja").write_text("{{ raise_exception('No such role') }}")
    message = refused(content)
    assert message.startswith("data.train: none of the 3 rows read is usable: ")
    assert "messages: the chat template cannot render them (No such role)" in message


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (json.dumps({**json.loads(GOOD), "answer": ""}), "answer: must not be empty; leave it"),
        (json.dumps(chat("Count " * 200, "x")), "messages: the prompt has "),
    ],
)
def test_a_bad_held_out_row_is_refused_by_its_line(content, row, problem, tmp_path):
    file = write_lines(tmp_path / "held-out.jsonl", GOOD, row)
    assert refused(content).startswith(f"{file}:2: {problem}")
    content["evaluation"]["max_items"] = 1
    prepare(content)  # the row is not used


def test_held_out_files_without_rows_are_refused(content, tmp_path):
    write_lines(tmp_path / "held-out.jsonl")
    assert "the files hold no row; name files with conversations" in refused(content)


def test_compressed_held_out_files_are_read(content, tmp_path):
    file = tmp_path / "held-out.jsonl.gz"
    file.write_bytes(gzip.compress(GOOD.encode()))
    content["evaluation"]["data"] = [str(file)]
    assert len(prepare(content).held_out.items) == 1
