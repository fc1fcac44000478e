from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import pytest

from mars_platform.checkpoint import Checkpoint
from mars_serve.text import decode, encode

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "What is 3 plus 4?"
MESSAGES = [{"role": "user", "content": PROMPT}]
COMPLETION = {"model": "mars", "prompt": PROMPT, "max_tokens": 24}
CONVERSATION = {"model": "mars", "messages": MESSAGES, "max_tokens": 24}
BODIES = {COMPLETIONS: COMPLETION, CHAT: CONVERSATION}


@pytest.mark.parametrize("threshold", [0.05, 0.9, 1.0])
@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
async def test_completion(
    official: openai.AsyncOpenAI,
    mars: Checkpoint,
    threshold: float,
    as_ids: bool,
    oracle: Any,
) -> None:
    ids = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    expected = oracle(ids, threshold)
    response = await official.completions.create(
        model="mars",
        prompt=ids if as_ids else PROMPT,
        max_tokens=24,
        temperature=0,
        extra_body={"confidence_threshold": threshold},
    )
    assert response.id.startswith("cmpl-")
    assert (response.object, response.model) == ("text_completion", "mars")
    assert [choice.text for choice in response.choices] == [decode(mars.tokenizer, expected.tokens)]
    assert response.choices[0].finish_reason == "length"
    assert response.usage.prompt_tokens == len(ids)
    assert response.usage.completion_tokens == len(expected.tokens) == 24
    assert response.usage.total_tokens == len(ids) + 24
    assert response.mars == {
        "mode": "threshold",
        "confidence_threshold": threshold,
        "forward_passes": len(expected.passes),
        "tokens_per_forward": round(24 / len(expected.passes), 4),
    }


async def test_low_threshold_takes_fewer_passes(client: Any) -> None:
    low = await client.answer(COMPLETIONS, {**COMPLETION, "confidence_threshold": 0.05})
    high = await client.answer(COMPLETIONS, {**COMPLETION, "confidence_threshold": 1})
    assert low["mars"]["forward_passes"] < high["mars"]["forward_passes"] == 24


async def test_completion_has_16_tokens_unless_told(client: Any) -> None:
    body = await client.answer(COMPLETIONS, {"model": "mars", "prompt": PROMPT})
    assert body["usage"]["completion_tokens"] == 16


async def test_an_end_token_counts_and_stops(
    mars: Checkpoint,
    make_loop: Any,
    client_over: Any,
    loop_backend: Any,
    oracle: Any,
) -> None:
    ids = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    tokens = oracle(ids, 1.0).tokens
    index = next(i for i in range(4, 24) if tokens[i] not in tokens[:i])
    special = replace(mars.special, eos=frozenset({tokens[index]}))
    ending = replace(mars, special=special)
    async with client_over(loop_backend(make_loop(ending)), ending) as client:
        body = await client.answer(COMPLETIONS, {**COMPLETION, "mode": "ar"})
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == index + 1


async def test_requests_at_once_do_not_mix(client: Any) -> None:
    bodies = [
        {**COMPLETION, "prompt": f"What is {i} plus", "confidence_threshold": 0.05}
        for i in range(8)
    ]
    together = await asyncio.gather(*(client.answer(COMPLETIONS, body) for body in bodies))
    alone = [await client.answer(COMPLETIONS, body) for body in bodies]
    assert [each["choices"] for each in together] == [each["choices"] for each in alone]
    assert len({each["id"] for each in together}) == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "top_p": 1, "n": 1, "stop": [], "logprobs": None, "echo": False},
        {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1},
        {"user": "someone", "seed": 3, "not_a_field": True},
    ],
)
async def test_neutral_fields_are_taken(client: Any, fields: dict[str, Any]) -> None:
    plain = await client.answer(COMPLETIONS, COMPLETION)
    assert (await client.answer(COMPLETIONS, {**COMPLETION, **fields}))["choices"] == plain[
        "choices"
    ]
