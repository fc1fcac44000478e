"""Families of models that the engine serves unchanged or refuses by name, and their types."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.engines import oracle, passes_of, run
from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens, read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.errors import UserError
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))


def build_engine(model: PreTrainedModel, *, mask: int = 3, **options: Any) -> Engine:
    metadata = MarsMetadata(block_size=4, mask_token_id=mask)
    checkpoint = Checkpoint(None, model.config, None, metadata, SPECIAL)
    settings = EngineSettings(page_size=4, num_pages=100, max_num_seqs=3, max_num_batched_tokens=65)
    return Engine(checkpoint, settings, model=copy.deepcopy(model), **options)


def requests() -> list[Request]:
    prompts = [[4 + (7 * row + 5 * i) % 60 for i in range(4 + 33 * row)] for row in range(3)]
    return [
        make_request(str(row), prompt, 12, threshold=0.1, window=4)
        for row, prompt in enumerate(prompts)
    ]


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
    model = build_model(family, pad_token_id=0, **changes)
    passes = passes_of(run(build_engine(model), requests()))
    for request in requests():
        assert passes[request.id] == oracle(model, request, SPECIAL)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [("bert", {}, "'bert', whose attention is not causal"), ("mamba", {}, "cannot be replaced")],
)
def test_other_families_are_refused_by_name(
    family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=f"^model: .*{words}"):
        build_engine(build_model(family, pad_token_id=0, **changes))


def test_a_mask_without_an_embedding_is_refused() -> None:
    with pytest.raises(UserError, match=r"^mars.json: mask_token_id is 64, .* 64 embeddings"):
        build_engine(build_model(), mask=64)


def test_angles_of_longrope_do_not_depend_on_other_rows() -> None:
    """Transformers itself takes the long angles for all rows as soon as one is long."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = build_model("llama", rope_parameters=rope)
    together = passes_of(run(build_engine(model), requests()))
    for request in requests():
        alone = passes_of(run(build_engine(model), [request]))
        assert together[request.id] == alone[request.id]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_runs_in_a_narrow_type(dtype: torch.dtype) -> None:
    """The first tokens are the oracle's; later ones may part at near-ties."""
    model = build_model().to(dtype)
    engine = build_engine(model)
    assert engine.attention.keys.dtype == dtype
    passes = passes_of(run(engine, requests()))
    for request in requests():
        assert passes[request.id][0][0] == oracle(model, request, SPECIAL)[0][0]
        assert sum(map(len, passes[request.id])) == 12


def test_a_checkpoint_is_loaded_in_a_narrow_type(mars_dir: Path) -> None:
    engine = Engine(read_checkpoint(mars_dir), EngineSettings(num_pages=20), dtype=torch.bfloat16)
    request = make_request("one", [5, 6, 7], 8, threshold=0.1)
    run(engine, [request])
    assert 1 <= request.num_output <= 8
