"""A request whose share of a pass fails ends alone; an engine that cannot work says so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.errors import UserError
from mars_platform.method import reference
from mars_serve.engine.decoding_options import DecodingOptions, FinishReason
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request

SPECIAL = SpecialTokens(eos=frozenset(), never_emitted=frozenset({0, 3, 60, 61}))
RAISING, POISONED = 60, 61
"""Tokens on which the embedding raises, and whose row is not a number."""

Models = Callable[[str], PreTrainedModel]
Engines = Callable[..., Engine]


def requests() -> list[Request]:
    """Six ragged requests."""
    options = DecodingOptions(14, threshold=0.1, window=4)
    return [
        Request(str(row), [4 + (row * 11 + 3 * i) % 50 for i in range(3 + 13 * row)], options)
        for row in range(6)
    ]


@pytest.fixture
def engine(tiny_model: Models, make_engine: Engines) -> Engine:
    """Raises on one token and computes nonsense on another."""
    engine = make_engine(tiny_model("qwen2"), SPECIAL, num_pages=150, max_num_seqs=6)
    embedding = engine._runner.model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[POISONED] = torch.nan

    def refuse(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if (inputs[0] == RAISING).any():
            raise RuntimeError("device-side assertion")

    embedding.register_forward_pre_hook(refuse)
    return engine


def run(engine: Engine, batch: list[Request]) -> dict[str, list[list[int]]]:
    passes: dict[str, list[list[int]]] = defaultdict(list)
    for request in batch:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            assert (output.error is not None) == (output.finish_reason is FinishReason.ERROR)
            if output.error is None:
                passes[output.request_id].append(output.tokens)
        engine.check_integrity()
    assert engine.status().num_free_pages == engine.num_pages
    return passes


def assert_oracles(model: PreTrainedModel, batch: list[Request], passes: Any) -> None:
    for request in batch:
        expected = reference.decode(
            model,
            request.tokens[: request.num_prompt],
            SPECIAL,
            max_tokens=14,
            threshold=0.1,
            num_masks=4,
            mask_token_id=3,
        )
        assert passes[request.id] == expected.passes


@pytest.mark.parametrize("token", [RAISING, POISONED])
@pytest.mark.parametrize("bad", [[0], [5], [1, 3, 4]])
def test_only_the_blamed_request_fails(
    tiny_model: Models, engine: Engine, token: int, bad: list[int]
) -> None:
    batch = requests()
    for index in bad:
        batch[index].tokens[len(batch[index].tokens) // 2] = token
    passes = run(engine, batch)
    failed = [request for request in batch if request.finish_reason is FinishReason.ERROR]
    assert [int(request.id) for request in failed] == bad
    assert_oracles(tiny_model("qwen2"), [r for r in batch if r not in failed], passes)
    again = requests()  # nothing of the failure is left in the pages
    assert_oracles(tiny_model("qwen2"), again, run(engine, again))


def test_a_cancelled_prompt_leaves_nothing_that_is_no_number(
    tiny_model: Models, engine: Engine
) -> None:
    poisoned = Request("poisoned", [POISONED] * 100, DecodingOptions(14, threshold=0.1, window=4))
    engine.add(poisoned)
    engine.step()
    assert 0 < poisoned.num_cached < poisoned.num_prompt
    engine.cancel(poisoned.id)
    batch = requests()
    assert_oracles(tiny_model("qwen2"), batch, run(engine, batch))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_engine_that_goes_on_failing_raises(engine: Engine, num_rows: int) -> None:
    """Where nobody succeeds, the requests may be to blame, or the engine."""
    for index in range(3):
        for row in range(num_rows):
            engine.add(Request(f"{index}/{row}", [RAISING, 5], DecodingOptions(2)))
        if index < 2:
            reasons = [output.finish_reason for output in engine.step()]
            assert reasons == [FinishReason.ERROR] * num_rows
    with pytest.raises(RuntimeError, match="fails for every request"):
        engine.step()


def test_a_step_that_works_clears_the_record(engine: Engine) -> None:
    for index in range(8):
        engine.add(Request(str(index), [RAISING if index % 2 else 4, 5], DecodingOptions(1)))
        (output,) = engine.step()
        assert (output.finish_reason is FinishReason.ERROR) == bool(index % 2)


def test_ids_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    for tokens in ([5, 64], [-1]):
        with pytest.raises(UserError, match=r"^prompt: token ids must lie between 0 and 63"):
            engine.add(Request("one", tokens, DecodingOptions(2)))
