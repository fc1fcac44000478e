from __future__ import annotations

from typing import Any

import pytest
import torch

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_serve.api.text import TokenBytes, encode
from rest.rest_requests import BODIES, COMPLETION, COMPLETIONS, MESSAGES, PROMPT


@torch.inference_mode()
def raw_logprobs(checkpoint: Checkpoint, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities at each output token's position: [tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = load_model(checkpoint.path)(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


async def test_log_probabilities_of_a_completion_are_the_models(official, mars, oracle):
    prompt = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    tokens, names = oracle(prompt, 1.0).tokens, TokenBytes(mars.tokenizer)
    expected = raw_logprobs(mars, prompt, tokens)
    extra = {"extra_body": {"mode": "ar"}}
    for num_top in (0, 3):
        response = await official.completions.create(
            model="mars", prompt=prompt, max_tokens=24, logprobs=num_top, **extra
        )
        found = response.choices[0].logprobs
        assert found.tokens == [names.name_of(token) for token in tokens]
        values = [float(expected[i, token]) for i, token in enumerate(tokens)]
        assert found.token_logprobs == pytest.approx(values, abs=1e-4)
        assert found.from_mask == [False] * 24
        text = response.choices[0].text
        assert found.text_offset == sorted(found.text_offset)
        assert found.text_offset[0] == 0
        is_whole = [not name.startswith("bytes:") for name in found.tokens]
        places = zip(found.tokens, found.text_offset, is_whole, [True, *is_whole], strict=False)
        checked = [text.startswith(name, at) for name, at, whole, after in places if whole & after]
        assert all(checked)
        assert len(checked) > 4
        for i, top in enumerate(found.top_logprobs):
            assert max(1, num_top) <= len(top) <= num_top + 1
            assert top[found.tokens[i]] == found.token_logprobs[i]
            likeliest = expected[i].topk(num_top).values.tolist()
            assert sorted(top.values(), reverse=True)[:num_top] == pytest.approx(
                likeliest, abs=1e-4
            )


async def test_log_probabilities_of_a_chat_mark_tokens_from_masks(official, mars):
    options: dict[str, Any] = {"model": "mars", "messages": MESSAGES, "max_tokens": 24}
    options |= {"logprobs": True, "top_logprobs": 4, "extra_body": {"confidence_threshold": 0.05}}
    response = await official.chat.completions.create(**options)
    content = response.choices[0].logprobs.content
    assert len(content) == 24
    spoken = b"".join(bytes(each.bytes) for each in content)
    assert spoken.decode(errors="replace") == response.choices[0].message.content
    for each in content:
        assert len(each.top_logprobs) == 4
        assert each.logprob <= 0
        assert sum(top.logprob == each.logprob for top in each.top_logprobs) >= (not each.from_mask)
    assert any(each.from_mask for each in content)
    assert not content[0].from_mask, "the first token of a pass is not from a mask"
    stream = await official.chat.completions.create(stream=True, **options)
    streamed, passes = [], []
    async for chunk in stream:
        part = chunk.choices[0].logprobs.content
        streamed += part
        passes.append([each.from_mask for each in part])
    assert streamed == content
    assert all(part == [False] + [True] * (len(part) - 1) for part in passes)


async def test_log_probabilities_end_with_the_stop_string(client):
    body = {**COMPLETION, "confidence_threshold": 0.02, "logprobs": 1}
    plain = (await client.answer(COMPLETIONS, body))["choices"][0]
    stop = plain["text"][3:5]
    whole = await client.answer(COMPLETIONS, {**body, "stop": stop})
    num_tokens = whole["usage"]["completion_tokens"]
    assert num_tokens < 24
    for field, values in whole["choices"][0]["logprobs"].items():
        assert values == plain["logprobs"][field][:num_tokens], field


async def test_log_probabilities_are_null_by_default(client):
    for path, body in BODIES.items():
        assert (await client.answer(path, body))["choices"][0]["logprobs"] is None


# Scoring a prompt


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("num_top", [0, 3])
async def test_an_echoed_prompt_is_scored(official, mars, num_top, max_tokens):
    text = "What is 3 plus 4? It is 7, I think."
    prompt = encode(mars.tokenizer, text, add_special_tokens=True)
    response = await official.completions.create(
        model="mars",
        prompt=text,
        max_tokens=max_tokens,
        logprobs=num_top,
        echo=True,
        extra_body={"mode": "ar"},
    )
    (choice,), names = response.choices, TokenBytes(mars.tokenizer)
    found = choice.logprobs
    assert found.tokens[: len(prompt)] == [names.name_of(token) for token in prompt]
    assert len(found.tokens) == len(prompt) + max_tokens
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    expected = raw_logprobs(mars, prompt[:1], prompt[1:])
    values = [float(row[token]) for row, token in zip(expected, prompt[1:], strict=True)]
    assert found.token_logprobs[1 : len(prompt)] == pytest.approx(values, abs=1e-4)
    for row, top in zip(expected, found.top_logprobs[1 : len(prompt)], strict=True):
        likeliest = row.topk(num_top).values.tolist()
        assert sorted(top.values(), reverse=True)[:num_top] == pytest.approx(likeliest, abs=1e-4)
    assert choice.text.startswith(text)
    for name, at in list(zip(found.tokens, found.text_offset, strict=True))[: len(prompt)]:
        assert text.startswith(name, at)
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[len(prompt) :][:1] == [len(text)][:max_tokens]
    assert response.usage.completion_tokens == max_tokens


async def test_a_prompt_is_scored_alike_as_text_and_as_ids(client, mars):
    ids = encode(mars.tokenizer, PROMPT, add_special_tokens=True)
    body = {**COMPLETION, "max_tokens": 0, "echo": True, "logprobs": 1}
    by_text = await client.answer(COMPLETIONS, body)
    by_ids = await client.answer(COMPLETIONS, {**body, "prompt": ids})
    assert by_ids["choices"] == by_text["choices"]


async def test_streamed_log_probabilities_equal_those_of_a_response(client):
    body = {**COMPLETION, "echo": True, "logprobs": 2, "confidence_threshold": 0.05}
    whole = (await client.answer(COMPLETIONS, body))["choices"][0]["logprobs"]
    events = await client.events(COMPLETIONS, body)
    for field, values in whole.items():
        parts = [event["choices"][0]["logprobs"][field] for event in events]
        assert [each for part in parts for each in part] == values, field
