from __future__ import annotations

from typing import Any

import pytest

from mars_serve.api.text import encode
from rest.rest_requests import BODIES, CHAT, COMPLETION, COMPLETIONS, CONVERSATION, PROMPT
from rest.rest_server import app_of, client_of

NAN = float("nan")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (COMPLETIONS, {"model": "absent"}, 404, "model"),
        (COMPLETIONS, {"prompt": [5, 100_000]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [[5], [5, 100_000]]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, 400, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b " * 300]}, 400, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 500}, 400, "max_tokens"),
        (COMPLETIONS, {"best_of": 2}, 400, "best_of"),
        (COMPLETIONS, {"model": "plain", "mode": "threshold"}, 400, "mode"),
        (COMPLETIONS, {"model": "plain", "confidence_threshold": 0.5}, 400, "confidence_threshold"),
        (COMPLETIONS, {"temperature": NAN}, 400, "temperature"),
        (COMPLETIONS, {"confidence_threshold": NAN}, 400, "confidence_threshold"),
        (COMPLETIONS, {"top_p": float("inf")}, 400, "top_p"),
        (COMPLETIONS, {"logit_bias": {"100000": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"min_tokens": 25}, 400, "min_tokens"),
        (COMPLETIONS, {"calibrated": True}, 400, "calibrated"),
        (COMPLETIONS, {"stop_token_ids": [100_000]}, 400, "stop_token_ids"),
        (COMPLETIONS, {"allowed_token_ids": [5, 100_000]}, 400, "allowed_token_ids"),
        (COMPLETIONS, {"bad_words": ["日本" * 100] * 128}, 400, "bad_words"),
        (COMPLETIONS, {"truncate_prompt_tokens": 257}, 400, "truncate_prompt_tokens"),
        (COMPLETIONS, {"ignore_eos": True, "guided_regex": "a+"}, 400, "ignore_eos"),
        (COMPLETIONS, {"prompt_logprobs": 0, "stream": True}, 400, "prompt_logprobs"),
        (COMPLETIONS, {"return_passes": True, "stream": False}, 400, "return_passes"),
        (COMPLETIONS, {"stream_options": {}, "stream": False}, 400, "stream_options"),
        (CHAT, {"model": "absent"}, 404, "model"),
        (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"max_completion_tokens": 500, "max_tokens": None}, 400, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 5, "max_tokens": 6}, 400, "max_tokens"),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"return_passes": True, "stream": True, "include_reasoning": False}, 400,
         "return_passes"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, 400,
         "continue_final_message"),
        (CHAT, {"temperature": NAN}, 400, "temperature"),
        (CHAT, {"stop_token_ids": [100_000]}, 400, "stop_token_ids"),
        (CHAT, {"chat_template_kwargs": {"messages": "x"}}, 400, "chat_template_kwargs"),
    ],
)  # fmt: skip
async def test_a_field_that_the_model_cannot_serve_is_named(
    client, path, fields, status, param, stream
):
    body = {**BODIES[path], "stream": stream, **fields}
    await client.refusal(path, body, status, param)


async def test_a_field_that_is_missing_is_named_and_so_is_a_prompt_that_cannot_be_served(client):
    message = await client.refusal(COMPLETIONS, {"model": "mars"}, 400, "prompt")
    assert message == "prompt: Field required"
    body = {**COMPLETION, "prompt": [[5], [5, 100_000]]}
    assert (await client.refusal(COMPLETIONS, body, 400, "prompt")).startswith("prompt[1]: ")
    body = {**COMPLETION, "prompt": ["a", "plus " * 300]}
    assert "of prompt[1]" in await client.refusal(COMPLETIONS, body, 400, "max_tokens")


@pytest.mark.parametrize(
    ("path", "fields", "where"),
    [
        (CHAT, {"messages": [{"role": "assistant", "reasoning": 5}]}, "messages.0.reasoning: "),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0.type: ",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema: Field required",
        ),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt.1: "),
        (COMPLETIONS, {"confidence_threshold": {"answer": 2}}, "confidence_threshold.answer: "),
    ],
)
async def test_a_mistake_within_a_field_is_named_by_its_path_in_the_body(
    client, path, fields, where
):
    body = {**BODIES[path], **fields}
    message = await client.refusal(path, body, 400, where.partition(".")[0])
    assert message.startswith(where)


@pytest.mark.parametrize(
    ("limits", "path", "fields", "param"),
    [
        ({"prompt_tokens": 5}, COMPLETIONS, {}, "prompt"),
        ({"prompt_tokens": 5}, COMPLETIONS, {"prompt": ["a", PROMPT]}, "prompt"),
        ({"prompt_tokens": 5}, CHAT, {}, "messages"),
        ({"output_tokens": 23}, COMPLETIONS, {}, "max_tokens"),
        ({"output_tokens": 23}, CHAT, {}, "max_tokens"),
        ({"choices": 3}, CHAT, {"n": 4}, "n"),
        ({"choices": 3}, COMPLETIONS, {"n": 2, "prompt": ["a", "b"]}, "n"),
        ({"choices": 3}, COMPLETIONS, {"prompt": ["a"] * 4}, "prompt"),
        ({"stop_strings": 1}, CHAT, {"stop": ["a", "b"]}, "stop"),
        ({"stop_characters": 3}, CHAT, {"stop": "four"}, "stop"),
    ],
)
async def test_requests_beyond_the_servers_limits_are_refused(models, limits, path, fields, param):
    async with client_of(app_of(*models, limits=limits)) as client:
        await client.refusal(path, {**BODIES[path], **fields}, 400, param)


async def test_the_output_limit_is_also_the_default(models):
    async with client_of(app_of(*models, limits={"output_tokens": 7})) as client:
        for path, body in BODIES.items():
            answer = await client.answer(path, {**body, "max_tokens": None})
            assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("path", BODIES)
async def test_a_too_long_prompt_is_refused_with_its_length(client, tokenizer, path):
    long = "plus " * 300
    response = await client.post(path, json=body_with(path, long))
    message = client.error_of(response, 400, "max_tokens")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "256" in message
    if path == COMPLETIONS:
        num_prompt = len(encode(tokenizer, long, add_special_tokens=True))
        assert f"{num_prompt} prompt tokens" in message
        assert str(num_prompt + 24) in message


def body_with(path: str, text: str) -> dict[str, Any]:
    if path == CHAT:
        return {**CONVERSATION, "messages": [{"role": "user", "content": text}]}
    return {**COMPLETION, "prompt": text}
