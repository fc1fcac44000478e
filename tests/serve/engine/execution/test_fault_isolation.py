"""A request whose row fails ends alone, and an engine that always fails raises an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoding.engine_requests import make_request
from decoding.engines import Engines, Passes, oracle, passes_of, run
from decoding.families import build_family
from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_serve.engine.decoding_options import FinishReason, Sampling, token_set
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3, 60, 61}))
RAISING, POISONED = 60, 61
"""Tokens on which the embedding raises an error, and on which it returns NaN."""


def requests() -> list[Request]:
    """Six requests of different lengths."""
    prompts = [[4 + (row * 11 + 3 * i) % 50 for i in range(3 + 13 * row)] for row in range(6)]
    return [
        make_request(str(row), prompt, 14, threshold=0.1, window=4)
        for row, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module", params=["qwen2", "qwen3_5_text"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny model that no engine touches; the second has recurrent layers."""
    return build_family(request.param)


@pytest.fixture
def engine(model: PreTrainedModel, make_engine: Engines) -> Engine:
    """An engine whose embedding fails on two tokens."""
    model = copy.deepcopy(model)
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[POISONED] = torch.nan

    def refuse(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if (inputs[0] == RAISING).any():
            raise RuntimeError("device-side assertion")

    embedding.register_forward_pre_hook(refuse)
    return make_engine(model, SPECIAL, num_pages=150, max_num_seqs=6)


def run_all(engine: Engine, requests: list[Request]) -> Passes:
    """Run requests and return their passes; failed requests have an error message."""
    outputs = run(engine, requests)
    for output in (output for each in outputs.values() for output in each):
        assert (output.error is not None) == (output.finish_reason is FinishReason.ERROR)
    return passes_of(outputs)


def assert_oracles(model: PreTrainedModel, requests: list[Request], passes: Passes) -> None:
    for request in requests:
        assert passes[request.id] == oracle(model, request, SPECIAL)


@pytest.mark.parametrize("token", [RAISING, POISONED])
@pytest.mark.parametrize("bad", [[0], [5], [1, 3, 4]])
def test_only_the_blamed_request_fails(
    model: PreTrainedModel, engine: Engine, token: int, bad: list[int]
) -> None:
    batch = requests()
    for index in bad:
        batch[index].tokens[len(batch[index].tokens) // 2] = token
    passes = run_all(engine, batch)
    failed = [request for request in batch if request.finish_reason is FinishReason.ERROR]
    assert [int(request.id) for request in failed] == bad
    assert_oracles(model, [r for r in batch if r not in failed], passes)
    again = requests()  # the failure has left nothing in the pages
    assert_oracles(model, again, run_all(engine, again))


def test_a_cancelled_prompt_leaves_no_nan(model: PreTrainedModel, engine: Engine) -> None:
    poisoned = make_request("poisoned", [POISONED] * 100, 14, threshold=0.1, window=4)
    engine.add(poisoned)
    engine.step()
    assert 0 < poisoned.num_cached < poisoned.num_prompt
    engine.cancel(poisoned.id)
    batch = requests()
    assert_oracles(model, batch, run_all(engine, batch))


@pytest.mark.parametrize("token", [RAISING, POISONED])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_requests_that_go_on_failing_do_not_end_the_engine(
    model: PreTrainedModel, engine: Engine, num_rows: int, token: int
) -> None:
    for index in range(10):
        for row in range(num_rows):
            engine.add(make_request(f"{index}/{row}", [5 + row, token, *range(8, 8 + 4 * row)], 2))
        reasons = [output.finish_reason for output in engine.step()]
        assert reasons == [FinishReason.ERROR] * num_rows
        engine.check_integrity()
    batch = requests()
    assert_oracles(model, batch, run_all(engine, batch))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_engine_that_fails_without_a_request_raises(engine: Engine, num_rows: int) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("device-side assertion")

    engine._runner.model.get_input_embeddings().register_forward_pre_hook(fail)
    for index in range(3):
        for row in range(num_rows):
            engine.add(make_request(f"{index}/{row}", [7, 5], 2))
        if index < 2:
            reasons = [output.finish_reason for output in engine.step()]
            assert reasons == [FinishReason.ERROR] * num_rows
    with pytest.raises(RuntimeError, match="fails for every request"):
        engine.step()


def test_a_step_that_succeeds_resets_the_count_of_failures(engine: Engine) -> None:
    for index in range(8):
        engine.add(make_request(str(index), [RAISING if index % 2 else 4, 5], 1))
        (output,) = engine.step()
        assert (output.finish_reason is FinishReason.ERROR) == bool(index % 2)


def test_ids_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    for tokens in ([5, 64], [-1]):
        with pytest.raises(UserError, match=r"^prompt: token ids must lie between 0 and 63"):
            engine.add(make_request("one", tokens, 2))
    named = {
        "stop_token_ids": {"stop_ids": frozenset({5, 64}), "sampling": Sampling(min_tokens=1)},
        "logit_bias": {"sampling": Sampling(logit_bias=((5, 1.0), (64, 1.0)))},
        "bad_words": {"sampling": Sampling(bad_words=((5,), (5, 64)))},
    }
    for field, options in named.items():
        with pytest.raises(UserError, match=rf"^{field}: token id 64 is not below 64, "):
            engine.add(make_request("one", [5], 2, **options))
    allowed = make_request("two", [5], 2, sampling=Sampling(allowed_ids=token_set({5, 64, 900})))
    assert passes_of(run(engine, [allowed])) == {"two": [[5], [5]]}
