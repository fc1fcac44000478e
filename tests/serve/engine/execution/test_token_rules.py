"""Allowed tokens, bad words and ignored end tokens, in every mode against the plain decoder."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from decoding.engines import Engines, Models, output_of, prompt_of, run
from decoding.modes import EXACT
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason, Sampling, token_set
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.sampling.token_rules import TokenRules

MASK, MAX_TOKENS, VOCABULARY = 3, 24, 64
SPECIAL = SpecialTokens(eos=frozenset({7, 8}), never_emitted=frozenset({0, MASK}))
AR = DecodingOptions(MAX_TOKENS, Mode.AR)
THRESHOLD = DecodingOptions(MAX_TOKENS, threshold=0.01)
FEW = frozenset({5, 7, 9, 12, 20, 33})
LIMITED = {
    "allowed": Sampling(allowed_ids=token_set(FEW)),
    "one word": Sampling(bad_words=((5,), (9,), (33, 33))),
    "words": Sampling(
        allowed_ids=token_set(FEW),
        bad_words=((5, 9), (9, 5), (12, 12), (20, 33, 20), (33, 33, 33), (5, 5)),
    ),
}


@pytest.fixture(scope="module")
def model(tiny_model: Models) -> PreTrainedModel:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, make_engine: Engines) -> Engine:
    return make_engine(model, SPECIAL)


def forbidden_by(sampling: Sampling) -> Callable[[list[int]], list[int]]:
    """Return the function from an output to the tokens that may not follow it, in plain Python."""
    bits = None if sampling.allowed_ids is None else int.from_bytes(sampling.allowed_ids, "little")

    def may_not_follow(output: list[int]) -> list[int]:
        tokens = []
        for token in range(VOCABULARY):
            ends = [tuple([*output, token][-len(word) :]) for word in sampling.bad_words]
            is_bad = any(end == word for end, word in zip(ends, sampling.bad_words, strict=True))
            if is_bad or (bits is not None and not bits >> token & 1):
                tokens.append(token)
        return tokens

    return may_not_follow


def requests_of(options: list[DecodingOptions], count: int) -> list[Request]:
    source = random.Random(0)
    prompts = [[source.randrange(4, VOCABULARY) for _ in range(9)] for _ in range(count)]
    return [
        Request(f"{number} {index}", list(prompt), each)
        for number, prompt in enumerate(prompts)
        for index, each in enumerate(options)
    ]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), *LIMITED.values()], ids=["free", *LIMITED])
def test_every_mode_gives_the_output_of_the_plain_decoder(
    engine: Engine, model: PreTrainedModel, sampling: Sampling, ignore_eos: bool
) -> None:
    special = replace(SPECIAL, eos=frozenset()) if ignore_eos else SPECIAL
    asked = {"sampling": sampling, "ignore_eos": ignore_eos}
    kinds = [replace(each, max_tokens=MAX_TOKENS, **asked) for each in (AR, *EXACT, THRESHOLD)]
    requests = requests_of(kinds, 2)
    passes = run(engine, requests)

    @cache
    def expected(prompt: tuple[int, ...], threshold: float) -> reference.ReferenceOutput:
        return reference.decode(
            model,
            prompt,
            special,
            max_tokens=MAX_TOKENS,
            threshold=threshold,
            num_masks=4,
            mask_token_id=MASK,
            forbidden=forbidden_by(sampling),
        )

    for request in requests:
        prompt = tuple(prompt_of(request))
        if request.options.mode is Mode.THRESHOLD:
            by_pass = [output.tokens for output in passes[request.id]]
            assert by_pass == expected(prompt, 0.01).passes
        else:
            assert output_of(request) == expected(prompt, 1.0).tokens, request.id
        if ignore_eos:
            assert len(output_of(request)) == MAX_TOKENS
    lengths = [len(output.tokens) for outputs in passes.values() for output in outputs]
    assert max(lengths) > 2


@pytest.mark.parametrize("sampling", LIMITED.values(), ids=LIMITED)
def test_sampled_outputs_of_mode_exact_are_those_of_mode_ar(
    engine: Engine, sampling: Sampling
) -> None:
    drawn = replace(sampling, temperature=0.8, top_p=0.95, seed=3)
    kinds = [replace(each, max_tokens=MAX_TOKENS, sampling=drawn) for each in (AR, *EXACT)]
    requests = requests_of(kinds, 4)
    run(engine, requests)
    may_not_follow = forbidden_by(sampling)
    for first in range(0, len(requests), len(kinds)):
        plain, *exact = requests[first : first + len(kinds)]
        assert [output_of(request) for request in exact] == [output_of(plain)] * len(exact)
        for index, token in enumerate(output_of(plain)):
            assert token not in may_not_follow(output_of(plain)[:index])


def test_ignored_end_tokens_are_emitted_and_stop_tokens_still_end(engine: Engine) -> None:
    wanted = Sampling(logit_bias=((7, 100.0),))
    kinds = [replace(each, sampling=wanted, ignore_eos=True) for each in (AR, *EXACT, THRESHOLD)]
    kinds = [replace(each, max_tokens=6) for each in kinds]
    requests = requests_of(kinds, 1)
    run(engine, requests)
    assert all(output_of(request) == [7] * 6 for request in requests)
    stopped = requests_of([replace(each, stop_ids=frozenset({7})) for each in kinds], 1)
    run(engine, stopped)
    assert all(output_of(request) == [7] for request in stopped)
    assert {request.finish_reason for request in stopped} == {FinishReason.STOP}


@pytest.mark.parametrize(
    ("sampling", "field", "output"),
    [
        (Sampling(allowed_ids=token_set({5}), bad_words=((5,) * 6,)), "allowed_token_ids", [5] * 5),
        (Sampling(allowed_ids=token_set({0, MASK})), "allowed_token_ids", []),
        (Sampling(allowed_ids=token_set({7}), min_tokens=4), "allowed_token_ids", []),
        (Sampling(bad_words=tuple((token,) for token in range(VOCABULARY))), "bad_words", []),
    ],
)
def test_a_request_that_may_choose_no_token_is_refused_behind_the_same_output_in_all_modes(
    engine: Engine, sampling: Sampling, field: str, output: list[int]
) -> None:
    kinds = [replace(each, max_tokens=8, sampling=sampling) for each in (AR, *EXACT, THRESHOLD)]
    requests = [*requests_of(kinds, 1), Request("other", [5, 6], AR)]
    passes = run(engine, requests)
    for request in requests[:-1]:
        assert request.finish_reason is FinishReason.REFUSED
        error = passes[request.id][-1].error
        assert error is not None
        assert error.startswith(f"{field}: ")
        assert output_of(request) == output
    assert requests[-1].num_output > 0


def test_what_choices_need_is_made_once_before_the_stepping_thread_gets_a_request(
    engine: Engine,
) -> None:
    sampling = replace(LIMITED["words"], logit_bias=((9, 2.0),), presence_penalty=0.5, min_tokens=2)
    request = requests_of([replace(AR, sampling=sampling)], 1)[0]
    engine.check(request)
    made = request.rules, request.bias, request.history, request.ends
    assert None not in made
    run(engine, [request])
    now = request.rules, request.bias, request.history, request.ends
    assert all(each is before for each, before in zip(now, made, strict=True))


def test_allowed_tokens_are_sent_and_read_fast_however_many() -> None:
    allowed = token_set(range(2**17))
    assert len(pickle.dumps(Sampling(allowed_ids=allowed))) < 2**15
    rules = TokenRules(Sampling(allowed_ids=token_set(range(1, 2**17))), 2**17)
    assert rules.allowed_after([]).tolist() == [False] + [True] * (2**17 - 1)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=4),
       st.none() | st.frozensets(st.integers(0, 3), min_size=1),
       st.lists(st.integers(0, 3), max_size=5))  # fmt: skip
def test_the_end_of_an_output_is_all_that_rules_look_at(words, allowed, output) -> None:
    sampling = Sampling(
        allowed_ids=None if allowed is None else token_set(allowed), bad_words=tuple(words)
    )
    rules, refused = TokenRules(sampling, 4), forbidden_by(sampling)(output)
    found = rules.allowed_after(output)
    assert found.nonzero()[:, 0].tolist() == [token for token in range(4) if token not in refused]
    end = output[len(output) - min(len(output), rules.num_before) :]
    assert torch.equal(rules.allowed_after(end), found)
    assert [rules.num_allowed(end, [token]) == 1 for token in range(4)] == found.tolist()
