from __future__ import annotations

from typing import Any

import openai
import pytest
from ray.exceptions import RayTaskError
from transformers import PreTrainedTokenizerBase

from mars_platform.errors import UserError
from mars_serve.api.text import encode
from mars_serve.engine.ipc.loop import EngineDied, QueueFull
from rest_requests import BODIES, CHAT, COMPLETION, COMPLETIONS, CONVERSATION, PROMPT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        (COMPLETIONS, {"confidence_threshold": 0}, 400, "confidence_threshold"),
        (COMPLETIONS, {"confidence_threshold": 1.5}, 400, "confidence_threshold"),
        (COMPLETIONS, {"confidence_threshold": -0.1}, 400, "confidence_threshold"),
        (COMPLETIONS, {"confidence_threshold": "x"}, 400, "confidence_threshold"),
        (COMPLETIONS, {"min_confidence_threshold": 0}, 400, "min_confidence_threshold"),
        (COMPLETIONS, {"min_confidence_threshold": 2}, 400, "min_confidence_threshold"),
        (COMPLETIONS, {"mode": "fast"}, 400, "mode"),
        (COMPLETIONS, {"model": "absent"}, 404, "model"),
        (COMPLETIONS, {"model": None}, 400, "model"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": None}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [5, 100_000]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", 5]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [[5], []]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [[5], [5, 100_000]]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": {}}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, 400, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b " * 300]}, 400, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 500}, 400, "max_tokens"),
        (COMPLETIONS, {"echo": "yes"}, 400, "echo"),
        (COMPLETIONS, {"best_of": 2}, 400, "best_of"),
        (COMPLETIONS, {"suffix": "end"}, 400, "suffix"),
        (COMPLETIONS, {"logprobs": 6}, 400, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, 400, "logprobs"),
        (COMPLETIONS, {"model": "plain", "mode": "threshold"}, 400, "mode"),
        (
            COMPLETIONS,
            {"model": "plain", "confidence_threshold": 0.5},
            400,
            "confidence_threshold",
        ),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages"),
        (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "messages"),
        (CHAT, {"max_completion_tokens": 500}, 400, "max_completion_tokens"),
        (CHAT, {"model": "absent"}, 404, "model"),
        (CHAT, {"logprobs": 1}, 400, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"chat_template_kwargs": {"messages": "x"}}, 400, "chat_template_kwargs"),
        (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort"),
        (CHAT, {"verbosity": "low"}, 400, "verbosity"),
        (CHAT, {"modalities": ["audio"]}, 400, "modalities"),
        (CHAT, {"audio": {}}, 400, "audio"),
        (CHAT, {"functions": [{}]}, 400, "functions"),
        (CHAT, {"web_search_options": {}}, 400, "web_search_options"),
        (CHAT, {"confidence_threshold": 1.01}, 400, "confidence_threshold"),
    ],
)
async def test_errors(
    client: Any,
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str,
    stream: bool,
) -> None:
    body = {**BODIES[path], **fields, "stream": stream}
    await client.refusal(path, body, status, param)


TOO_MANY = 2**63


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, "0.5", True, float("nan")]),
        ("top_p", [0, 1.1, float("inf")]),
        ("top_k", [-2, 2**31, 1.5]),
        ("min_p", [-0.1, 1.1]),
        ("seed", [TOO_MANY, -TOO_MANY - 1, 0.5, "x"]),
        ("repetition_penalty", [0, -1, 101]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        (
            "logit_bias",
            [
                {"a": 1},
                {"-1": 1},
                {"5": 100.5},
                {"5": None},
                {"": 1},
                {"100000": 1},
                [5],
                {str(each): 1 for each in range(1025)},
            ],
        ),
        ("min_tokens", [-1, 25]),
        ("stop", ["", [""], [5], ["x"] * 17, "x" * 257, {}]),
        ("stop_token_ids", [[-1], [100_000], ["a"], 5, [5] * 1025]),
        ("include_stop_str_in_output", ["maybe", 1, "true"]),
        ("n", [0, 129, 1.5, True]),
        ("stream", ["yes", 1]),
        ("prompt_logprobs", [0]),
        ("mode", ["fast"]),
        ("confidence", ["hope"]),
        ("calibrated", ["maybe"]),
        ("service_tier", ["scale", 1]),
        ("response_format", [{"type": "yaml"}, {"type": "json_schema"}, {}, "json", 5]),
        ("structured_outputs", [{}, {"jsn": {}}, {"json": 5}, {"regex": "a", "choice": ["a"]}]),
        ("guided_json", [5, "", "x" * 65_537]),
        ("guided_regex", ["", 5]),
        ("guided_grammar", ["", 5]),
        ("guided_choice", [[], [""], "a", ["a"] * 1025]),
        ("ignore_eos", [True, 0]),
        ("use_beam_search", [True]),
        ("length_penalty", [2]),
        ("allowed_token_ids", [[5]]),
        ("bad_words", [["x"]]),
        ("skip_special_tokens", [False]),
        ("truncate_prompt_tokens", [5]),
    ],
)
@pytest.mark.parametrize("path", BODIES)
async def test_values_out_of_range(client: Any, path: str, field: str, values: list[Any]) -> None:
    for value in values:
        message = await client.refusal(path, {**BODIES[path], field: value}, 400, field)
        assert message.startswith(field), value
        assert len(message) < 400


@pytest.mark.parametrize(
    ("path", "missing"), [(COMPLETIONS, "prompt"), (COMPLETIONS, "model"), (CHAT, "messages")]
)
async def test_missing_fields(client: Any, path: str, missing: str) -> None:
    body = {key: value for key, value in BODIES[path].items() if key != missing}
    await client.refusal(path, body, 400, missing)


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'"text"', b"\xff{}"])
@pytest.mark.parametrize("path", BODIES)
async def test_bodies_that_are_no_json_object(client: Any, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post(path, content=content, headers=headers)
    client.error_of(response, 422, None)


async def test_threshold_that_is_no_number(client: Any) -> None:
    body = {**COMPLETION, "confidence_threshold": float("nan")}
    await client.refusal(COMPLETIONS, body, 400, "confidence_threshold")


async def test_stream_options_need_a_stream(client: Any) -> None:
    body = {**COMPLETION, "stream_options": {"include_usage": True}}
    await client.refusal(COMPLETIONS, body, 400, "stream_options")


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
async def test_limits_of_the_server(
    models: Any, app_of: Any, client_of: Any, limits: Any, path: str, fields: Any, param: str
) -> None:
    async with client_of(app_of(*models, limits=limits)) as client:
        await client.refusal(path, {**BODIES[path], **fields}, 400, param)


async def test_limits_are_the_defaults_of_what_is_left_out(
    models: Any, app_of: Any, client_of: Any
) -> None:
    async with client_of(app_of(*models, limits={"output_tokens": 7})) as client:
        for path, body in BODIES.items():
            answer = await client.answer(path, {**body, "max_tokens": None})
            assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("num_words", [300, 3000])
@pytest.mark.parametrize("path", BODIES)
async def test_a_prompt_too_long_is_refused_with_numbers(
    client: Any, tokenizer: PreTrainedTokenizerBase, path: str, num_words: int
) -> None:
    long = "plus " * num_words
    body = {**COMPLETION, "prompt": long}
    if path == CHAT:
        body = {**CONVERSATION, "messages": [{"role": "user", "content": long}]}
    response = await client.post(path, json=body)
    message = client.error_of(response, 400, "max_tokens")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "256" in message
    if path == COMPLETIONS:
        num_prompt = len(encode(tokenizer, long, add_special_tokens=True))
        assert f"{num_prompt} prompt tokens" in message
        assert str(num_prompt + 24) in message


async def test_unknown_model_names_the_known_ones(client: Any) -> None:
    response = await client.post(COMPLETIONS, json={**COMPLETION, "model": "absent"})
    message = client.error_of(response, 404, "model")
    assert all(name in message for name in ("absent", "mars", "plain"))


async def test_official_client_raises_its_own_errors(official: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await official.completions.create(model="mars", prompt=PROMPT, temperature=2.5)
    assert refusal.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await official.completions.create(model="absent", prompt=PROMPT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("full"), 503, "queue_full"),
        (EngineDied("dead"), 503, "not_ready"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_backend_errors(
    broken_backend: Any, client_over: Any, error: Exception, status: int, code: str, stream: bool
) -> None:
    async with client_over(broken_backend(error)) as client:
        response = await client.post(COMPLETIONS, json={**COMPLETION, "stream": stream})
    message = client.error_of(response, status, None)
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)
    assert "secret" not in message


async def test_what_the_engine_refuses_keeps_its_words_through_ray(
    broken_backend: Any, client_over: Any
) -> None:
    cause = UserError("grammar: it does not parse")
    error = RayTaskError("stream", "a remote traceback", cause).as_instanceof_cause()
    async with client_over(broken_backend(error)) as client:
        response = await client.post(COMPLETIONS, json={**COMPLETION, "guided_regex": "a"})
    assert client.error_of(response, 400, "guided_regex") == "guided_regex: it does not parse"
