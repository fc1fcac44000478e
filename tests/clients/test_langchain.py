"""langchain-openai works with the server, given only the address and a key."""

from __future__ import annotations

from typing import Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "Start at 48. Steps: -4 +5 +2 +1"


class Answer(BaseModel):
    """The form of a structured answer."""

    value: Literal[1, 22]
    sure: bool


@tool
def clock(zone: Literal["UTC", "CET"]) -> str:
    """The time in a zone."""
    return f"noon {zone}"


@pytest.fixture
def chat(served):
    return ChatOpenAI(
        model="mars",
        base_url=served.api,
        api_key=served.key,
        max_tokens=200,
        temperature=0,
        max_retries=0,
        stream_usage=True,
    )


def test_a_chat_its_stream_and_a_batch_agree(chat):
    whole = chat.invoke([SystemMessage("Count."), HumanMessage(QUESTION)])
    assert whole.content
    assert whole.usage_metadata["total_tokens"] > 0
    streamed = None
    for chunk in chat.stream([SystemMessage("Count."), HumanMessage(QUESTION)]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == whole.content
    assert streamed.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    both = chat.batch([QUESTION, "Add 2 and 4 cups"])
    assert [each.content for each in both] == [
        chat.invoke(each).content for each in (QUESTION, "Add 2 and 4 cups")
    ]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_parsed_into_the_model(chat, method):
    made = chat.with_structured_output(Answer, method=method, strict=True).invoke(QUESTION)
    assert isinstance(made, Answer)


def test_a_tool_is_called_and_its_result_goes_back(chat):
    called = chat.bind_tools([clock], tool_choice="required").invoke(QUESTION)
    assert isinstance(called, AIMessage)
    call = called.tool_calls[0]
    assert call["name"] == "clock"
    result = ToolMessage(clock.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.bind_tools([clock]).invoke([HumanMessage(QUESTION), called, result]).content != ""
