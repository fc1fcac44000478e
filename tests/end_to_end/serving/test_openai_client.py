"""OpenAI's official client talks to the real server as if it were OpenAI's."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "Start at 48. Steps: -4 +5 +2 +1"}]


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)
    metric: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {**Weather.model_json_schema(), "additionalProperties": False},
    },
}
OTHER = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}

NAMED = {"type": "function", "function": {"name": "clock"}}


def ask(client, **options):
    body = {"model": "mars", "messages": QUESTION, "max_tokens": 24, **options}
    return client.chat.completions.create(**body)


async def test_the_asynchronous_client_and_streams_give_the_same_text(server, keys, client):
    text = ask(client).choices[0].message.content
    assert text
    async with openai.AsyncOpenAI(
        base_url=f"{server}/v1", api_key=keys.user, max_retries=0
    ) as other:
        assert (await ask(other)).choices[0].message.content == text
        chunks = [chunk async for chunk in await ask(other, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("mode", ["exact", "threshold"])
def test_output_parsed_into_a_model(client, mode):
    made = client.chat.completions.parse(
        model="mars",
        messages=QUESTION,
        response_format=Weather,
        max_tokens=1000,  # a model this weak likes white space
        extra_body={"mode": mode},
    )
    assert isinstance(made.choices[0].message.parsed, Weather)


def test_a_cut_off_output_is_not_parsed(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="mars", messages=QUESTION, response_format=Weather, max_tokens=3
        )


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_tool_is_called_and_its_result_goes_back(client, choice):
    options = {"tools": [TOOL, OTHER], "tool_choice": choice, "max_tokens": 200}
    made = ask(client, **options).choices[0]
    assert made.finish_reason == "tool_calls"
    assert made.message.content is None
    call = made.message.tool_calls[0]
    if choice != "required":
        assert call.function.name == "clock"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        Weather.model_validate(arguments)
    else:
        assert arguments["zone"] in ("UTC", "CET")
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    answer = ask(client, messages=[*QUESTION, made.message, result], tools=[TOOL, OTHER])
    assert answer.choices[0].message.role == "assistant"


def test_streamed_tool_calls_add_up_to_the_unstreamed_ones(client):
    options = {"model": "mars", "messages": QUESTION, "max_tokens": 200}
    options |= {"tools": [TOOL, OTHER], "tool_choice": "required"}
    whole = client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options) as stream:
        events = [event.type for event in stream]
        added = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    assert added.finish_reason == whole.finish_reason
    functions = [
        [(call.function.name, call.function.arguments) for call in each.message.tool_calls]
        for each in (added, whole)
    ]
    assert functions[0] == functions[1]


def test_the_request_id_is_what_the_client_shows(client):
    made = client.chat.completions.with_raw_response.create(
        model="mars", messages=QUESTION, max_tokens=2, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert made.headers["x-request-id"] == "mine-1"
    assert made.parse()._request_id == "mine-1"


@pytest.mark.parametrize(
    ("body", "kind", "param", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"service_tier": "priority"}, openai.PermissionDeniedError, "service_tier", None),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", "invalid_value"),
    ],
)
def test_refusals_arrive_as_the_clients_own_errors(client, body, kind, param, code):
    with pytest.raises(kind) as error:
        ask(client, **body)
    assert error.value.param == param
    assert code in (None, error.value.code)
    assert error.value.type in ("invalid_request_error", "permission_error")
    assert error.value.request_id


def test_keys_arrive_as_the_clients_own_errors(server, keys):
    with (
        openai.OpenAI(base_url=f"{server}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as error,
    ):
        stranger.models.list()
    assert error.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=f"{server}/v1", api_key=keys.slow, max_retries=0) as slow:
        ask(slow, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as limited:
            ask(slow, max_tokens=1)
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60
