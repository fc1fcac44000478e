"""Random schedules: whatever arrives, waits, shares, is preempted or cancelled, the output of every
request is the oracle's for the windows that it was given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from mars_platform import reference
from mars_platform.checkpoint import SpecialTokens
from mars_platform.mode import Confidence, Mode
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import DecodingOptions, FinishReason, Outcomes, Request, StepOutput

PAD, MASK, BLOCK_SIZE = 0, 3, 4
SPECIAL = SpecialTokens(eos=frozenset({1, 7}), never_emitted=frozenset({PAD, MASK}))
SIZES = [
    {"num_pages": 12, "max_batch": 6, "page_size": 4},  # two requests at a time, often preempted
    {"num_pages": 40, "max_batch": 4, "page_size": 2},
    {"num_pages": 16, "max_batch": 8, "page_size": 3, "reuse_prefixes": 0},
]
CAPACITY = min(size["num_pages"] * size["page_size"] for size in SIZES)


@dataclass(frozen=True)
class Arrival:
    """One request of a schedule."""

    step: int
    family: int
    """Prompts of a family begin alike."""
    length: int
    options: DecodingOptions
    tenant: str
    cancelled_after: int | None
    """Steps from its arrival, or None."""

    def request(self, name: str) -> Request:
        source = torch.Generator().manual_seed(self.family)
        stem = torch.randint(4, 32, (24,), generator=source).tolist()
        tail = [4 + (self.step * 7 + i * 5) % 28 for i in range(self.length)]
        shared = min(self.length - 1, 20)
        return Request(name, [*stem[:shared], *tail[shared:]], self.options, tenant=self.tenant)


_OPTIONS = st.builds(
    DecodingOptions,
    max_tokens=st.integers(1, 9),
    mode=st.sampled_from([Mode.THRESHOLD, Mode.THRESHOLD, Mode.EXACT, Mode.EXACT, Mode.AR]),
    threshold=st.sampled_from([0.02, 0.05, 0.1, 0.3, 0.95, 1.0]),
    confidence=st.sampled_from(list(Confidence)),
    window=st.sampled_from([None, None, 0, 1, 2, 4]),
    outcomes=st.sampled_from([None, None, Outcomes.ALL, Outcomes.LAST]),
    priority=st.sampled_from([0, 0, 0, 1, 2]),
)
_ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 12),
    family=st.integers(0, 2),
    length=st.integers(1, 30),
    options=_OPTIONS,
    tenant=st.sampled_from(["", "", "", "other"]),
    cancelled_after=st.one_of(st.none(), st.none(), st.integers(0, 8)),
)


@cache
def _model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def engines(make_engine: Callable[..., Engine]) -> list[Engine]:
    """Engines that serve one schedule after the other, so that later ones find stored prefixes."""
    made = [make_engine(_model(), SPECIAL, **sizes) for sizes in SIZES]
    for engine in made:
        engine.warm_up()  # windows adapt: they depend on timing, and the trace says what they were
    return made


@settings(
    max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(_ARRIVALS, min_size=1, max_size=8), st.integers(0, len(SIZES) - 1))
def test_every_output_is_the_oracles(
    engines: list[Engine], arrivals: list[Arrival], which: int
) -> None:
    engine = engines[which]
    requests = {str(index): arrival.request(str(index)) for index, arrival in enumerate(arrivals)}
    outputs = _play(engine, arrivals, requests)
    assert engine.status().num_free_pages == engine.num_pages
    for name, request in requests.items():
        expected = _oracle(request, outputs[name])
        passes = [output.tokens for output in outputs[name]]
        if request.options.mode is Mode.EXACT:  # checked tokens, in passes of any length
            passes = [[token] for tokens in passes for token in tokens]
        if request.finish_reason is FinishReason.CANCELLED:
            assert passes == expected[: len(passes)]
        else:
            assert passes == expected
            assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert request.tokens[request.num_prompt :] == [t for tokens in passes for t in tokens]
        pinned = request.options.window
        if pinned is not None and request.options.mode is not Mode.EXACT:
            assert all(output.num_masks <= pinned for output in outputs[name])


def test_the_schedules_meet_what_they_are_about(engines: list[Engine]) -> None:
    """Runs after the schedules: they preempted, reused prefixes and fed windows of all sizes."""
    statuses = [engine.status() for engine in engines]
    assert statuses[0].num_preemptions > 20
    assert statuses[0].num_reused_tokens > 200
    assert statuses[1].num_reused_tokens > 200
    assert statuses[2].num_reused_tokens == 0


def _play(
    engine: Engine, arrivals: list[Arrival], requests: dict[str, Request]
) -> dict[str, list[StepOutput]]:
    outputs = defaultdict[str, list[StepOutput]](list)
    step = 0
    while engine.has_work or step <= max(arrival.step for arrival in arrivals):
        for name, arrival in enumerate(arrivals):
            if arrival.step == step:
                engine.add(requests[str(name)])
            if arrival.cancelled_after is not None and (
                arrival.step + arrival.cancelled_after == step
            ):
                engine.cancel(str(name))
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
        step += 1
    return outputs


def _oracle(request: Request, outputs: list[StepOutput]) -> list[list[int]]:
    options = request.options
    windows = [output.num_masks for output in outputs]
    if not windows:
        return []
    return reference.decode(
        _model(),
        request.tokens[: request.num_prompt],
        SPECIAL,
        max_tokens=sum(len(output.tokens) for output in outputs)
        if request.finish_reason is FinishReason.CANCELLED
        else options.max_tokens,
        threshold=options.threshold if options.mode is Mode.THRESHOLD else 1.0,
        num_masks=windows,
        mask_token_id=MASK,
        measure=options.confidence,
    ).passes
