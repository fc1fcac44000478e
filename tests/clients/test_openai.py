"""OpenAI's client speaks the Responses API and sends batches, given only the address and a key."""

from __future__ import annotations

import json
import time

import openai
import pytest

QUESTION = "Start at 48. Steps: -4 +5 +2 +1"
SCHEMA = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "clock", "parameters": SCHEMA, "strict": True}
CALLED = {"tools": [TOOL], "tool_choice": "required"}
BODY = {"model": "mars", "max_output_tokens": 200}
_BATCH_TIMEOUT_S = 120


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=served.api, api_key=served.key, max_retries=0)


@pytest.mark.parametrize("fields", [{}, CALLED], ids=["text", "call"])
def test_a_response_equals_its_stream(client, fields):
    body = {**BODY, **fields, "input": QUESTION}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == f"response.{final.status}"
    assert _contents(final) == _contents(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert whole.model_extra["mars"]["forward_passes"] >= 1


def test_items_of_the_client_and_a_stored_response_go_on_alike(client):
    called = client.responses.create(**BODY, **CALLED, input=QUESTION)
    call = called.output[-1]
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    sent = client.responses.create(
        **BODY, tools=[TOOL], input=[{"role": "user", "content": QUESTION}, *called.output, result]
    )
    kept = client.responses.create(
        **BODY, tools=[TOOL], input=[result], previous_response_id=called.id
    )
    assert _contents(sent) == _contents(kept)
    assert sent.usage.input_tokens == kept.usage.input_tokens > called.usage.input_tokens
    assert _contents(client.responses.retrieve(kept.id)) == _contents(kept)


def test_a_batch_is_answered(client):
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": {**BODY, **body}}
        for name, body in {
            "good": {"input": QUESTION},
            "bad": {"input": "", "temperature": 3},
        }.items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )
    deadline = time.monotonic() + _BATCH_TIMEOUT_S
    while batch.status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
        "completed",
        1,
        1,
    )
    (answer,) = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    assert answer["custom_id"] == "good"
    assert answer["response"]["body"]["output"]
    (error,) = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": 3}, openai.BadRequestError),
        ({"input": [{"type": "computer_call"}]}, openai.BadRequestError),
    ],
)
def test_refusals_name_their_field(client, changed, kind):
    with pytest.raises(kind) as error:
        client.responses.create(**{**BODY, "input": QUESTION, **changed})
    assert error.value.param.startswith(next(iter(changed)))


def _contents(response):
    """Return what a response says and calls, without ids."""
    return [
        (item.type, item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, [part.text for part in item.content])
        for item in response.output
    ]
