"""Which models the engine serves, unchanged, and which it refuses by name; and in which types."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mars_platform.checkpoint.directory import (
    Checkpoint,
    MarsMetadata,
    SpecialTokens,
    read_checkpoint,
)
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def build(family: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def build_engine(model: PreTrainedModel, *, mask: int = 3, **options: Any) -> Engine:
    metadata = MarsMetadata(block_size=4, mask_token_id=mask)
    checkpoint = Checkpoint(None, model.config, None, metadata, SPECIAL)
    settings = EngineSettings(page_size=4, num_pages=100, max_num_seqs=3, max_num_batched_tokens=65)
    return Engine(checkpoint, settings, model=copy.deepcopy(model), **options)


def requests() -> list[Request]:
    options = DecodingOptions(12, threshold=0.1, window=4)
    return [
        Request(str(row), [4 + (7 * row + 5 * i) % 60 for i in range(4 + 33 * row)], options)
        for row in range(3)
    ]


def run(engine: Engine) -> dict[str, list[list[int]]]:
    passes: dict[str, list[list[int]]] = {}
    for request in requests():
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            passes.setdefault(output.request_id, []).append(output.tokens)
    engine.check_integrity()
    return passes


def oracle(model: PreTrainedModel, request: Request) -> list[list[int]]:
    return reference.decode(
        model, request.tokens, SPECIAL, max_tokens=12, threshold=0.1, num_masks=4, mask_token_id=3
    ).passes


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("olmo2", {}),
        ("phi3", {"sliding_window": None}),
        ("starcoder2", {"sliding_window": None}),
        ("gpt_neox", {"num_key_value_heads": 4}),
        ("gpt2", {"num_key_value_heads": 4}),
        ("smollm3", {}),
    ],
)
def test_further_decoders_are_served_unchanged(family: str, changes: dict[str, Any]) -> None:
    model = build(family, **changes)
    passes = run(build_engine(model))
    for request in requests():
        assert passes[request.id] == oracle(model, request)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [("bert", {}, "'bert', whose attention is not causal"), ("mamba", {}, "cannot be replaced")],
)
def test_others_are_refused_by_name(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^model: .*{words}"):
        build_engine(build(family, **changes))


def test_a_mask_without_an_embedding_is_refused() -> None:
    with pytest.raises(UserError, match=r"^mars.json: mask_token_id is 64, .* 64 embeddings"):
        build_engine(build("qwen2"), mask=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    """The first tokens are the oracle's; later ones may part at near-ties."""
    model = build("qwen2").to(dtype)
    engine = build_engine(model)
    passes = run(engine)
    assert engine._attention.keys.dtype == dtype
    for request in requests():
        assert passes[request.id][0][0] == oracle(model, request)[0][0]
        assert sum(map(len, passes[request.id])) == 12


def test_a_checkpoint_is_loaded_in_a_narrow_type(mars_dir: Path) -> None:
    engine = Engine(read_checkpoint(mars_dir), EngineSettings(num_pages=20), dtype=torch.bfloat16)
    engine.add(Request("one", [5, 6, 7], DecodingOptions(8, threshold=0.1)))
    tokens = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.tokens]
    assert 1 <= len(tokens) <= 8
