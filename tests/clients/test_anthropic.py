"""Anthropic's client works with the server, given only the address and a key."""

from __future__ import annotations

import anthropic
import pytest

QUESTION = {"role": "user", "content": "Start at 48. Steps: -4 +5 +2 +1"}
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOL = {"name": "clock", "description": "The time", "input_schema": SCHEMA}
BODY = {"model": "mars", "max_tokens": 24, "messages": [QUESTION]}


@pytest.fixture
def client(served):
    return anthropic.Anthropic(base_url=served.address, api_key=served.key, max_retries=0)


def test_a_message_equals_its_stream(client):
    whole = client.messages.create(**BODY)
    assert whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(**BODY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )
    assert final.usage.cache_read_input_tokens is not None


def test_counted_tokens_are_those_of_the_usage(client):
    body = {**BODY, "system": "Count.", "tools": [TOOL], "tool_choice": {"type": "auto"}}
    usage = client.messages.create(**body).usage
    del body["max_tokens"]
    counted = client.messages.count_tokens(**body).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tool_is_called_and_its_result_goes_back(client, is_streamed):
    body = {**BODY, "tools": [TOOL], "max_tokens": 200, "tool_choice": {"type": "any"}}
    if is_streamed:
        with client.messages.stream(**body) as stream:
            made = stream.get_final_message()
    else:
        made = client.messages.create(**body)
    assert made.stop_reason == "tool_use"
    call = made.content[-1]
    assert call.name == "clock"
    assert call.input["zone"] in ("UTC", "CET")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "noon"}
    turns = [QUESTION, made.to_param(), {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**BODY, "messages": turns, "tools": [TOOL]})
    assert answer.content


def test_the_tool_runner_sends_the_whole_conversation(client):
    ran = []

    def run(zone):
        ran.append(zone)
        return f"noon {zone}"

    tool = anthropic.beta_tool(run, name="clock", description="The time", input_schema=SCHEMA)
    body = {**BODY, "tools": [tool], "max_tokens": 200, "tool_choice": {"type": "any"}}
    first, second = client.beta.messages.tool_runner(**body, max_iterations=2)
    assert ran[0] in ("UTC", "CET")
    first, second = (
        m.usage.input_tokens + m.usage.cache_read_input_tokens for m in (first, second)
    )
    assert second > first, "by default the client would have the server keep the first message"


def test_fields_beyond_anthropics_are_sent_and_returned(client):
    made = client.messages.create(**BODY, extra_body={"mode": "ar"})
    assert made.model_extra["mars"]["forward_passes"] == made.usage.output_tokens


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
        ),
    ],
)
def test_refusals_have_their_class(client, changed, kind):
    with pytest.raises(kind) as error:
        client.messages.create(**{**BODY, **changed})
    assert error.value.body["error"]["message"].startswith(next(iter(changed)))
    assert error.value.request_id


def test_a_wrong_key_is_refused(served):
    client = anthropic.Anthropic(base_url=served.address, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        client.messages.create(**BODY)
