"""Families of models that the engine serves as transformers does or refuses by name, and types."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.engines import oracle, output_of, passes_of, run
from decoding.families import KNOWN, OTHERS, build_family, family_table
from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens, read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

DOCUMENT = Path(__file__).parents[3] / "docs" / "decoding.md"
FULL = ["full_attention"] * 2
SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))


def build_engine(model: PreTrainedModel, *, mask: int = 3, **options: Any) -> Engine:
    metadata = MarsMetadata(block_size=4, mask_token_id=mask)
    checkpoint = Checkpoint(None, model.config, None, metadata, SPECIAL)
    settings = EngineSettings(page_size=4, num_pages=100, max_num_seqs=3, max_num_batched_tokens=65)
    return Engine(checkpoint, settings, model=copy.deepcopy(model), **options)


def requests(**options: Any) -> list[Request]:
    prompts = [[4 + (7 * row + 5 * i) % 60 for i in range(4 + 33 * row)] for row in range(3)]
    return [
        make_request(str(row), prompt, 12, **(options or {"threshold": 0.1, "window": 4}))
        for row, prompt in enumerate(prompts)
    ]


def generated(model: PreTrainedModel, request: Request) -> list[int]:
    """The greedy output by transformers' own loop and cache."""
    ids = torch.tensor([request.tokens])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=request.options.max_tokens,
        suppress_tokens=sorted(SPECIAL.never_emitted),
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, request.num_prompt :].tolist()


@pytest.mark.parametrize(
    "family", [*KNOWN, *(pytest.param(family, marks=pytest.mark.full) for family in OTHERS)]
)
def test_a_family_is_served_as_transformers_generates(family: str) -> None:
    model = build_family(family)
    expected = [generated(model, request) for request in requests()]
    for mode in (Mode.AR, Mode.EXACT):
        served = requests(mode=mode)
        run(build_engine(model), served)
        assert [output_of(each) for each in served] == expected
    passes = passes_of(run(build_engine(model), requests()))
    for request in requests():
        assert passes[request.id] == oracle(model, request, SPECIAL)


def test_the_documentation_has_the_table_of_the_families() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    begin = lines.index(family_table()[0])
    table = [line for line in lines[begin:] if line.startswith("|")]
    assert table == family_table(), f"put the lines of family_table() into {DOCUMENT.name}"


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("bert", {"num_key_value_heads": 4}, "mask is neither causal nor of windows or chunks"),
        ("mamba", {}, "no layer calls transformers' attention interface"),
        ("bloom", {}, "no layer calls transformers' attention interface"),
        ("lfm2", {"layer_types": ["conv", *FULL[1:]]}, "something besides attention mixes"),
        ("deepseek_v2", {**LATENT, "v_head_dim": 8}, "keys and values of different sizes in "),
        ("deepseek_v3", {**LATENT, "v_head_dim": 8}, "keys and values of different sizes in "),
        ("glm4_moe_lite", {**LATENT, "v_head_dim": 8}, "keys and values of different sizes in "),
        (
            "gpt_oss",
            {"layer_types": FULL, "num_local_experts": 4},
            "attention sinks in layers 0, 1,",
        ),
        ("gemma2", {"layer_types": FULL}, "it has capped scores in layers 0, 1, which"),
        ("gemma3_text", {"sliding_window": 8}, "it has a sliding window in layers 0, 1, which"),
        ("phi3", {"sliding_window": 255}, "it has a sliding window in layers 0, 1, which"),
    ],
)
def test_other_families_are_refused_by_name(
    family: str, changes: dict[str, Any], words: str, dtype: torch.dtype
) -> None:
    model = build_model(family, pad_token_id=0, **changes).to(dtype)
    with pytest.raises(UserError, match=f"^model: .*'{family}'.*{words}"):
        build_engine(model)


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
