"""litellm works with the server, given only the address and a key."""

from __future__ import annotations

import json

import litellm
import pytest

QUESTION = [{"role": "user", "content": "Start at 48. Steps: -4 +5 +2 +1"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def options(served):
    return {
        "model": "openai/mars",
        "api_base": served.api,
        "api_key": served.key,
        "max_tokens": 24,
        "num_retries": 0,
    }


def test_a_chat_equals_its_stream(options):
    whole = litellm.completion(messages=QUESTION, **options)
    assert whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(litellm.completion(messages=QUESTION, stream=True, **options))
    added = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert added.choices[0].message.content == whole.choices[0].message.content
    assert added.choices[0].finish_reason == whole.choices[0].finish_reason


def test_fields_beyond_openais_are_sent_and_returned(options):
    made = litellm.completion(messages=QUESTION, extra_body={"mode": "ar"}, **options)
    assert made.model_extra["mars"]["forward_passes"] == made.usage.completion_tokens


def test_completions_of_two_prompts(options):
    options["model"] = "text-completion-openai/mars"
    made = litellm.text_completion(prompt=["Add 2 and 4 cups", "Count a box"], **options)
    assert [choice.index for choice in made.choices] == [0, 1]
    assert all(choice.text for choice in made.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(options, stream):
    options |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    made = litellm.completion(messages=QUESTION, stream=stream, **options)
    if stream:
        made = litellm.stream_chunk_builder(list(made), messages=QUESTION)
    call = made.choices[0].message.tool_calls[0]
    assert call.function.name == "clock"
    assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
    assert made.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"model": "openai/nobody"}, litellm.NotFoundError),
        ({"temperature": 3}, litellm.BadRequestError),
        ({"max_tokens": 10**6}, litellm.BadRequestError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
    ],
)
def test_refusals_have_their_class(options, changed, kind):
    with pytest.raises(kind):
        litellm.completion(messages=QUESTION, **{**options, **changed})
