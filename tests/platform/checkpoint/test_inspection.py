import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from mars_platform.checkpoint.inspection import inspect_model
from mars_platform.checkpoint.metadata import MASK_TOKEN
from mars_platform.checkpoint.tokenizer import read_tokenizer
from mars_platform.errors import UserError
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import create_model

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "model"
    create_model(ScratchModel(config=CONFIG, vocabulary_size=264), ["1 2 3"], 64, path, seed=0)
    return path


@pytest.fixture
def model(made, tmp_path):
    """A copy of the model, which tests change."""
    return shutil.copytree(made, tmp_path / "copy")


def refusal(model):
    with pytest.raises(UserError) as caught:
        inspect_model(str(model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change(file, **values):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **values}))


def add_mask(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([MASK_TOKEN])
    tokenizer.save(str(model / "tokenizer.json"))
    return tokenizer.token_to_id(MASK_TOKEN)


def split_weights(model, *, parts=2):
    """Distribute the weights over several files, as large models have them."""
    tensors = load_file(model / WEIGHTS)
    files = {name: f"part-{index % parts}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, model / file)
    (model / WEIGHTS).unlink()
    change(model / INDEX, weight_map=files)


# --- facts ----------------------------------------------------------------------------------------


def test_the_files_state_context_vocabulary_and_mask(model):
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    found = inspect_model(str(model))
    assert (found.path, found.max_length, found.vocabulary_size) == (model, 128, rows)
    assert found.mask_token_id is None
    assert add_mask(model) == inspect_model(str(model)).mask_token_id


def test_what_the_files_do_not_state_is_unknown(model):
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    found = inspect_model(str(model))
    assert (found.max_length, found.vocabulary_size) == (None, None)


# --- refusals -------------------------------------------------------------------------------------


def truncate(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def lose_a_part(model):
    split_weights(model)
    (model / "part-1.safetensors").unlink()


def truncate_a_part(model):
    split_weights(model)
    truncate(model / "part-0.safetensors")


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (lambda model: (model / WEIGHTS).unlink(), WEIGHTS),
        (lambda model: (model / WEIGHTS).rename(model / "pytorch_model.bin"), WEIGHTS),
        (lambda model: truncate(model / WEIGHTS), WEIGHTS),
        (lose_a_part, "part-1.safetensors"),
        (truncate_a_part, "part-0.safetensors"),
    ],
)
def test_weights_that_are_missing_or_cut_are_refused(model, damage, file):
    damage(model)
    message = refusal(model)
    assert message.startswith(f"model: weights of {model} cannot be loaded ({file}: ")
    assert message.endswith("; copy all of its safetensors files")


def test_a_model_without_a_chat_template_is_refused(model):
    (model / "chat_template.jinja").unlink()
    assert refusal(model).startswith("model: the tokenizer has no chat template; add the model's")


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_a_chat_template_is_found_in_every_place_that_transformers_reads(model, place):
    template = (model / "chat_template.jinja").rename(model / "moved")
    if place == "tokenizer_config.json":
        change(model / place, chat_template=template.read_text())
    else:
        (model / place).mkdir()
        template.rename(model / place / "default.jinja")
    assert inspect_model(str(model)).path == model


def test_a_quantized_model_is_refused(model):
    change(model / "config.json", quantization_config={"quant_method": "gptq"})
    message = refusal(model)
    assert message.startswith(f"model: {model} is quantized (quantization_config in its config.js")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_malformed_file_is_named(model, file):
    (model / file).write_text("{")
    message = refusal(model)
    assert message.startswith(f"{model / file}: cannot be read")
    assert message.endswith("; copy the checkpoint's file again")


def test_facts_of_the_text_part_count(model):
    content = json.loads((model / "config.json").read_text())
    change(model / "config.json", text_config=content, vocab_size=1, max_position_embeddings=2)
    tensors = {
        f"language_model.{name}": tensor for name, tensor in load_file(model / WEIGHTS).items()
    }
    tower = {"vision_tower.layers.0.fc1.weight": tensors["language_model.model.norm.weight"]}
    save_file(tensors | tower, model / WEIGHTS)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.json").write_text(json.dumps({"chat_template": "a template"}))
    found = inspect_model(str(model))
    assert (found.vocabulary_size, found.max_length) == (320, 128)
    assert "q_proj" in found.layers
    assert "fc1" not in found.layers
    assert read_tokenizer(model).chat_template == "a template"
