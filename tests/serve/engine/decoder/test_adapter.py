"""An adapter in every engine: it acts at masks alone, and the base model's output stays its own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoding.adapters import with_adapter, write_adapter
from decoding.engines import Engines, oracle, paged_attention, passes_of, run
from decoding.families import build_family
from decoding.tiny_models import build_model
from mars_platform.checkpoint.adapted import load_weights, read_model
from mars_platform.checkpoint.adapter.layers import GatedLinear
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method.mode import Mode
from mars_serve.engine.batch import bucket
from mars_serve.engine.decoder.adapter import FixedLinear, RowsLinear
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.graphs import GraphSizes
from mars_serve.engine.execution.linear import pack_linears
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

SPECIAL = SpecialTokens(eos=frozenset({1}), never_emitted=frozenset({0, 3}))
COMMON = [5, 6, 9, 15, 16, 18]
KINDS: dict[str, dict[str, Any]] = {
    "gathered": {},
    "invariant": {"batch_invariant": True},
    "paged": {"engine_class": partial(Engine, attention_of=paged_attention)},
    "graphs": {"engine_class": partial(Engine, attention_of=paged_attention)},
}
OPTIONS = {
    "ar": DecodingOptions(14, Mode.AR, num_logprobs=2),
    "threshold": DecodingOptions(14, threshold=0.06, window=4),
    "exact all": DecodingOptions(14, Mode.EXACT, outcomes=Outcomes.ALL, window=3),
    "half": DecodingOptions(14, threshold=0.1, window=2),
    "exact last": DecodingOptions(14, Mode.EXACT, outcomes=Outcomes.LAST),
    "exact without masks": DecodingOptions(14, Mode.EXACT, window=0),
}


def make_base(family: str = "qwen2", **changes: Any) -> PreTrainedModel:
    """A model with outputs of few tokens: masks guess some of them right."""
    model = build_model(family, vocab_size=32, initializer_range=0.4, **changes)
    with torch.no_grad():
        model.lm_head.weight[COMMON] *= 3
    return model


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    return make_base()


@pytest.fixture(autouse=True)
def _same_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack every layer, whatever is faster: two engines have to compute alike, bit for bit."""

    def pack(model: PreTrainedModel, *_: object, timed: bool) -> None:
        pack_linears(model, timed=False)

    monkeypatch.setattr("mars_serve.engine.execution.forward.pack_linears", pack)


@pytest.fixture
def engine_of(make_engine: Engines) -> Callable[..., Engine]:
    def make(model: PreTrainedModel, kind: str, **changes: int) -> Engine:
        sizes = {"num_pages": 36, "max_num_seqs": 6, **KINDS[kind], **changes}
        engine = make_engine(model, SPECIAL, **sizes)
        if kind == "graphs":
            engine.capture_graphs(lambda function: function)
        return engine

    return make


def requests_of(kinds: dict[str, DecodingOptions] = OPTIONS, count: int = 18) -> list[Request]:
    source = random.Random(0)
    stem = [source.randrange(4, 32) for _ in range(12)]
    names = list(kinds)
    requests = []
    for index in range(count):
        tail = [source.randrange(4, 32) for _ in range(source.randint(1, 20))]
        options = kinds[names[index % len(names)]]
        requests.append(Request(f"{index}", [*stem[: 4 * (index % 4)], *tail], options))
    return requests


def check_requests(engine: Engine, adapted: PreTrainedModel, requests: list[Request]) -> int:
    """Compare all outputs with the plain decoder's; return the passes of several tokens."""
    passes = passes_of(run(engine, requests))
    special, mask = engine.checkpoint.special, engine.checkpoint.metadata.mask_token_id
    several = 0
    for request in requests:
        options, own = request.options, passes[request.id]
        if options.mode is Mode.THRESHOLD:
            expected = oracle(adapted, request, special, num_masks=options.window, mask=mask)
            assert own == expected
        else:
            single = Request(request.id, request.tokens[: request.num_prompt], OPTIONS["ar"])
            expected = oracle(adapted, single, special)
            assert [[token] for tokens in own for token in tokens] == expected
        several += sum(len(tokens) > 1 for tokens in own)
    return several


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=[] if (i + j) % 2 else pytest.mark.full)
        for i, family in enumerate(
            ["deepseek_v3", "gemma4_text", "gpt_oss", "gptj", "qwen3_5_text"]
        )
        for j, kind in enumerate(["gathered", "graphs"])
    ],
)
def test_an_adapter_acts_in_layers_that_attend_in_different_ways(
    engine_of: Callable[..., Engine], family: str, kind: str
) -> None:
    adapted = with_adapter(build_family(family, vocab_size=32, initializer_range=0.4))
    check_requests(engine_of(adapted, kind), adapted, requests_of(count=8))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_the_plain_decoders_among_others_and_preempted(
    engine_of: Callable[..., Engine], base: PreTrainedModel, kind: str
) -> None:
    adapted = with_adapter(base)
    engine = engine_of(adapted, kind)
    assert check_requests(engine, adapted, requests_of()) > 5
    assert check_requests(engine, adapted, requests_of()) > 5  # with cached prefixes
    assert engine.status().num_preemptions > 0
    assert engine.status().num_prefix_hit_tokens > 0


@pytest.mark.parametrize("kind", ["gathered", "paged"])
def test_a_mask_past_the_vocabulary_is_a_token_of_the_adapter_alone(
    full_dir: Path, tmp_path: Path, kind: str
) -> None:
    checkpoint = read_model(full_dir, write_adapter(full_dir, tmp_path / "adapter"))
    assert checkpoint.metadata is not None
    assert checkpoint.metadata.mask_token_id == checkpoint.config.vocab_size
    adapted = load_weights(checkpoint, dtype=torch.float32)
    engine_class = KINDS[kind].get("engine_class", Engine)
    settings = EngineSettings(page_size=4, num_pages=60, max_num_seqs=6)
    engine = engine_class(checkpoint, settings, model=copy.deepcopy(adapted))
    check_requests(engine, adapted, requests_of(count=6))


@pytest.mark.parametrize("kind", KINDS)
def test_mode_ar_is_the_base_models_bit_for_bit(
    engine_of: Callable[..., Engine], base: PreTrainedModel, kind: str
) -> None:
    found = []
    for model in (base, with_adapter(base)):
        requests = requests_of({"ar": OPTIONS["ar"]}, 9)
        outputs = run(engine_of(model, kind), requests)
        found.append({name: [each.logprobs for each in own] for name, own in outputs.items()})
    assert found[0] == found[1]
    assert sum(map(len, found[0].values())) > 60


def test_beside_masks_a_batch_invariant_engine_keeps_every_bit_of_the_base_model(
    engine_of: Callable[..., Engine], base: PreTrainedModel
) -> None:
    alone = run(engine_of(base, "invariant"), requests_of({"ar": OPTIONS["ar"]}))
    mixed = run(engine_of(with_adapter(base), "invariant"), requests_of())
    for name in [each.id for each in requests_of() if each.options.mode is Mode.AR]:
        assert [each.logprobs for each in mixed[name]] == [each.logprobs for each in alone[name]]


def test_the_adapter_changes_what_masks_propose(
    engine_of: Callable[..., Engine], base: PreTrainedModel
) -> None:
    """Else all other tests would pass without one."""
    kinds = {"threshold": OPTIONS["threshold"]}
    passes = [
        passes_of(run(engine_of(model, "paged"), requests_of(kinds)))
        for model in (base, with_adapter(base))
    ]
    assert passes[0] != passes[1]


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["q_proj", "v_proj"]),
        ("mistral", ["up_proj"]),
        ("qwen3", ["o_proj", "down_proj"]),
    ],
)
def test_any_targets_are_adapted(
    engine_of: Callable[..., Engine], family: str, names: list[str]
) -> None:
    model = make_base(family, **({"sliding_window": None} if family == "mistral" else {}))
    adapted = with_adapter(model, target_modules=names, rank=3, std=0.6)
    engine = engine_of(adapted, "paged")
    assert check_requests(engine, adapted, requests_of(count=6)) > 0


def test_steps_without_masks_skip_the_adapter(
    engine_of: Callable[..., Engine], base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(with_adapter(base), "graphs")
    calls = list[int]()
    monkeypatch.setattr(
        "mars_serve.engine.decoder.adapter.add_low_rank", lambda *_: calls.append(1)
    )
    run(engine, requests_of({"ar": OPTIONS["ar"]}, 5))
    ar_calls = len(calls)
    run(engine, requests_of({"threshold": OPTIONS["threshold"]}, 2))
    assert ar_calls <= 14 * 3  # prompts in steps too long for a shape without the adapter
    assert len(calls) > ar_calls


def test_only_steps_of_one_position_a_row_have_a_shape_without_the_adapter() -> None:
    shapes = GraphSizes(4, 3, 40, max_pages=8, has_adapter=True).shapes()
    positions = {
        is_adapted: {each.step.num_positions for each in shapes if each.is_adapted is is_adapted}
        for is_adapted in (True, False)
    }
    assert positions[False] == {
        count for count in range(1, bucket(4) + 1) if bucket(count) == count
    }
    assert positions[True] - positions[False]
    assert positions[False] - positions[True] == {1}
    assert len(set(shapes)) == len(shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eager_step_on_a_cpu_adds_the_product_of_the_mask_rows_in_float32(
    engine_of: Callable[..., Engine], base: PreTrainedModel, dtype: torch.dtype
) -> None:
    adapted = with_adapter(base).to(dtype)
    runner = engine_of(adapted, "gathered")._runner
    picked = [each for each in runner.model.modules() if isinstance(each, RowsLinear)]
    gated = [each for each in adapted.modules() if isinstance(each, GatedLinear)]
    assert len(picked) == len(gated) == 2 * 7
    for layer, own in zip(picked, gated, strict=True):
        inputs = torch.randn(5, own.base_layer.in_features).to(dtype)
        runner.adapters.set(torch.tensor([5, 3, 6, 3, 7]), None)
        low = inputs[[1, 3]].float() @ own.lora_A.weight.float().t()
        added = (own.scale * low @ own.lora_B.weight.float().t()).to(dtype)
        with torch.inference_mode():
            alone, found = layer.base_layer(inputs), layer(inputs)
        assert torch.equal(found[[0, 2, 4]], alone[[0, 2, 4]])
        torch.testing.assert_close(found[[1, 3]], alone[[1, 3]] + added)


def test_bfloat16_computes_the_product_in_bfloat16(
    engine_of: Callable[..., Engine], base: PreTrainedModel
) -> None:
    adapted = with_adapter(base).to(torch.bfloat16)
    engine = engine_of(adapted, "paged")
    run(engine, requests_of())
    layers = [each for each in engine._runner.model.modules() if isinstance(each, FixedLinear)]
    assert {each.up.dtype for each in layers} == {torch.bfloat16}
    assert len(layers) == 2 * 7
