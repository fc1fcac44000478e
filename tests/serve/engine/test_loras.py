"""Several LoRA adapters in one engine: each request's output is that of its merged model alone."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoding.adapters import with_adapter, with_lora
from decoding.engines import Engines, oracle, paged_attention, passes_of, run
from decoding.families import build_family
from decoding.tiny_models import build_model
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.adapter.lora import read_lora
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.decoder.adapter import bytes_of_slot
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.engine.lora_cache import read_weights
from mars_serve.engine.request import LoraReference, Request
from mars_serve.engine.scheduled_row import ScheduledRow

SPECIAL = SpecialTokens(eos=frozenset({1}), never_emitted=frozenset({0, 3}))
KINDS: dict[str, dict[str, Any]] = {
    "gathered": {},
    "graphs": {"engine_class": partial(Engine, attention_of=paged_attention)},
}
OPTIONS = [
    DecodingOptions(10, Mode.AR),
    DecodingOptions(10, threshold=0.06, window=4),
    DecodingOptions(10, Mode.EXACT, outcomes=Outcomes.ALL, window=3),
    DecodingOptions(10, Mode.EXACT),
]
FLAT = StepTimes((1, 256), (0,), ((10.0,), (20.0,)))


@dataclass(frozen=True)
class Served:
    """A model that requests name, and what its outputs have to be."""

    merged: PreTrainedModel
    """The model with its adapters merged, for the plain decoder."""
    parts: dict[str, Any]
    """Fields of its requests."""


def serve(name: str, path: Path, merged: PreTrainedModel, **parts: Any) -> Served:
    return Served(merged, {"lora": LoraReference.to(name, path), **parts})


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    model = build_model("qwen2", vocab_size=32, initializer_range=0.4)
    with torch.no_grad():
        model.lm_head.weight[[5, 6, 9, 15, 16, 18]] *= 3
    return model


@pytest.fixture(scope="module")
def models(base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    """A base with a draft adapter, two LoRA adapters on it, and one that drafts by itself."""
    path = tmp_path_factory.mktemp("loras")
    one = with_lora(base, path / "one", seed=1)
    two = with_lora(base, path / "two", rank=2, target_modules=["k_proj", "gate_proj"], seed=2)
    own = with_lora(base, path / "own", rank=3, seed=3)
    row = torch.randn(own.config.hidden_size, generator=torch.Generator().manual_seed(4))
    weights = replace(read_lora(path / "own").weights(base), mask_row=row)
    with torch.no_grad():
        own.get_input_embeddings().weight[3] = row
    return [
        Served(with_adapter(base), {}),
        serve("one", path / "one", with_adapter(one)),
        serve("two", path / "two", with_adapter(two)),
        serve("own", path / "own", own, lora_weights=weights),
    ]


@pytest.fixture
def engine_of(make_engine: Engines) -> Callable[..., Engine]:
    def make(model: PreTrainedModel, kind: str, **changes: Any) -> Engine:
        sizes = {"num_pages": 20, "max_num_seqs": 6, "max_loras": 2, "max_lora_rank": 4}
        engine = make_engine(model, SPECIAL, **{**sizes, **KINDS[kind], **changes})
        engine.adapt_windows(FLAT)
        if kind == "graphs":
            engine.capture_graphs(lambda function: function)
        return engine

    return make


def requests_of(models: list[Served], count: int) -> dict[Request, Served]:
    """Requests to all models in turn, whose prompts begin alike whatever the model."""
    source = random.Random(0)
    stem = [source.randrange(4, 32) for _ in range(12)]
    requests = {}
    for index in range(count):
        served = models[index % len(models)]
        tail = [source.randrange(4, 32) for _ in range(source.randint(1, 9))]
        options = OPTIONS[index // len(models) % len(OPTIONS)]
        request = Request(f"{index}", [*stem, *tail], options, **served.parts)
        requests[request] = served
    return requests


def check(engine: Engine, requests: dict[Request, Served]) -> None:
    """Compare all outputs, in mode threshold pass by pass, with the plain decoder's."""
    passes = passes_of(run(engine, requests))
    for request, served in requests.items():
        options, own = request.options, passes[request.id]
        if options.mode is not Mode.THRESHOLD:
            own = [[token] for tokens in own for token in tokens]
        assert own == oracle(served.merged, request, SPECIAL, num_masks=options.window or 0), (
            request.id,
            options.mode,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_several_adapters_in_one_batch_gives_its_merged_models_output(
    engine_of: Callable[..., Engine], models: list[Served], kind: str
) -> None:
    """Fewer slots than adapters and fewer pages than tokens: adapters and requests are evicted."""
    engine = engine_of(models[0].merged, kind)
    steps, chosen = list[set[int]](), set[tuple[int, bool]]()

    def note(rows: Sequence[ScheduledRow]) -> None:
        steps.append({row.request.lora_slot for row in rows})
        chosen.update(
            (row.request.lora_slot, row.num_drafts > 0)
            for row in rows
            if row.request.plan.leaves_masks and row.request.plan.checks_drafts
        )

    engine.on_launch = note
    check(engine, requests_of(models, 16))
    before = engine.status().num_prefix_hit_tokens
    check(engine, requests_of(models, 16))
    assert {-1, 0, 1} in steps
    assert {(-1, True), (0, True), (1, True)} <= chosen
    assert engine.status().num_prefix_hit_tokens > before
    assert engine.status().num_preemptions > 0
    slots = engine._memory.loras
    assert slots is not None
    assert slots.num_loads > 3
    taken = sum(
        each.down.nbytes + each.up.nbytes for each in engine._runner.adapters.layers.values()
    )
    assert taken == 2 * bytes_of_slot(models[0].merged, 4)


def test_layers_of_every_kind_add_products(make_engine: Engines, tmp_path: Path) -> None:
    """Recurrent layers, whose prefixes are snapshots of states, and latent attention."""
    for family, names in {
        "qwen3_5_text": ["q_proj", "in_proj_qkv", "out_proj", "down_proj"],
        "deepseek_v3": ["q_proj", "kv_a_proj_with_mqa", "o_proj"],
    }.items():
        base = build_family(family, vocab_size=32, initializer_range=0.4)
        path = tmp_path / family
        merged = with_lora(base, path, target_modules=names)
        models = [Served(base, {}), serve("one", path, merged)]
        for kind in list(KINDS.values())[: 2 - (family == "deepseek_v3")]:
            engine = make_engine(base, SPECIAL, num_pages=40, max_loras=1, **kind)
            check(engine, requests_of(models, 6))
            check(engine, requests_of(models, 4))
            assert engine.status().num_prefix_hit_tokens > 0


def test_cancelled_requests_give_their_slot_back_and_no_adapter_waits_for_good(
    engine_of: Callable[..., Engine], models: list[Served]
) -> None:
    """While two adapters always have requests, a third comes to its turn."""
    engine = engine_of(models[0].merged, "gathered", num_pages=90)
    one, two, own = (served.parts for served in models[1:])
    for index in range(40):
        hot = (one, two)[index % 2]
        engine.add(Request(f"{index}", [5, 6, 7], DecodingOptions(6, Mode.AR), **hot))
    late = Request("late", [5, 6, 7], DecodingOptions(2, Mode.AR), **own)
    engine.add(late)
    for index in range(40, 80):
        hot = (one, two)[index % 2]
        engine.add(Request(f"{index}", [5, 6, 7], DecodingOptions(6, Mode.AR), **hot))
    engine.step()
    for name in ("0", "1", "79"):
        engine.cancel(name)
    engine.check_integrity()
    while late.finish_reason is None:
        engine.step()
        engine.check_integrity()
    assert engine.status().num_requests > 30
    while engine.has_work:
        engine.step()


def test_an_adapter_that_cannot_be_served_is_refused_aloud(
    engine_of: Callable[..., Engine], base: PreTrainedModel, tmp_path: Path
) -> None:
    engine = engine_of(base, "gathered")
    with_lora(base, tmp_path / "good")
    with_lora(base, tmp_path / "high", rank=5)
    with_lora(build_model("qwen2", vocab_size=32, hidden_size=16), tmp_path / "narrow")
    with_lora(build_model("gptj", vocab_size=32), tmp_path / "other", target_modules=["fc_in"])
    shutil.copytree(tmp_path / "good", tmp_path / "large")
    os.truncate(tmp_path / "large" / "adapter_model.safetensors", 1 << 25)
    cases = {
        "has rank 5, more than the 4 .*engine.max_lora_rank": "high",
        "has the shape .*model need": "narrow",
        "fc_in.* is for no layer": "other",
        "have 33,55.,... bytes, and .* of rank 4 for this model has 16,793,600 at most": "large",
        "holds no file adapter_config.json": "absent",
    }
    for message, name in cases.items():
        with pytest.raises(UserError, match=message):
            read_weights("a", tmp_path / name, engine.checkpoint, engine.settings)
    for name in (*cases.values(), "good"):
        reference = LoraReference("a", str(tmp_path / name), sum="another")
        with pytest.raises(UserError, match="cannot be used where the model runs"):
            engine.add(Request("a", [5], DecodingOptions(1), lora=reference))
    assert not engine.has_work
    without = engine_of(base, "gathered", max_loras=0)
    request = Request("a", [5], DecodingOptions(1), lora=LoraReference.to("a", tmp_path / "good"))
    with pytest.raises(UserError, match=r"no slots for LoRA adapters; set engine\.max_loras"):
        without.add(request)
    with pytest.raises(UserError, match="batch_invariant: the products of LoRA"):
        engine_of(base, "gathered", batch_invariant=True)
