from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator

from rest.rest_requests import BODIES, CHAT, COMPLETIONS

BASES = {path: {**body, "max_tokens": 3} for path, body in BODIES.items()}


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    return app.openapi()


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def body_of(document: dict[str, Any], path: str) -> Draft202012Validator:
    operation = document["paths"][path]["post"]
    return validator(document, operation["requestBody"]["content"]["application/json"]["schema"])


def response_of(document: dict[str, Any], path: str, status: int) -> Draft202012Validator:
    content = document["paths"][path]["post"]["responses"][str(status)]["content"]
    return validator(document, content["application/json"]["schema"])


@pytest.mark.parametrize("path", BASES)
def test_every_response_status_is_described(document, path):
    responses = document["paths"][path]["post"]["responses"]
    expected = {"200", "400", "401", "403", "404", "413", "415", "422", "429", "500", "503"}
    assert set(responses) == expected
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    for status in expected - {"200"}:
        schema = responses[status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
    assert "HTTPValidationError" not in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "service_tier": "auto"}),
        (COMPLETIONS, {"prompt": [[5, 6], [7]], "echo": True, "logprobs": 2}),
        (COMPLETIONS, {"echo": True, "logprobs": 0, "max_tokens": 0, "mode": "ar"}),
        (CHAT, {"model": "plain"}),
        (CHAT, {"logprobs": True, "top_logprobs": 3, "service_tier": "priority"}),
        (CHAT, {"guided_choice": ["yes"], "n": 2}),
    ],
)
async def test_responses_are_as_described(client, document, path, fields):
    body = {**BASES[path], **fields}
    body_of(document, path).validate(body)
    response_of(document, path, 200).validate(await client.answer(path, body))


async def test_errors_are_as_described(client, document):
    for path, base in BASES.items():
        for fields in ({"model": "absent"}, {"n": 0}, {"max_tokens": 10_000}):
            response = await client.post(path, json={**base, **fields})
            response_of(document, path, response.status_code).validate(response.json())


VALUES = {
    "model": ["mars", None],
    "stream": [False, None, "yes", 1],
    "n": [1, 0, 129, "1", 1.5, True, None],
    "temperature": [0, 2, -0.1, 2.1, "1", True, None],
    "confidence_threshold": [
        *(0.5, -0.1, 0, 1, 1.5, "0.5", None, [0.5]),
        *({"answer": 0.5}, {"answer": 0}, {"answer": None}, {"text": 0.5}, {}),
    ],
    "min_confidence_threshold": [0.5, 0, 2, None],
    "confidence": ["probability", "hope"],
    "calibrated": [False, "maybe"],
    "window": [0, 2, -1, 2**31, 1.5, "x", None],
    "audit": [False, True, "no", 0, None],
    "seed": [0, 2**63, -(2**63) - 1, 0.5, "x", None],
    "top_p": [1, 0, 1.1],
    "top_k": [5, -1, -2, 2**31, 1.5],
    "min_p": [0.5, -0.1, 1.1],
    "repetition_penalty": [1, 0, -1, 101],
    "presence_penalty": [1, -2.1, 2.1],
    "frequency_penalty": [1, -2.1, 2.1],
    "stop": ["a", ["a"], "", [""], ["a"] * 17, "a" * 257, 5, [5], {}, [], None],
    "stop_token_ids": [[5], [-1], ["a"], 5, [5] * 1025],
    "include_stop_str_in_output": [True, "maybe", 1, "true"],
    "min_tokens": [0, -1],
    "logit_bias": [
        *({}, {"5": 1}, {"a": 1}, {"-1": 1}, {"": 1}, {"5": 101}, {"5": "1"}, {"5": None}, None),
        *([5], {str(token): 1 for token in range(1025)}),
    ],
    "mode": ["ar", "fast", None],
    "service_tier": ["auto", "flex", "scale", 1, None],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "yaml"},
        *({}, "json", 5, None),
    ],
    "structured_outputs": [{"regex": "a"}, {}, {"jsn": 1}, {"json": 5}, None],
    "guided_json": [{}, True, 5, "", "x" * 65_537],
    "guided_regex": ["a", "", 5],
    "guided_grammar": ['start: "a"', "", 5],
    "guided_choice": [["a"], [], [""], "a", ["a"] * 1025, None],
    "prompt_logprobs": [None, 0, 20, 21, -1, True],
    "use_beam_search": [False, True],
    "ignore_eos": [False, True, 0, None],
    "length_penalty": [1, 1.0, 2, True, None],
    "allowed_token_ids": [None, [40], [], [-1], ["40"], 40],
    "bad_words": [[], ["x"], [""], [" "], ["a" * 257], ["a"] * 129, "x", None],
    "skip_special_tokens": [True, False, 1, None],
    "add_special_tokens": [True, False, "yes", None],
    "truncate_prompt_tokens": [None, 5, -1, 0, -2, 1.5, "5", True],
    "truncation_side": ["left", "right", "middle", None],
    "return_token_ids": [True, 1, None],
    "return_tokens_as_token_ids": [True, 1, None],
    "cache_salt": ["x", "", "x" * 1025, 5, None],
    "request_id": ["a-1", "", "a b", 5, None],
    "session_id": ["x", 5, None],
    "add_generation_prompt": [True, False, "x", None],
    "continue_final_message": [True, False, "x", None],
    "chat_template": [None, "x"],
    "documents": [[], [{}], None],
    "priority": [0, 1, False, None],
    "thinking_token_budget": [-1, -2, 1.5, "5", True, None],
    "vllm_xargs": [{}, {"a": 1}, None],
    "best_of": [1, 0, "1", None],
    "suffix": ["", "x", None],
    "prompt": [
        *("a", "", ["a"], [""], [], [5], [-1], [5, "a"], ["a", 5], [[5]], [[]], {}, None),
        *(["a", ""], [[5], []]),
    ],
    "echo": [True, "yes", None],
    "logprobs": [0, 1, 6, True, None],
    "top_logprobs": [0, 21, None],
    "messages": [
        *([], [{"role": "robot", "content": "x"}], [{"role": "user", "content": ""}], None),
        [{"role": "user"}],
    ],
    "user": ["someone", "", None, 5],
    "deadline_ms": [0.5, 1000, 86_400_000, 86_400_001, 0, -1, "5", True, [], None],
    "modalities": [["text"], ["audio"], None],
    "audio": [None, {}],
    "functions": [[], [{}]],
    "web_search_options": [None, {}],
    "tool_choice": ["none", "auto", "sometimes", 5, None],
    "tools": [[], [{}], None],
    "include_reasoning": [True, False, None, 1],
    "reasoning_effort": ["none", "high", "huge", 5, None],
    "verbosity": ["medium", "low"],
}
"""Valid and invalid values of each field; validity depends neither on the model nor the limits."""


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in BASES for field in VALUES])
async def test_exactly_the_described_values_are_accepted(client, document, path, field):
    """A field of the other endpoint is unknown here and therefore ignored."""
    described = body_of(document, path)
    for value in VALUES[field]:
        body = {**BASES[path], field: value}
        response = await client.post(path, json=body)
        assert response.status_code in (200, 400), response.text
        assert described.is_valid(body) == (response.status_code == 200), (value, response.text)
        if response.status_code == 400:
            message = client.error_of(response, 400, field)
            assert message.startswith(field)
            assert len(message) < 400
