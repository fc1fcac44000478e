import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, Qwen2Config

from mars_platform.checkpoint.directory import (
    MASK_TOKEN,
    MarsMetadata,
    add_mask_token,
    load_model,
    locate_model,
    read_checkpoint,
    save_checkpoint,
)
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


# --- reading and writing --------------------------------------------------------------------------


def test_plain_checkpoint(plain_path):
    checkpoint = read_checkpoint(plain_path)
    tokenizer = checkpoint.tokenizer
    assert checkpoint.path == plain_path
    assert checkpoint.metadata is None
    assert checkpoint.max_length == 128  # twice the training length
    assert tokenizer.decode(tokenizer.encode("12 apples")) == "12 apples"
    assert checkpoint.special.eos == {tokenizer.convert_tokens_to_ids(TURN_END)}
    assert checkpoint.special.never_emitted == {tokenizer.pad_token_id}


def test_embedding_has_a_spare_row_and_a_multiple_of_64_rows(plain_path):
    checkpoint = read_checkpoint(plain_path)
    assert checkpoint.config.vocab_size % 64 == 0
    assert checkpoint.config.vocab_size > len(checkpoint.tokenizer)


def test_mars_checkpoint_round_trip(mars_path):
    checkpoint = read_checkpoint(str(mars_path))
    mask_id = checkpoint.tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    assert checkpoint.metadata == MarsMetadata(
        block_size=4, mask_token_id=mask_id, provenance={"seed": 7}
    )
    assert checkpoint.special.never_emitted == {mask_id, checkpoint.tokenizer.pad_token_id}


def test_weights_round_trip(mars_path, plain_path):
    mars, plain = load_model(mars_path), load_model(plain_path)
    assert not mars.training
    mask_id = read_checkpoint(mars_path).metadata.mask_token_id
    kept = [token for token in range(mars.config.vocab_size) if token != mask_id]
    assert torch.equal(logits_of(mars)[..., kept], logits_of(plain)[..., kept])


def test_same_seed_gives_the_same_model(plain_path, tmp_path):
    scratch = ScratchModel(config=CONFIG, vocabulary_size=300)
    create_model(scratch, TEXTS, 64, tmp_path / "same", seed=0)
    create_model(scratch, TEXTS, 64, tmp_path / "other", seed=1)
    first = logits_of(load_model(plain_path))
    assert torch.equal(first, logits_of(load_model(tmp_path / "same")))
    assert not torch.equal(first, logits_of(load_model(tmp_path / "other")))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "no-such-model"},
        {"model_type": "t5"},
        {**CONFIG, "hidden_act": "no-such-function"},
        {**CONFIG, "num_hidden_layers": "two"},
        {**CONFIG, "vocab_size": 100},
    ],
)
def test_impossible_scratch_config_is_refused(config, tmp_path):
    scratch = ScratchModel(config=config)
    message = refusal(create_model, scratch, TEXTS, 64, tmp_path / "model", 0)
    assert message.startswith("model.scratch.config: ")


# --- the mask token -------------------------------------------------------------------------------


def test_mask_takes_a_spare_row(loaded):
    model, tokenizer = loaded
    rows, num_tokens, before = model.config.vocab_size, len(tokenizer), logits_of(model)
    mask_id, grown = add_mask_token(model, tokenizer)
    assert (mask_id, grown) == (num_tokens, False)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == rows
    kept = [token for token in range(rows) if token != mask_id]
    assert torch.equal(logits_of(model)[..., kept], before[..., kept])


def test_mask_is_one_token_of_the_tokenizer(loaded):
    model, tokenizer = loaded
    mask_id, _ = add_mask_token(model, tokenizer)
    assert tokenizer.encode(MASK_TOKEN, add_special_tokens=False) == [mask_id]
    assert tokenizer.convert_tokens_to_ids(MASK_TOKEN) == mask_id


def test_mask_starts_as_the_mean_of_the_rows_in_use(loaded):
    model, tokenizer = loaded
    num_used = len(tokenizer)
    expected = [
        embedding.weight[:num_used].detach().mean(0)
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    mask_id, _ = add_mask_token(model, tokenizer)
    assert torch.allclose(model.get_input_embeddings().weight[mask_id], expected[0])
    assert torch.allclose(model.get_output_embeddings().weight[mask_id], expected[1])


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_grows_where_it_is_full(loaded, tied):
    _, tokenizer = loaded
    rows = len(tokenizer)
    torch.manual_seed(0)
    config = Qwen2Config(**{**CONFIG, "vocab_size": rows, "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(config).eval()
    before = logits_of(model)
    assert add_mask_token(model, tokenizer) == (rows, True)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == rows + 1
    assert model.get_output_embeddings().weight.shape[0] == rows + 1
    torch.testing.assert_close(logits_of(model)[..., :rows], before, rtol=1e-5, atol=1e-6)


def test_grown_checkpoint_round_trip(loaded, tmp_path):
    _, tokenizer = loaded
    config = Qwen2Config(**{**CONFIG, "vocab_size": len(tokenizer)})
    model = AutoModelForCausalLM.from_config(config).eval()
    mask_id, _ = add_mask_token(model, tokenizer)
    metadata = MarsMetadata(block_size=2, mask_token_id=mask_id)
    save_checkpoint(tmp_path / "grown", model, tokenizer, metadata)
    assert read_checkpoint(tmp_path / "grown").metadata == metadata
    assert torch.equal(logits_of(load_model(tmp_path / "grown")), logits_of(model))


def test_second_mask_token_is_the_first(loaded):
    model, tokenizer = loaded
    mask_id, _ = add_mask_token(model, tokenizer)
    num_tokens, weights = len(tokenizer), copy_of(model)
    assert add_mask_token(model, tokenizer) == (mask_id, False)
    assert len(tokenizer) == num_tokens
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def copy_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_other_special_tokens_are_kept(loaded):
    model, tokenizer = loaded
    special = set(tokenizer.all_special_tokens)
    add_mask_token(model, tokenizer)
    assert special | {MASK_TOKEN} == set(tokenizer.all_special_tokens)


def test_plain_transformers_loads_a_mars_checkpoint(mars_path):
    model = AutoModelForCausalLM.from_pretrained(mars_path).eval()
    mask_id = read_checkpoint(mars_path).metadata.mask_token_id
    assert model.generation_config.suppress_tokens == [mask_id]
    assert torch.equal(logits_of(model), logits_of(load_model(mars_path)))


def test_plain_generation_never_emits_the_mask(mars_path):
    model = AutoModelForCausalLM.from_pretrained(mars_path).eval()
    mask_id = read_checkpoint(mars_path).metadata.mask_token_id
    prompt = torch.tensor([[5, 6, 7]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 8}
    with torch.no_grad():  # the last hidden state gives the mask the highest logit of all
        model.lm_head.weight.zero_()
        hidden = model.base_model(input_ids=prompt, use_cache=False).last_hidden_state[0, -1]
        model.lm_head.weight[mask_id] = hidden
    assert int(model(input_ids=prompt).logits[0, -1].argmax()) == mask_id
    assert mask_id not in model.generate(prompt, **options)[0].tolist()


# --- end tokens and padding -----------------------------------------------------------------------


def test_end_tokens_of_the_generation_config_count(plain_copy):
    change(plain_copy / "generation_config.json", eos_token_id=[2, 9])
    assert read_checkpoint(plain_copy).special.eos == {2, 9}


def test_end_token_of_the_tokenizer_suffices(plain_copy):
    (plain_copy / "generation_config.json").unlink()
    assert read_checkpoint(plain_copy).special.eos == {2}


def test_padding_with_the_end_token_keeps_it_emittable(mars_copy):
    change(mars_copy / "tokenizer_config.json", pad_token=TURN_END)
    checkpoint = read_checkpoint(mars_copy)
    assert checkpoint.tokenizer.pad_token_id in checkpoint.special.eos
    assert checkpoint.special.never_emitted == {checkpoint.metadata.mask_token_id}


def test_padding_with_a_listed_end_token_keeps_it_emittable(plain_copy):
    change(plain_copy / "generation_config.json", eos_token_id=[2, 0])
    assert read_checkpoint(plain_copy).tokenizer.pad_token_id == 0
    assert read_checkpoint(plain_copy).special.never_emitted == frozenset()


# --- what is refused ------------------------------------------------------------------------------


def test_missing_directory(tmp_path):
    missing = str(tmp_path / "nothing")
    assert missing in refusal(read_checkpoint, missing)
    assert "there is no directory nothing" in refusal(locate_model, "nothing")


def test_directory_without_a_config(tmp_path):
    assert "holds no config.json" in refusal(read_checkpoint, tmp_path)


def test_file_in_place_of_a_directory(plain_path):
    assert "config.json" in refusal(read_checkpoint, plain_path / WEIGHTS)


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "no-such-model"}'])
def test_unusable_config(plain_copy, text):
    (plain_copy / "config.json").write_text(text)
    assert str(plain_copy) in refusal(read_checkpoint, plain_copy)


def test_config_value_of_the_wrong_type(plain_copy):
    change(plain_copy / "config.json", num_hidden_layers="two")
    assert "num_hidden_layers" in refusal(read_checkpoint, plain_copy)


def test_malformed_generation_config(plain_copy):
    (plain_copy / "generation_config.json").write_text("{")
    assert "generation_config.json" in refusal(read_checkpoint, plain_copy)


def test_malformed_tokenizer(plain_copy):
    (plain_copy / "tokenizer.json").write_text("{")
    assert str(plain_copy) in refusal(read_checkpoint, plain_copy)


def test_missing_tokenizer(plain_copy):
    for file in plain_copy.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refusal(read_checkpoint, plain_copy)


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[]", b"null", b'"text"'])
def test_malformed_metadata(mars_copy, content):
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
def test_invalid_metadata(mars_copy, values, named):
    change(mars_copy / "mars.json", **values)
    message = refusal(read_checkpoint, mars_copy)
    assert message.startswith(str(mars_copy / "mars.json"))
    assert named in message


@pytest.mark.parametrize("key", ["block_size", "mask_token_id"])
def test_incomplete_metadata(mars_copy, key):
    content = json.loads((mars_copy / "mars.json").read_text())
    del content[key]
    (mars_copy / "mars.json").write_text(json.dumps(content))
    assert f"{key}: required, but not given" in refusal(read_checkpoint, mars_copy)


def test_metadata_without_a_mask_in_the_tokenizer(mars_path, plain_copy):
    shutil.copy(mars_path / "mars.json", plain_copy)
    assert "mask_token_id" in refusal(read_checkpoint, plain_copy)


def test_missing_weights(plain_copy):
    (plain_copy / WEIGHTS).unlink()
    assert str(plain_copy) in refusal(load_model, plain_copy)


def test_pickled_weights(plain_copy):
    torch.save(load_file(plain_copy / WEIGHTS), plain_copy / "pytorch_model.bin")
    (plain_copy / WEIGHTS).unlink()
    assert "safetensors" in refusal(load_model, plain_copy)


def test_truncated_weights(plain_copy):
    content = (plain_copy / WEIGHTS).read_bytes()
    (plain_copy / WEIGHTS).write_bytes(content[: len(content) // 2])
    assert str(plain_copy) in refusal(load_model, plain_copy)


def test_incomplete_weights(plain_copy):
    tensors = load_file(plain_copy / WEIGHTS)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, plain_copy / WEIGHTS, metadata={"format": "pt"})
    assert "q_proj" in refusal(load_model, plain_copy)


def test_weights_of_another_shape(plain_copy):
    change(plain_copy / "config.json", intermediate_size=64)
    assert str(plain_copy) in refusal(load_model, plain_copy)


def test_unknown_code_is_not_executed(plain_copy):
    marker = plain_copy / "executed"
    (plain_copy / "model_code.py").write_text(f"open({str(marker)!r}, 'w')\n")
    reference = {"AutoConfig": "model_code.C", "AutoModelForCausalLM": "model_code.M"}
    change(plain_copy / "config.json", model_type="own-model", auto_map=reference)
    refusal(read_checkpoint, plain_copy)
    assert not marker.exists()


def put_config(path, config):
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize("max_window_layers", [0, 1])
def test_qwen2_with_a_sliding_window(plain_copy, max_window_layers):
    config = Qwen2Config(
        **CONFIG, use_sliding_window=True, sliding_window=16, max_window_layers=max_window_layers
    )
    message = refusal(read_checkpoint, put_config(plain_copy, config))
    assert "'qwen2'" in message
    assert "sliding_attention" in message


def test_qwen2_with_an_unused_window_is_read(plain_copy):
    config = Qwen2Config(**CONFIG, use_sliding_window=False, sliding_window=16)
    assert read_checkpoint(put_config(plain_copy, config)).config.model_type == "qwen2"


def test_mistral_with_a_sliding_window(plain_copy):
    sizes = {**CONFIG, "model_type": "mistral"}
    config = MistralConfig(**sizes, sliding_window=4096)
    message = refusal(read_checkpoint, put_config(plain_copy, config))
    assert "'mistral'" in message
    assert "sliding" in message


def test_mistral_without_a_window_is_read(plain_copy):
    sizes = {**CONFIG, "model_type": "mistral"}
    config = MistralConfig(**sizes, sliding_window=None)
    assert read_checkpoint(put_config(plain_copy, config)).config.model_type == "mistral"


@pytest.mark.parametrize(
    ("trait", "value"), [("final_logit_softcapping", 30.0), ("logits_scaling", 8.0)]
)
def test_rescaled_logits(plain_copy, trait, value):
    change(plain_copy / "config.json", **{trait: value})
    message = refusal(read_checkpoint, plain_copy)
    assert "'qwen2'" in message
    assert trait in message


def test_reading_a_checkpoint_imports_no_models(mars_path):
    """A server's command and its ingress read checkpoints, and start seconds earlier without."""
    code = (
        "import sys; from pathlib import Path\n"
        "from mars_platform.checkpoint.directory import read_checkpoint\n"
        "read_checkpoint(Path(sys.argv[1]))\n"
        "print(*sorted({'transformers.modeling_utils', 'torch._dynamo'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(mars_path)]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "\n"
