"""A request's numbers among others and alone: equal tokens, and equal bits if batch-invariant."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding.families import build_family
from decoding.tiny_models import build_model
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine.decoding_options import DecodingOptions, Outcomes, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.execution.linear import TiledLinear
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3}))
OPTIONS = {
    "half": DecodingOptions(24, threshold=0.05, window=4),
    "ar": DecodingOptions(24, Mode.AR),
    "entropy": DecodingOptions(24, threshold=0.0037, confidence=Confidence.ENTROPY, window=3),
    "margin": DecodingOptions(24, threshold=0.02, confidence=Confidence.MARGIN, window=2),
    "sampled": DecodingOptions(
        24, threshold=0.05, window=3, sampling=Sampling(0.8, top_p=0.9, seed=7)
    ),
}
"""Options by name, with thresholds that random weights of this size sometimes reach."""
EXACT = {
    "all": DecodingOptions(24, Mode.EXACT, outcomes=Outcomes.ALL, window=4),
    "last": DecodingOptions(24, Mode.EXACT, outcomes=Outcomes.LAST, window=3),
    "sampled": DecodingOptions(
        24, Mode.EXACT, outcomes=Outcomes.ALL, window=2, sampling=Sampling(1.2, top_k=9, seed=2)
    ),
}

Result = tuple[list[StepOutput], Tensor]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """A model so wide that matrix products take different paths for different numbers of rows."""
    return build_model(
        vocab_size=500,
        hidden_size=192,
        intermediate_size=512,
        num_attention_heads=6,
        max_position_embeddings=512,
        initializer_range=0.15,
    )


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, 500) for _ in range(length)]


def named(kinds: dict[str, DecodingOptions] = OPTIONS) -> list[Request]:
    return [
        Request(name, prompt(20 + 37 * (index % 4), index), options)
        for index, (name, options) in enumerate(kinds.items())
    ]


def company() -> list[Request]:
    options = replace(OPTIONS["half"], max_tokens=15)
    return [Request(f"other {i}", prompt(3 + 29 * i, 50 + i), options) for i in range(5)]


def run(engine: Engine, requests: list[Request], *, gap: int = 0) -> dict[str, Result]:
    """Return each request's outputs, and its cached keys as of its last pass but one."""
    outputs: dict[str, list[StepOutput]] = {request.id: [] for request in requests}
    keys: dict[str, Tensor] = {}
    waiting, step = list(requests), 0
    while waiting or engine.has_work:
        if waiting and (gap == 0 or step % gap == 0):
            engine.add(waiting.pop(0))
        step += 1
        for output in engine.step():
            outputs[output.request_id].append(output)
        for request in (request for request in requests if request.pages):
            own = engine.attention.keys[:, request.pages].transpose(2, 3).flatten(1, 2)
            keys[request.id] = own[:, : request.num_cached].clone()
    return {request.id: (outputs[request.id], keys[request.id]) for request in requests}


def assert_same_bits(one: Result, other: Result) -> None:
    assert one[0] == other[0]  # tokens, windows and confidences
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_request_gives_the_same_tokens_among_others_and_alone(
    model: PreTrainedModel, make_engine: Callable[..., Engine], batch_invariant: bool
) -> None:
    sizes = {"num_pages": 400, "max_num_seqs": 9, "batch_invariant": batch_invariant}
    requests = [r for pair in zip_longest(named(), company()) for r in pair if r is not None]
    together = run(make_engine(model, SPECIAL, **sizes), requests, gap=2)
    for request in named():
        alone = run(make_engine(model, SPECIAL, **sizes), [request])[request.id]
        same = together[request.id]
        assert [o.tokens for o in same[0]] == [o.tokens for o in alone[0]]
        assert [o.num_masks for o in same[0]] == [o.num_masks for o in alone[0]]
        if batch_invariant:
            assert_same_bits(same, alone)
    counts = {len(o.tokens) for name in ("half", "entropy", "margin") for o in together[name][0]}
    assert len(counts) > 1


def test_mode_exact_gives_the_same_bits_among_others_and_alone(
    model: PreTrainedModel, make_engine: Callable[..., Engine]
) -> None:
    """There are enough positions for all groups of masks of all requests."""
    repetitive = copy.deepcopy(model)
    with torch.no_grad():
        repetitive.lm_head.weight[10:16] *= 3  # masks guess some of so few tokens right
    sizes = {
        "num_pages": 400,
        "max_num_seqs": 9,
        "max_num_batched_tokens": 1024,
        "batch_invariant": True,
    }
    requests = [r for pair in zip_longest(company(), named(EXACT)) for r in pair if r is not None]
    together = run(make_engine(repetitive, SPECIAL, **sizes), requests, gap=2)
    lengths = set[int]()
    for request in named(EXACT):
        alone = run(make_engine(repetitive, SPECIAL, **sizes), [request])[request.id]
        assert_same_bits(together[request.id], alone)
        ar_prompt = request.tokens[: request.num_prompt]
        ar = Request("ar", ar_prompt, replace(request.options, mode=Mode.AR))
        run(make_engine(repetitive, SPECIAL, **sizes), [ar])
        assert ar.tokens == request.tokens
        lengths.update(len(output.tokens) for output in alone[0])
    assert len(lengths) > 1


def test_bits_do_not_depend_on_chunks(
    model: PreTrainedModel, make_engine: Callable[..., Engine]
) -> None:
    """A prompt is fed in chunks of at most 65 positions, or whole in one step."""
    few = make_engine(
        model, SPECIAL, num_pages=400, max_num_batched_tokens=65, batch_invariant=True
    )
    many = make_engine(
        model, SPECIAL, num_pages=400, max_num_batched_tokens=1024, batch_invariant=True
    )
    chunked = run(few, [*company(), *named()])
    for request in named():
        assert_same_bits(run(many, [request])[request.id], chunked[request.id])


def test_bits_survive_preemption_and_prefix_hits(
    model: PreTrainedModel, make_engine: Callable[..., Engine]
) -> None:
    roomy = make_engine(model, SPECIAL, num_pages=400, batch_invariant=True)
    tight = make_engine(model, SPECIAL, num_pages=50, max_num_seqs=9, batch_invariant=True)
    squeezed = run(tight, [*named(), *company()])
    again = run(tight, [replace(request, id=request.id) for request in named()])
    status = tight.status()
    assert status.num_preemptions > 0
    assert status.num_prefix_hit_tokens > 0
    for request in named():
        alone = run(roomy, [request])[request.id]
        assert_same_bits(squeezed[request.id], alone)
        assert_same_bits(again[request.id], alone)


def test_a_tiled_layer_multiplies_each_row_alike(model: PreTrainedModel) -> None:
    torch.manual_seed(1)
    linear = model.model.layers[0].mlp.gate_proj
    tiled, inputs = TiledLinear(linear, tile=16), torch.randn(1, 40, 192)
    with torch.inference_mode():
        outputs = tiled(inputs)
        torch.testing.assert_close(outputs, linear(inputs))
        for begin, end in ((0, 1), (5, 8), (13, 40)):
            assert torch.equal(tiled(inputs[:, begin:end]), outputs[:, begin:end])


def test_recurrent_layers_are_refused_where_bits_must_not_depend_on_others(
    make_engine: Callable[..., Engine],
) -> None:
    with pytest.raises(UserError, match=r"^engine.batch_invariant: .*'lfm2'"):
        make_engine(build_family("lfm2"), SPECIAL, batch_invariant=True)
