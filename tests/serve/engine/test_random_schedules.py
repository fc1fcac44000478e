"""Random schedules of requests that arrive, wait, share prefixes, are preempted and cancelled: the
output of each request is its oracle's for the windows that it was given.

The oracle of greedy requests is the plain decoder. The oracle of requests that sample or have a
grammar is an engine that serves nothing else, in mode ar if the request is in mode exact.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decoding.adapters import with_random_head
from decoding.engines import poison_windows
from decoding.families import HYBRIDS, MIXED, build_family
from decoding.grammar_specs import regex
from decoding.tiny_models import build_model
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.adapter.draft_head import draft_head_of
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.checkpoint.metadata import DraftHeadSettings, MarsMetadata
from mars_platform.method import reference
from mars_platform.method.mode import Confidence, LiveDecoding, Mode
from mars_platform.tier import Tier
from mars_serve.engine.decoding_options import (
    DecodingOptions,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Outcomes,
    Sampling,
    Thinking,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput, TokenLogprob
from mars_serve.engine.prompt_room import PromptRoom
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

VOCABULARY, PAD, MASK, BLOCK_SIZE = 32, 0, 3, 4
NAMES = {PAD: "<pad>", 1: "<end>", 2: "<start>", MASK: "<mask>", 7: "<stop>"}
CHARACTERS = '0123456789abcdefghij,.{}":+'
COMMON = [5, 6, 9, 15, 16, 18]
SPECIAL = SpecialTokens(eos=frozenset({1, 7}), never_emitted=frozenset({PAD, MASK}))
SIZES = [
    # two requests at a time, often preempted
    {"num_pages": 10, "max_num_seqs": 6, "page_size": 4, "num_lookup_drafts": 16},
    {"num_pages": 40, "max_num_seqs": 4, "page_size": 2},
    {
        "num_pages": 16,
        "max_num_seqs": 8,
        "page_size": 3,
        "enable_prefix_caching": 0,
        "num_lookup_drafts": 3,
    },
]


@dataclass(frozen=True)
class Arrival:
    """One request of a schedule."""

    step: int
    family: int
    """Number of the family; prompts of a family begin alike, and those of 2 repeat themselves, so
    that drafts can be looked up there."""
    length: int
    options: DecodingOptions
    tenant: str
    cancelled_after: int | None
    """Steps from the arrival to the cancellation; None for no cancellation."""

    def request(self, name: str) -> Request:
        source = torch.Generator().manual_seed(self.family)
        stem = torch.randint(4, 32, (24,), generator=source).tolist()
        if self.family == 2:
            prompt = (stem[:4] * self.length)[: self.length]
            return Request(name, prompt, self.options, tenant=self.tenant, key=self.tenant)
        tail = [4 + (self.step * 7 + i * 5) % 28 for i in range(self.length)]
        shared = min(self.length - 1, 20)
        tokens = [*stem[:shared], *tail[shared:]]
        return Request(name, tokens, self.options, tenant=self.tenant, key=self.tenant)


_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
_GRAMMARS = [
    GrammarSpec(GrammarKind.REGEX, "[a-e]{2,6}"),
    GrammarSpec(GrammarKind.REGEX, "(ab|cd|[0-9]{2,3})*"),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA)),
]
_THINKING = [
    Thinking(9, 16, has_begun=True),
    Thinking(9, 5, has_begun=False),
    Thinking(15, 6, has_begun=True, budget=2),
    Thinking(16, 9, has_begun=False, budget=0),
    Thinking(9, 18, has_begun=True, may_begin=False, budget=4),
]
_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    logit_bias=st.sampled_from([(), ((9, 2.0), (12, -50.0))]),
    min_tokens=st.sampled_from([0, 0, 3]),
)


def _replayable(options: DecodingOptions) -> DecodingOptions:
    """Pin the window of a request whose oracle is an engine, which has to use the same one."""
    if options.mode is Mode.THRESHOLD and not options.is_plain and options.window is None:
        return replace(options, window=3)
    return options


_OPTIONS = st.builds(
    DecodingOptions,
    max_tokens=st.integers(1, 9),
    mode=st.sampled_from([Mode.THRESHOLD, Mode.THRESHOLD, Mode.EXACT, Mode.EXACT, Mode.AR]),
    threshold=st.sampled_from([0.02, 0.05, 0.1, 0.3, 0.95, 1.0, None, None, None]),
    min_threshold=st.sampled_from([0.0, 0.0, 0.2]),
    confidence=st.sampled_from(list(Confidence)),
    window=st.sampled_from([None, None, 0, 1, 2, 4]),
    outcomes=st.sampled_from([None, None, Outcomes.ALL, Outcomes.LAST]),
    tier=st.sampled_from([Tier.DEFAULT, Tier.DEFAULT, *Tier]),
    sampling=st.one_of(st.just(Sampling()), st.just(Sampling()), _SAMPLINGS),
    grammar=st.sampled_from([None] * 5 + _GRAMMARS),
    thinking=st.sampled_from([None] * 4 + _THINKING),
    stop_ids=st.sampled_from([frozenset(), frozenset(), frozenset({9, 14})]),
    num_logprobs=st.sampled_from([None, None, 0, 2]),
).map(_replayable)
_LIVE = st.lists(st.sampled_from([0.02, 0.05, 0.1, 0.5, 1.0]), min_size=1, max_size=5)
"""Live thresholds of consecutive steps, repeated from the start."""
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
def _model(family: str = "qwen2", *, has_head: bool = False) -> PreTrainedModel:
    build = build_family if family in {**MIXED, **HYBRIDS} else build_model
    sizes = {"hidden_size": 16, "intermediate_size": 32, "initializer_range": 0.4}
    sizes["mamba_expand"] = 4  # for Mamba's four heads of 16 numbers
    model = build(family, vocab_size=VOCABULARY, **sizes)
    with torch.no_grad():
        model.lm_head.weight[COMMON] *= 3  # outputs of few tokens: masks guess some of them right
    return with_random_head(model, DraftHeadSettings(rank=3)) if has_head else model


def _tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one character for each token, as grammars read the tokens' text."""
    others = [token for token in range(VOCABULARY) if token not in NAMES]
    vocabulary = {text: token for token, text in NAMES.items()}
    vocabulary.update(zip(CHARACTERS, others, strict=True))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=NAMES[1],
        pad_token=NAMES[PAD],
        additional_special_tokens=[NAMES[2], NAMES[MASK], NAMES[7]],
    )


def _engine(family: str = "qwen2", *, has_head: bool = False, **sizes: int) -> Engine:
    metadata = MarsMetadata(block_size=BLOCK_SIZE, mask_token_id=MASK)
    checkpoint = Checkpoint(None, _model(family).config, _tokenizer(), metadata, SPECIAL)
    model = copy.deepcopy(_model(family, has_head=has_head))
    return Engine(checkpoint, EngineSettings(max_num_batched_tokens=65, **sizes), model=model)


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """Engines that serve all schedules, so that later ones find cached prefixes.

    The last one has a draft head.
    """
    made = [_engine(**sizes, has_head=sizes is SIZES[-1]) for sizes in SIZES]
    for engine in made[:2]:
        engine.warm_up()  # windows adapt: they depend on timing, and the trace says what they were
    slow = StepTimes((1, 65), (0,), ((0.01,), (0.4,)))  # so that prompts have short parts
    made[1]._scheduler.prompt_room = PromptRoom(slow, num_rows=1)
    # The last one feeds all masks and drafts that there are, whether or not they are worth it.
    return made


@pytest.fixture(scope="module")
def solos() -> list[Engine]:
    """Engines that serve one request at a time, without and with a draft head."""
    sizes = {"num_pages": 20, "page_size": 8, "max_num_seqs": 1, "enable_prefix_caching": 0}
    return [_engine(**sizes, has_head=has_head) for has_head in (False, True)]


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """Counts of what the schedules have met."""
    return Counter()


_LOOKED_UP = [
    Arrival(0, 2, length, DecodingOptions(9, Mode.EXACT), "", None) for length in (9, 12, 16, 17)
]
"""Requests whose prompts repeat themselves, so that drafts are looked up at their ends."""


_CROWDED = [Arrival(0, 1, length, DecodingOptions(24, Mode.AR), "", None) for length in range(2, 9)]
"""Requests for which the first engine has too few pages, so that some are preempted."""


_KINDS = [
    replace(DecodingOptions(16, mode, None, window=window, thinking=thinking), **kind)
    for mode, window in ((Mode.AR, None), (Mode.THRESHOLD, 3), (Mode.EXACT, None))
    for thinking in (None, _THINKING[4])
    for kind in ({}, {"sampling": Sampling(1.0, seed=1)}, {"grammar": _GRAMMARS[1]})
]
_EVERY_KIND = [
    Arrival(step, 0, length, options, "" if step else "b", None)
    for step, length in enumerate((5, 21, 21))
    for options in _KINDS
]
"""Requests in all modes that run for long enough to see the live threshold move."""


@pytest.mark.parametrize(
    "part", [1, *(pytest.param(part, marks=pytest.mark.full) for part in range(2, 6))]
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(_LOOKED_UP, [0.95], len(SIZES) - 1)  # drawn schedules may hold few of these
@example(_CROWDED, [1.0], 0)
@example(_EVERY_KIND, [0.02, 0.05], 0)
@example(_EVERY_KIND, [0.02, 0.05], 1)
@example(_EVERY_KIND, [0.02, 0.05], len(SIZES) - 1)
@given(st.lists(_ARRIVALS, min_size=1, max_size=8), _LIVE, st.integers(0, len(SIZES) - 1))
def test_every_output_is_the_oracles(
    engines: list[Engine],
    solos: list[Engine],
    seen: Counter[str],
    part: int,
    arrivals: list[Arrival],
    live: list[float],
    which: int,
) -> None:
    engine = engines[which]
    requests = {str(index): arrival.request(str(index)) for index, arrival in enumerate(arrivals)}
    outputs = _play(engine, arrivals, requests, live, seen)
    assert engine.status().num_free_pages == engine.num_pages
    for name, request in requests.items():
        options, found = request.options, outputs[name]
        if request.finish_reason is not FinishReason.CANCELLED:
            assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        _compare(request, found, solos, has_head=which == len(SIZES) - 1)
        seen["answers behind thinking"] += _ends_thinking(request, engine)
        passes = [output.tokens for output in found]
        assert request.tokens[request.num_prompt :] == [t for tokens in passes for t in tokens]
        if options.window is not None and options.mode is not Mode.EXACT:
            assert all(output.num_masks <= options.window for output in found)
        _count(seen, request, found)


def test_the_schedules_meet_what_they_are_about(engines: list[Engine], seen: Counter[str]) -> None:
    """Check, after the schedules, that they covered preemption, prefix hits and all windows.

    Schedules are drawn anew in each run and may miss any of it, so the explicit ones alone reach
    every count. The number of drafts depends on timing: its bounds are far below the usual counts.
    """
    statuses = [engine.status() for engine in engines]
    assert statuses[0].num_preemptions > 3
    assert statuses[0].num_prefix_hit_tokens > 50
    assert statuses[1].num_prefix_hit_tokens > 50
    assert statuses[2].num_prefix_hit_tokens == 0
    kinds = "greedy", "sampled", "grammar"
    assert all(seen[f"{mode}, {kind}"] > 3 for mode in Mode for kind in kinds)
    assert sum(seen[f"{Mode.EXACT}, {kind}, drafts accepted"] for kind in kinds) > 2
    assert sum(seen[f"{Mode.THRESHOLD}, {kind}, masks accepted"] for kind in kinds) > 20
    assert seen["lookup drafts"] > 3
    assert seen["pauses"] > 3
    assert seen["choices charged"] > 3
    assert seen["answers behind thinking"] > 3
    assert seen["threshold moved"] > 3
    assert seen["threshold moved, masks accepted"] > 0


QUICK = ("gemma4_text", "gpt_oss", "falcon_h1", "kimi_linear", "lfm2", "nemotron_h", "qwen3_5_text")


@pytest.mark.parametrize(
    "family",
    [
        each if each in QUICK else pytest.param(each, marks=pytest.mark.full)
        for each in (*MIXED, *HYBRIDS)
    ],
)
def test_layers_of_every_kind_keep_to_the_oracle(family: str, seen: Counter[str]) -> None:
    engine, source = _engine(family, **SIZES[0]), random.Random(3)
    modes = (Mode.THRESHOLD, Mode.EXACT, Mode.AR)
    arrivals = [
        Arrival(
            source.randrange(12),
            source.randrange(3),
            source.randint(1, 30),
            DecodingOptions(9, modes[index % 3], source.choice([0.05, 0.3, None])),
            "",
            source.choice([None, None, 6]),
        )
        for index in range(16)
    ]
    requests = {str(index): arrival.request(str(index)) for index, arrival in enumerate(arrivals)}
    outputs = _play(engine, arrivals, requests, [0.02, 0.1], seen)
    for name, request in requests.items():
        found = [output.tokens for output in outputs[name]]
        expected = _oracle(request, outputs[name], family)
        if request.options.mode is Mode.EXACT:
            found, expected = _one_by_one(found), _one_by_one(expected)
        assert found == expected[: len(found)]
        assert len(found) == len(expected) or request.finish_reason is FinishReason.CANCELLED
    assert engine.status().num_preemptions > 0
    assert engine.status().num_prefix_hit_tokens > 0


def _ends_thinking(request: Request, engine: Engine) -> bool:
    """Return whether a grammar holds behind thinking; assert that it does, and that budgets do."""
    thinking, grammar = request.options.thinking, request.options.grammar
    if thinking is None:
        return False
    output = request.tokens[request.num_prompt :]
    count, num_before = (0 if thinking.has_begun else None), 0
    for index, token in enumerate(output):
        if count is not None:
            assert grammar is None or token not in SPECIAL.eos
            count, num_before = (None if token == thinking.end else count + 1), index + 1
        elif token == thinking.begin and (
            grammar is None or (thinking.may_begin and index == num_before == 0)
        ):
            count, num_before = 0, index + 1
        assert count is None or thinking.budget is None or count <= thinking.budget
    if grammar is None:
        return False
    answer = output[num_before:]
    assert engine.grammars.compile(grammar).matcher().advance(answer) == len(answer)
    return 0 < num_before < len(output)


def _count(seen: Counter[str], request: Request, outputs: list[StepOutput]) -> None:
    options, passes = request.options, [output.tokens for output in outputs]
    kind = "sampled" if options.sampling.temperature > 0 else "greedy"
    kind = f"{options.mode}, {'grammar' if options.grammar else kind}"
    several = "drafts" if options.mode is Mode.EXACT else "masks"
    seen[kind] += 1
    assert request.sampling_s == 0.0 or not options.is_plain
    seen["choices charged"] += request.sampling_s > 0.0
    several_taken = any(len(tokens) > 1 for tokens in passes)
    seen[f"{kind}, {several} accepted"] += several_taken
    if len({output.threshold for output in outputs}) > 1:
        seen["threshold moved"] += 1
        seen["threshold moved, masks accepted"] += several_taken


def _play(
    engine: Engine,
    arrivals: list[Arrival],
    requests: dict[str, Request],
    live: list[float],
    seen: Counter[str],
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
        engine.live = LiveDecoding(live[step % len(live)])
        poison_windows(engine)
        for output in engine.step():
            outputs[output.request_id].append(output)
            seen["lookup drafts"] += requests[output.request_id].num_lookup_drafts
        running = [request for request in engine._scheduler.running if request.num_output]
        last_step = max((request.last_turn for request in running), default=0)
        seen["pauses"] += sum(request.last_turn < last_step for request in running)
        engine.check_integrity()
        step += 1
    return outputs


def _compare(
    request: Request, outputs: list[StepOutput], solos: list[Engine], *, has_head: bool
) -> None:
    """Assert that a request's output is that of a run alone, or the start of it if cancelled."""
    found = [output.tokens for output in outputs]
    logprobs = [entry for output in outputs for entry in output.logprobs]
    if request.options.is_plain:
        expected = _oracle(request, outputs, has_head=has_head)
    else:
        replayed, finish_reason = _alone(request, outputs, solos[has_head])
        expected = [output.tokens for output in replayed]
        entries = [entry for output in replayed for entry in output.logprobs]
        _compare_logprobs(logprobs, entries[: len(logprobs)])
        if request.finish_reason is not FinishReason.CANCELLED:
            assert request.finish_reason is finish_reason
    num_tokens = sum(map(len, found))
    assert len(logprobs) == (0 if request.options.num_logprobs is None else num_tokens)
    if request.options.mode is Mode.EXACT:  # checked tokens, in passes of any length
        found, expected = _one_by_one(found), _one_by_one(expected)
    if request.finish_reason is FinishReason.CANCELLED:
        expected = expected[: len(found)]
    assert found == expected


def _oracle(
    request: Request, outputs: list[StepOutput], family: str = "qwen2", *, has_head: bool = False
) -> list[list[int]]:
    """Return the plain decoder's passes with the windows that the request had."""
    options, model = request.options, _model(family, has_head=has_head)
    windows = [output.num_masks for output in outputs]
    if not windows:
        return []
    return reference.decode(
        model,
        request.tokens[: request.num_prompt],
        replace(SPECIAL, eos=SPECIAL.eos | options.stop_ids),
        max_tokens=sum(len(output.tokens) for output in outputs)
        if request.finish_reason is FinishReason.CANCELLED
        else options.max_tokens,
        threshold=[output.threshold for output in outputs]
        if options.mode is Mode.THRESHOLD
        else 1.0,
        num_masks=windows,
        mask_token_id=MASK,
        measure=options.confidence,
        head=draft_head_of(model),
    ).passes


def _alone(
    request: Request, recorded: list[StepOutput], solo: Engine
) -> tuple[list[StepOutput], FinishReason | None]:
    """Return a request's passes in an engine of its own, with the recorded thresholds."""
    options = request.options
    if options.mode is Mode.EXACT:
        options = replace(options, mode=Mode.AR, window=None, outcomes=None)
    again = Request("alone", request.tokens[: request.num_prompt], options)
    outputs = list[StepOutput]()
    solo.add(again)
    thresholds = iter([output.threshold for output in recorded])
    while solo.has_work:
        solo.live = LiveDecoding(next(thresholds, solo.live.threshold))
        outputs += solo.step()
    return outputs, again.finish_reason


def _compare_logprobs(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [entry.from_mask for entry in found] == [entry.from_mask for entry in expected]
    numbers, others = (
        [[entry.logprob, *(value for _, value in entry.top)] for entry in entries]
        for entries in (found, expected)
    )
    for one, other in zip(numbers, others, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def _one_by_one(passes: list[list[int]]) -> list[list[int]]:
    return [[token] for tokens in passes for token in tokens]


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_step_whose_tokens_are_put_off_reports_only_what_it_scored(*, is_scored: bool) -> None:
    """The grammar's own parser is not ready when the first step's token is committed."""
    engine = _engine(**SIZES[1])
    scored = 0 if is_scored else None
    options = DecodingOptions(3, Mode.AR, grammar=regex("[a-j]{9}"), num_prompt_logprobs=scored)
    request = Request("r", [8, 9, 10], options)
    engine.add(request)
    step = engine.begin_step()
    assert request.matcher is not None
    own = request.matcher._own = Future()
    outputs = engine.finish_step(step)
    assert [(each.tokens, len(each.prompt_logprobs)) for each in outputs] == [([], 2)] * is_scored
    assert engine.step() == []
    own.set_result(request.matcher._parser)
    while engine.has_work:
        outputs += engine.step()
    assert sum(len(each.tokens) for each in outputs) == 3
    assert sum(len(each.prompt_logprobs) for each in outputs) == 2 * is_scored
    assert [each.queue_s > 0 for each in outputs] == [True] + [False] * (len(outputs) - 1)
