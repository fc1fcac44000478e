import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.metadata import MASK_TOKEN, MarsMetadata, locate_model
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_platform.errors import UserError
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import TURN_END, create_model

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXTS = ["Count a box of 12 apples", "There are 12 apples in the box."] * 5
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory):
    """A plain AR checkpoint; tests copy it before they change it."""
    path = tmp_path_factory.mktemp("plain") / "model"
    create_model(ScratchModel(config=CONFIG, vocabulary_size=300), TEXTS, 64, path, seed=0)
    return path


@pytest.fixture(scope="module")
def mars_path(plain_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("mars") / "model"
    model, tokenizer = load_model(plain_path), AutoTokenizer.from_pretrained(plain_path)
    mask_id, _ = add_mask_token(model, tokenizer)
    metadata = MarsMetadata(block_size=4, mask_token_id=mask_id, provenance={"seed": 7})
    save_checkpoint(path, model, tokenizer, metadata)
    return path


@pytest.fixture
def plain_copy(plain_path, tmp_path):
    return shutil.copytree(plain_path, tmp_path / "copy")


@pytest.fixture
def mars_copy(mars_path, tmp_path):
    return shutil.copytree(mars_path, tmp_path / "copy")


@pytest.fixture
def loaded(plain_path):
    return load_model(plain_path), AutoTokenizer.from_pretrained(plain_path)


def refusal(call, *arguments):
    """The one line with which a call fails."""
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def change(file, **values):
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **values}))


def logits_of(model):
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def model_of(tokenizer, **options):
    """A model without a spare row in its embedding."""
    torch.manual_seed(0)
    config = Qwen2Config(**{**CONFIG, "vocab_size": len(tokenizer), **options})
    return AutoModelForCausalLM.from_config(config).eval()


# --- reading and writing --------------------------------------------------------------------------


def test_a_plain_checkpoint_is_read_without_metadata(plain_path):
    checkpoint = read_checkpoint(plain_path)
    tokenizer = checkpoint.tokenizer
    assert checkpoint.path == plain_path
    assert checkpoint.metadata is None
    assert checkpoint.max_length == 128  # twice the training length
    assert tokenizer.decode(tokenizer.encode("12 apples")) == "12 apples"
    assert checkpoint.special.eos == {tokenizer.convert_tokens_to_ids(TURN_END)}
    assert checkpoint.special.never_emitted == {tokenizer.pad_token_id}


def test_special_tokens_without_a_logit_are_left_out(plain_path, tmp_path):
    path = shutil.copytree(plain_path, tmp_path / "plain")
    tokenizer = read_checkpoint(path).tokenizer
    size = read_checkpoint(path).config.vocab_size
    tokenizer.add_tokens([f"<spare{number}>" for number in range(size - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "<pad past the logits>"})
    tokenizer.save_pretrained(path)
    checkpoint = read_checkpoint(path)
    assert checkpoint.tokenizer.pad_token_id == checkpoint.num_tokens == size
    assert checkpoint.special.never_emitted == frozenset()
    assert checkpoint.special.eos == read_checkpoint(plain_path).special.eos


def test_a_mars_checkpoint_is_read_as_it_was_saved(mars_path):
    checkpoint = read_checkpoint(str(mars_path))
    mask_id = checkpoint.tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    assert checkpoint.metadata == MarsMetadata(
        block_size=4, mask_token_id=mask_id, provenance={"seed": 7}
    )
    assert checkpoint.special.never_emitted == {mask_id, checkpoint.tokenizer.pad_token_id}


def test_weights_are_loaded_as_they_were_saved(mars_path, plain_path):
    mars, plain = load_model(mars_path), load_model(plain_path)
    assert not mars.training
    mask_id = read_checkpoint(mars_path).metadata.mask_token_id
    kept = [token for token in range(mars.config.vocab_size) if token != mask_id]
    assert torch.equal(logits_of(mars)[..., kept], logits_of(plain)[..., kept])


def test_the_seed_decides_the_weights_of_a_new_model(plain_path, tmp_path):
    scratch = ScratchModel(config=CONFIG, vocabulary_size=300)
    create_model(scratch, TEXTS, 64, tmp_path / "same", seed=0)
    create_model(scratch, TEXTS, 64, tmp_path / "other", seed=1)
    first = logits_of(load_model(plain_path))
    assert torch.equal(first, logits_of(load_model(tmp_path / "same")))
    assert not torch.equal(first, logits_of(load_model(tmp_path / "other")))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "no-such-model"},
        {"model_type": "t5"},
        {**CONFIG, "hidden_act": "no-such-function"},
        {**CONFIG, "num_hidden_layers": "two"},
    ],
)
def test_an_impossible_config_of_a_new_model_is_refused(config, tmp_path):
    scratch = ScratchModel(config=config)
    message = refusal(create_model, scratch, TEXTS, 64, tmp_path / "model", 0)
    assert message.startswith("model.scratch.config: ")


# --- the mask token -------------------------------------------------------------------------------


def test_the_mask_takes_a_spare_row_and_leaves_the_others_alone(loaded):
    model, tokenizer = loaded
    rows, num_tokens, before = model.config.vocab_size, len(tokenizer), logits_of(model)
    special = set(tokenizer.all_special_tokens)
    mask_id, has_grown = add_mask_token(model, tokenizer)
    assert (mask_id, has_grown) == (num_tokens, False)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == rows
    kept = [token for token in range(rows) if token != mask_id]
    assert torch.equal(logits_of(model)[..., kept], before[..., kept])
    assert tokenizer.encode(MASK_TOKEN, add_special_tokens=False) == [mask_id]
    assert set(tokenizer.all_special_tokens) == special | {MASK_TOKEN}


def test_the_mask_starts_as_the_mean_of_the_rows_in_use(loaded):
    model, tokenizer = loaded
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    expected = [each.weight[: len(tokenizer)].detach().mean(0) for each in embeddings]
    mask_id, _ = add_mask_token(model, tokenizer)
    for embedding, mean in zip(embeddings, expected, strict=True):
        assert torch.allclose(embedding.weight[mask_id], mean)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_without_a_spare_row_grows(loaded, tied, tmp_path):
    _, tokenizer = loaded
    rows = len(tokenizer)
    model = model_of(tokenizer, tie_word_embeddings=tied)
    before = logits_of(model)
    assert add_mask_token(model, tokenizer) == (rows, True)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == rows + 1
    assert model.get_output_embeddings().weight.shape[0] == rows + 1
    torch.testing.assert_close(logits_of(model)[..., :rows], before, rtol=1e-5, atol=1e-6)
    metadata = MarsMetadata(block_size=2, mask_token_id=rows)
    save_checkpoint(tmp_path / "grown", model, tokenizer, metadata)
    assert read_checkpoint(tmp_path / "grown").metadata == metadata
    assert torch.equal(logits_of(load_model(tmp_path / "grown")), logits_of(model))


@pytest.mark.parametrize(("spare", "per_layer"), [(0, 0), (8, 8), (8, 0)])
def test_the_mask_has_a_row_of_its_own_among_the_inputs_of_each_layer(
    loaded, spare, per_layer, tmp_path
):
    _, tokenizer = loaded
    rows = len(tokenizer)
    model = build_model(
        "gemma4_text",
        vocab_size=rows + spare,
        vocab_size_per_layer_input=rows + per_layer,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    table = model.model.embed_tokens_per_layer
    mean = table.weight[:rows].detach().mean(0)
    assert add_mask_token(model, tokenizer) == (rows, spare == 0)
    torch.testing.assert_close(table.weight[rows].detach(), mean)
    save_checkpoint(tmp_path, model, tokenizer, MarsMetadata(block_size=2, mask_token_id=rows))
    ids = torch.tensor([[1, rows]])
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(ids).logits, model(ids).logits)


def test_a_model_with_a_mask_token_keeps_it(loaded):
    model, tokenizer = loaded
    mask_id, _ = add_mask_token(model, tokenizer)
    num_tokens = len(tokenizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert add_mask_token(model, tokenizer) == (mask_id, False)
    assert len(tokenizer) == num_tokens
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_plain_transformers_loads_a_mars_checkpoint_and_never_emits_the_mask(mars_path):
    model = AutoModelForCausalLM.from_pretrained(mars_path).eval()
    mask_id = read_checkpoint(mars_path).metadata.mask_token_id
    assert model.generation_config.suppress_tokens == [mask_id]
    assert torch.equal(logits_of(model), logits_of(load_model(mars_path)))
    prompt = torch.tensor([[5, 6, 7]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 8}
    with torch.no_grad():  # give the mask the highest logit of all
        model.lm_head.weight.zero_()
        states = model.base_model(input_ids=prompt, use_cache=False).last_hidden_state
        model.lm_head.weight[mask_id] = states[0, -1]
    assert int(model(input_ids=prompt).logits[0, -1].argmax()) == mask_id
    assert mask_id not in model.generate(prompt, **options)[0].tolist()


# --- end tokens and padding -----------------------------------------------------------------------


def test_all_end_tokens_of_the_generation_config_count(plain_copy):
    change(plain_copy / "generation_config.json", eos_token_id=[2, 9])
    assert read_checkpoint(plain_copy).special.eos == {2, 9}


def test_the_end_token_of_the_tokenizer_suffices_and_those_of_the_model_count(plain_copy):
    (plain_copy / "generation_config.json").unlink()
    assert read_checkpoint(plain_copy).special.eos == {2}
    change(plain_copy / "config.json", eos_token_id=[9])
    assert read_checkpoint(plain_copy).special.eos == {2, 9}


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("tokenizer_config.json", {"pad_token": TURN_END}),
        ("generation_config.json", {"eos_token_id": [2, 0]}),
    ],
)
def test_an_end_token_that_is_also_padding_can_be_emitted(mars_copy, file, value):
    change(mars_copy / file, **value)
    checkpoint = read_checkpoint(mars_copy)
    assert checkpoint.tokenizer.pad_token_id in checkpoint.special.eos
    assert checkpoint.special.never_emitted == {checkpoint.metadata.mask_token_id}


# --- refusals -------------------------------------------------------------------------------------


def test_a_path_that_is_no_model_directory_is_refused(tmp_path, plain_path):
    missing = str(tmp_path / "nothing")
    assert missing in refusal(read_checkpoint, missing)
    assert "there is no directory nothing" in refusal(locate_model, "nothing")
    assert "holds no config.json" in refusal(read_checkpoint, tmp_path)
    assert "holds no config.json" in refusal(read_checkpoint, plain_path / WEIGHTS)


def write(file, text):
    return lambda path: (path / file).write_text(text)


def remove_tokenizer(path):
    for file in path.glob("tokenizer*"):
        file.unlink()


def pickle_weights(path):
    torch.save(load_file(path / WEIGHTS), path / "pytorch_model.bin")
    (path / WEIGHTS).unlink()


def truncate_weights(path):
    content = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(content[: len(content) // 2])


def drop_a_tensor(path):
    tensors = load_file(path / WEIGHTS)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (write("config.json", "{"), "/copy"),
        (write("config.json", "{}"), "/copy"),
        (write("config.json", '{"model_type": "no-such-model"}'), "/copy"),
        (lambda path: change(path / "config.json", num_hidden_layers="two"), "num_hidden_layers"),
        (write("generation_config.json", "{"), "generation_config.json"),
        (write("tokenizer.json", "{"), "/copy"),
        (remove_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_checkpoint_is_refused(plain_copy, damage, named):
    damage(plain_copy)
    assert named in refusal(read_checkpoint, plain_copy)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: (path / WEIGHTS).unlink(), "/copy"),
        (pickle_weights, "safetensors"),
        (truncate_weights, "/copy"),
        (drop_a_tensor, "q_proj"),
        (lambda path: change(path / "config.json", intermediate_size=64), "/copy"),
    ],
)
def test_unusable_weights_are_refused(plain_copy, damage, named):
    damage(plain_copy)
    assert named in refusal(load_model, plain_copy)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[]", b"null", b'"text"'])
def test_metadata_that_is_no_json_object_is_refused(mars_copy, content):
    (mars_copy / "mars.json").write_bytes(content)
    assert str(mars_copy / "mars.json") in refusal(read_checkpoint, mars_copy)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"format_version": 2}, "format_version"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "many"}, "block_size"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"window": 3}, "window: unknown key; known keys: format_version, block_size"),
        ({"mask_token_id": 5}, "mask_token_id is 5"),
    ],
)
def test_metadata_with_an_invalid_value_is_refused(mars_copy, values, named):
    change(mars_copy / "mars.json", **values)
    message = refusal(read_checkpoint, mars_copy)
    assert message.startswith(str(mars_copy / "mars.json"))
    assert named in message


def test_metadata_without_a_mask_in_the_tokenizer_is_refused(mars_path, plain_copy):
    shutil.copy(mars_path / "mars.json", plain_copy)
    assert "mask_token_id" in refusal(read_checkpoint, plain_copy)


@pytest.mark.parametrize(
    ("call", "model_type", "file", "named"),
    [
        (read_checkpoint, "own", "config.json", "AutoConfig"),
        (read_checkpoint, "vit", "tokenizer_config.json", "AutoTokenizer"),
        (load_model, "vit", "config.json", "AutoModelForCausalLM"),
    ],
)
def test_a_checkpoint_that_needs_its_own_code_is_refused_without_asking(
    plain_copy, monkeypatch, call, model_type, file, named
):
    asked = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "y")
    (plain_copy / "own.py").write_text(f"open({str(plain_copy / 'executed')!r}, 'w')\n")
    change(plain_copy / "config.json", model_type=model_type)
    reference = ["own.Own", None] if named == "AutoTokenizer" else "own.Own"
    change(plain_copy / file, tokenizer_class="Own", auto_map={named: reference})
    assert "custom code" in refusal(call, plain_copy)
    assert asked == []
    assert not (plain_copy / "executed").exists()
