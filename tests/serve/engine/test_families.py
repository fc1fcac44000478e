"""Families of models that the engine serves as transformers does or refuses by name, and types."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import mars_platform.mixing.latent as latent_module
from decoding.engine_requests import make_request
from decoding.engines import oracle, output_of, paged_attention, passes_of, run
from decoding.families import HYBRIDS, KNOWN, MIXED, build_family
from decoding.tiny_models import build_model
from decoding.watched_engine import Watch, crowd
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens, read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.mixing.bind import AttentionCall
from mars_platform.mixing.probe import Probe
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.attention.mixed import MixedAttention
from mars_serve.engine.attention.selection import choose_attention
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.forward import Launched
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings
from routing import routed_experts

FULL = ["full_attention"] * 2
SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))


def build_engine(
    model: PreTrainedModel, *, mask: int = 3, sizes: dict[str, Any] | None = None, **options: Any
) -> Engine:
    metadata = MarsMetadata(block_size=4, mask_token_id=mask)
    checkpoint = Checkpoint(None, model.config, None, metadata, SPECIAL)
    limits = {"num_pages": 100, "max_num_seqs": 3, **(sizes or {})}
    settings = EngineSettings(page_size=4, max_num_batched_tokens=65, **limits)
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


SLOW = set(HYBRIDS) - {"lfm2", "nemotron_h", "qwen3_5_text"}
"""Families whose positions are compared in every run, and outputs in a full one alone."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.full] if each in SLOW else []) for each in KNOWN],
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


CROWDED = {"num_pages": 20, "max_num_seqs": 4, "num_lookup_drafts": 4}


QUICK = {
    *(("deepseek_v3", "batch-invariant"), ("gpt_oss", "batch-invariant")),
    *(("gemma4_text", "paged"), ("mimo_v2_flash", "paged"), ("qwen3_5_text", "paged")),
}


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param(
            *each, marks=[] if each[1] == "gathered" or each in QUICK else pytest.mark.full
        )
        for each in [
            *product(MIXED, ["gathered", "batch-invariant", "paged"]),
            *product(HYBRIDS, ["gathered", "paged"]),
        ]
    ],
)
def test_every_position_is_that_of_a_plain_pass(family: str, backend: str) -> None:
    model, sizes = build_family(family), {**CROWDED}
    options: dict[str, Any] = {"attention_of": paged_attention} if backend == "paged" else {}
    sizes["batch_invariant"] = backend == "batch-invariant"
    engine = build_engine(model, sizes=sizes, **options)
    watch = Watch(engine, model)
    run(engine, crowd(), at_once=6)
    assert watch.worst < (1e-3 if family in HYBRIDS else 1e-4)  # transformers' states are 2e-4 off
    status = engine.status()
    assert status.num_preemptions > 0
    assert status.num_prefix_hit_tokens > 0
    assert watch.num_positions > 300


def test_no_position_sees_what_was_given_back() -> None:
    """Without a prefix cache, all that is given back is poisoned."""
    model = build_family("gemma4_text")
    engine = build_engine(model, sizes={**CROWDED, "enable_prefix_caching": False})
    watch = Watch(engine, model)
    run(engine, crowd(), at_once=6)
    assert watch.worst < 1e-4


class Failing(Watch):
    """Also lets every third step of several rows fail, after it has written all that it writes."""

    def __init__(self, engine: Engine, model: PreTrainedModel) -> None:
        super().__init__(engine, model)
        self._launch, self.num_failures, self._num_steps = engine._runner.launch, 0, 0
        engine._runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, rows: Sequence[ScheduledRow]) -> Launched:
        self.rows = rows
        return self._launch(rows)

    def __call__(self, *given: Any, **options: Any) -> Tensor:
        hidden = super().__call__(*given, **options)
        self._num_steps += 1
        if len(self.rows) > 1 and self._num_steps % 3 == 0:
            self.num_failures += 1
            raise RuntimeError("this step fails")
        return hidden


def test_steps_that_failed_leave_states_as_they_were() -> None:
    model = build_family("qwen3_5_text")
    watch = Failing(build_engine(model, sizes={**CROWDED}), model)
    run(watch.engine, crowd(), at_once=6)
    assert watch.num_failures > 10
    assert watch.worst < 1e-3


class Routes(Watch):
    """Also notes the experts of each committed token in each layer."""

    def __init__(self, engine: Engine, model: PreTrainedModel, chosen: list[Tensor]) -> None:
        super().__init__(engine, model)
        self.experts, self.num_masks = dict[tuple[str, int], list[list[int]]](), 0
        self._chosen = chosen

    def __call__(self, ids: Tensor, *rest: Any, **options: Any) -> Tensor:
        self._chosen.clear()
        hidden = super().__call__(ids, *rest, **options)
        layers, begin = torch.stack(self._chosen, dim=1), 0
        for row in self.rows:
            for offset in range(row.num_tokens):
                place = row.request.id, row.request.num_cached + offset
                self.experts[place] = layers[begin + offset].tolist()
            begin += row.num_positions
            self.num_masks += row.num_masks
        return hidden


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_masks_change_no_tokens_experts(family: str) -> None:
    model, noted = build_family(family), list[Routes]()
    for mode in (Mode.AR, Mode.EXACT):
        engine = build_engine(model)
        with routed_experts(engine._runner.model) as chosen:
            noted.append(Routes(engine, model, chosen))
            run(engine, requests(mode=mode))
    alone, beside = noted
    assert (alone.num_masks, beside.num_masks > 50) == (0, True)
    assert len(beside.experts) > 100
    assert all(alone.experts[place] == experts for place, experts in beside.experts.items())
    assert max(alone.worst, beside.worst) < 1e-4


def without_rope(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    key = torch.cat([latent, torch.zeros_like(rotated)], dim=-1)
    return key, latent


def late(_: LayerGroup, positions: Any) -> Any:
    return np.maximum(positions - 6, 0)


def early(_: LayerGroup, positions: Any) -> Any:
    return np.maximum(positions - 8, 0)


@pytest.mark.parametrize("attention_of", [choose_attention, paged_attention])
@pytest.mark.parametrize(
    ("family", "mutant"),
    [
        ("mistral", (LayerGroup, "oldest", late)),
        ("mistral", (LayerGroup, "oldest", early)),
        ("gpt_oss", (AttentionCall, "sinks", None)),
        ("gemma2", (AttentionCall, "softcap", None)),
        ("llama4_text", (AttentionCall, "temperature", None)),
        ("deepseek_v3", (latent_module, "_unexpanded", without_rope)),
    ],
)
def test_an_engine_that_attends_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, family: str, mutant: Any, attention_of: Any
) -> None:
    model = build_family(family)
    probe = Probe.of(copy.deepcopy(model), avoided={0, 3})
    monkeypatch.setattr(Probe, "of", lambda *_, **__: probe)
    monkeypatch.setattr(*mutant)
    with pytest.raises(UserError, match="its logits over pages differ from those of transformers"):
        build_engine(model, attention_of=attention_of)


def test_layers_that_share_keys_hold_no_pages() -> None:
    engine = build_engine(build_family("gemma4_text"))
    assert isinstance(engine.attention, MixedAttention)
    assert [len(each.keys) for each in engine.attention.backends] == [1, 1]
    assert engine.token_elements == 2 * 2 * 8 + 2 * 2 * 16


@pytest.mark.parametrize("attention_of", [choose_attention, paged_attention])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_a_token_of_latent_attention_caches_its_latent_alone(
    family: str, attention_of: Any
) -> None:
    engine = build_engine(build_family(family), attention_of=attention_of)
    assert engine.token_elements == 2 * (16 + 8)
    keys, values = engine.attention.keys, engine.attention.values
    assert keys.data_ptr() == values.data_ptr()
    num_pages = keys.shape[1]
    assert engine.num_pages < num_pages <= engine.num_pages + 2
    assert keys.untyped_storage().nbytes() == num_pages * 4 * 4 * engine.token_elements


def test_many_layers_of_latent_attention_may_round() -> None:
    """In bfloat16, absorbed matrices round otherwise than expanded keys and values do.

    Where experts are chosen among so many random layers, transformers' own logits are beyond this.
    """
    model = build_family("deepseek_v3", num_hidden_layers=40, first_k_dense_replace=40)
    build_engine(model.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("bert", {"num_key_value_heads": 4}, "mask is neither causal nor of windows or chunks"),
        ("mamba", {}, "no layer calls transformers' attention interface"),
        ("bloom", {}, "no layer calls transformers' attention interface"),
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
    """The first tokens are transformers', but for near-ties."""
    model = build_model().to(dtype)
    engine = build_engine(copy.deepcopy(model))
    assert engine.attention.keys.dtype == dtype
    passes = passes_of(run(engine, requests()))
    for request in requests():
        logits = model(input_ids=torch.tensor([request.tokens])).logits[0, -1].float()
        logits[sorted(SPECIAL.never_emitted)] = -torch.inf
        assert logits[passes[request.id][0][0]] > logits.max() - 0.07  # four steps of bfloat16
        assert sum(map(len, passes[request.id])) == 12


def test_a_checkpoint_is_loaded_in_a_narrow_type(mars_dir: Path) -> None:
    engine = Engine(read_checkpoint(mars_dir), EngineSettings(num_pages=20), dtype=torch.bfloat16)
    request = make_request("one", [5, 6, 7], 8, threshold=0.1)
    run(engine, [request])
    assert 1 <= request.num_output <= 8
