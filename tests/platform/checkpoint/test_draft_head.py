"""Draft heads: a new one changes nothing, files keep one, and damaged or odd files are refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from decoding.adapters import with_random_head, write_adapter
from decoding.tiny_models import build_model
from mars_platform.checkpoint.adapted import check_fit, load_weights, read_model
from mars_platform.checkpoint.adapter.draft_head import (
    DraftHead,
    attach_draft_head,
    draft_head_of,
    save_draft_head,
)
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.metadata import DRAFT_HEAD_FILE, DraftHeadSettings, MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_platform.errors import UserError
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import create_model

GATED, STATIC = DraftHeadSettings(rank=4), DraftHeadSettings(rank=4, kind="static")
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEXTS = ["Count a box of 12 apples", "There are 12 apples in the box."] * 5
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def plain_path(tmp_path_factory):
    """A plain AR checkpoint."""
    path = tmp_path_factory.mktemp("plain") / "model"
    create_model(ScratchModel(config=CONFIG, vocabulary_size=300), TEXTS, 64, path, seed=0)
    return path


@pytest.fixture(scope="module", params=[GATED, STATIC], ids=["gated", "static"])
def whole_path(request, plain_path, tmp_path_factory):
    """A whole MARS checkpoint with a draft head."""
    model, tokenizer = load_model(plain_path), AutoTokenizer.from_pretrained(plain_path)
    mask_id, _ = add_mask_token(model, tokenizer)
    with_random_head(model, request.param)
    path = tmp_path_factory.mktemp("whole") / "model"
    metadata = MarsMetadata(block_size=4, mask_token_id=mask_id, draft_head=request.param)
    save_checkpoint(path, model, tokenizer, metadata)
    return path


@pytest.fixture
def whole_copy(whole_path, tmp_path):
    return shutil.copytree(whole_path, tmp_path / "model")


@pytest.mark.parametrize("settings", [GATED, STATIC])
def test_a_new_head_adds_nothing(settings):
    head = DraftHead(settings, vocabulary_size=11, width=6)
    assert not head(torch.randn(3, 6), torch.tensor([1, 2, 3])).any()


@pytest.mark.parametrize(("settings", "reads_mask"), [(GATED, True), (STATIC, False)])
def test_what_a_head_depends_on(settings, reads_mask):
    head = draft_head_of(with_random_head(build_model("qwen2"), settings))
    vocabulary_size, width = len(head.following), 32
    hidden, previous = torch.randn(2, width), torch.tensor([1, 2])
    added = head(hidden, previous)
    assert added.shape == (2, vocabulary_size)
    assert not torch.allclose(added, head(hidden, previous + 1))
    assert torch.allclose(added, head(hidden + 1, previous)) is not reads_mask
    assert torch.allclose(added, head.features(hidden, previous) @ head.following.T)


def test_a_whole_checkpoint_keeps_its_head(whole_path):
    checkpoint = read_checkpoint(whole_path)
    model = load_weights(checkpoint, dtype=torch.float32)
    stored, head = load_file(whole_path / DRAFT_HEAD_FILE), draft_head_of(model)
    assert head.settings == checkpoint.metadata.draft_head
    assert {f"draft_head.{name}" for name, _ in head.named_parameters()} == stored.keys()
    assert all(torch.equal(stored[f"draft_head.{n}"], p) for n, p in head.named_parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert [file.name for file in whole_path.glob("*.safetensors")] == ["model.safetensors"]
    assert not any("draft_head" in key for key in load_file(whole_path / "model.safetensors"))
    assert torch.equal(model(IDS).logits, load_model(whole_path)(IDS).logits)
    check_fit(checkpoint)


def test_a_head_changes_the_fingerprint(whole_copy):
    before, file = weights_fingerprint(whole_copy), whole_copy / DRAFT_HEAD_FILE
    save_file({name: each + 1 for name, each in load_file(file).items()}, file)
    assert weights_fingerprint(whole_copy) != before


def test_an_adapter_keeps_its_head(plain_path, tmp_path):
    path = write_adapter(plain_path, tmp_path / "adapter")
    model = load_weights(read_model(plain_path, path), dtype=torch.float32)
    assert draft_head_of(model) is None
    with_random_head(model, GATED)
    save_draft_head(path, model)
    content = json.loads((path / "mars.json").read_text())
    (path / "mars.json").write_text(json.dumps({**content, "draft_head": GATED.model_dump()}))
    checkpoint = read_model(plain_path, path)
    check_fit(checkpoint)
    loaded = load_weights(checkpoint, dtype=torch.bfloat16)
    ours, theirs = draft_head_of(loaded).following, draft_head_of(model).following
    assert torch.equal(ours, theirs.bfloat16())


def nan_in(tensors):
    return {**tensors, "draft_head.following": tensors["draft_head.following"] * torch.nan}


def one_row_short(tensors):
    return {**tensors, "draft_head.previous": tensors["draft_head.previous"][1:].contiguous()}


def much_larger(tensors):
    return {**tensors, "more": torch.zeros(2**20)}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (nan_in, "draft_head.following in .* holds other numbers than finite ones of torch.float3"),
        (one_row_short, "draft_head.previous in .* has the shape .* and rank and model need"),
        (much_larger, "is larger than its settings allow"),
        (lambda tensors: {"draft_head.gate": tensors["draft_head.previous"]}, "lacks draft_head."),
        (lambda tensors: {**tensors, "more": torch.zeros(2)}, "holds more, contrary to the setti"),
    ],
)
def test_odd_weights_are_refused(whole_copy, change, problem):
    file = whole_copy / DRAFT_HEAD_FILE
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError, match=rf"^draft head: .*{problem}.*; copy all of the draft head"):
        load_weights(read_checkpoint(whole_copy), dtype=torch.float32)


@pytest.mark.parametrize("content", [None, b"", b"\xff" * 64], ids=["missing", "empty", "odd"])
def test_a_missing_or_damaged_file_is_refused_before_weights_are_loaded(whole_copy, content):
    file = whole_copy / DRAFT_HEAD_FILE
    file.unlink() if content is None else file.write_bytes(content)
    checkpoint = read_checkpoint(whole_copy)
    with pytest.raises(UserError, match=rf"^draft head: {file} cannot be read .*; copy all of the"):
        check_fit(checkpoint)


def test_weights_without_settings_are_refused(whole_copy):
    content = json.loads((whole_copy / "mars.json").read_text())
    del content["draft_head"]
    (whole_copy / "mars.json").write_text(json.dumps(content))
    file = whole_copy / DRAFT_HEAD_FILE
    with pytest.raises(UserError, match=rf"^draft head: {file} has no settings in mars.json"):
        load_weights(read_checkpoint(whole_copy), dtype=torch.float32)
    file.unlink()
    assert draft_head_of(load_weights(read_checkpoint(whole_copy), dtype=torch.float32)) is None


@pytest.mark.parametrize("settings", [None, STATIC])
def test_metadata_without_a_head_has_no_key_of_it(settings):
    """Older versions refuse keys that they do not know."""
    metadata = MarsMetadata(
        block_size=4, mask_token_id=3, provenance={"base": None}, draft_head=settings
    )
    content = json.loads(metadata.model_dump_json())
    assert content.get("draft_head") == (settings and settings.model_dump())
    assert ("draft_head" in content) is (settings is not None)
    assert content["provenance"] == {"base": None}
    assert MarsMetadata(**content) == metadata


def test_settings_of_a_head_are_checked(whole_copy):
    content = json.loads((whole_copy / "mars.json").read_text())
    content["draft_head"] = {"rank": 0, "kind": "gru"}
    (whole_copy / "mars.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"draft_head.rank: .*draft_head.kind: "):
        read_checkpoint(whole_copy)


def test_a_head_has_the_type_of_its_model():
    model = build_model("qwen2").bfloat16()
    assert attach_draft_head(model, GATED).gate.dtype == torch.bfloat16
