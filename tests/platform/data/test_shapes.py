import json

import pytest

from mars_platform.data.conversations import validate_conversation
from mars_platform.errors import UserError
from row_shapes import CALLED, CALLED_ROWS, PLAIN, PLAIN_ROWS, SHORT_ROWS, TOOLS


def told(row, columns=None):
    found = validate_conversation(json.loads(json.dumps(row)), columns or {})
    return [turn.as_message() for turn in found.messages], found.tools, found.shape


@pytest.mark.parametrize("name", PLAIN_ROWS)
def test_every_shape_of_a_conversation_becomes_the_same(name):
    assert told(PLAIN_ROWS[name])[:2] == (PLAIN, None)


@pytest.mark.parametrize("name", CALLED_ROWS)
def test_every_shape_of_calls_becomes_the_same(name):
    assert told(CALLED_ROWS[name])[:2] == (CALLED, TOOLS)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("messages", "messages"),
        ("prompt and completion", "prompt and completion"),
        ("alpaca", "alpaca instructions"),
    ],
)
def test_one_question_is_recognised_in_every_shape(name, shape):
    assert told(SHORT_ROWS[name]) == (PLAIN[1:3], None, shape)


def test_a_system_turn_counts_more_than_the_column_and_an_empty_list_of_calls_is_none():
    turns = [{**turn, "tool_calls": []} for turn in PLAIN]
    assert told({"messages": turns, "system": "Be long."})[0] == PLAIN
    assert told({"messages": PLAIN[1:], "system": ""})[0] == PLAIN[1:]


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"chat": PLAIN}, {"messages": "chat"}),
        ({"conversation": json.dumps(PLAIN)}, {}),
        ({"chat": PLAIN, "messages": "something else"}, {"messages": "chat"}),
        ({"q": PLAIN[:-1], "a": "4", "messages": []}, {"prompt": "q", "completion": "a"}),
        (
            {"messages": PLAIN[:-1], "instruction": "4"},
            {"prompt": "messages", "completion": "instruction"},
        ),
    ],
)
def test_columns_are_read_by_the_names_of_the_recipe(row, columns):
    assert told(row, columns)[0] == PLAIN


def test_an_answer_may_be_the_completion_as_well():
    columns = {"prompt": "question", "completion": "answer", "answer": "answer"}
    row = {"question": "Add", "answer": "3 #### 3"}
    assert validate_conversation(row, columns).model_extra["answer"] == "3 #### 3"
    del columns["answer"]
    assert "answer" not in validate_conversation(row, columns).model_extra


def test_results_without_ids_belong_to_the_calls_in_turn():
    messages = CALLED_ROWS["calls without ids"]["messages"]
    twice, _, _ = told({"messages": [*messages, *messages]})
    ids = [turn["tool_call_id"] for turn in twice if turn["role"] == "tool"]
    assert ids == ["call_0", "call_1", "call_2", "call_3"]


PARTS = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {}}]
HUMAN = {"from": "human", "value": "x"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (
            {"text": "Hello"},
            "no conversation: filled columns are text; a text does not say which part",
        ),
        ({"q": "x", "a": "y"}, "filled columns are q, a; known are messages, "),
        (
            {"messages": [{"role": "user", "content": PARTS}]},
            "messages.0.content.1: a part of type 'im",
        ),
        (
            {"messages": [{"role": "user", "content": [3]}]},
            "messages.0.content.0: a part of type 'int'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": 3}]}]},
            "messages.0.content.0: a part",
        ),
        ({"conversations": [HUMAN]}, "the last turn must have the role 'assistant'"),
        (
            {"conversations": [HUMAN, {"from": "function_call", "value": "{"}]},
            "messages.1.tool_calls: not valid JSON",
        ),
        (
            {"conversations": [HUMAN, {"from": "function_call", "value": "[3]"}]},
            "messages.1.tool_calls.0: ",
        ),
        (
            {"conversations": [HUMAN, {"from": "gpt", "value": ""}]},
            "give a text or leave the row out (got '') (in a row read as sharegpt conversations)",
        ),
        ({"conversations": [HUMAN, {"from": ["gpt"], "value": "x"}]}, "messages.1.role: "),
        ({"instruction": "x", "output": "y", "history": ["a"]}, "history: must be a list of pairs"),
        ({"instruction": 3, "output": "y"}, "messages.0.content: "),
        ({"prompt": {"a": 1}, "completion": "y"}, "messages.0.content: "),
        ({"messages": "Hello"}, "messages: not valid JSON"),
        ({"messages": PLAIN, "tools": "["}, "tools: not valid JSON"),
        ({"messages": PLAIN, "tools": {"name": "f"}}, "tools: "),
        ({"messages": PLAIN, "chat_template_kwargs": "x"}, "chat_template_kwargs: not valid JSON"),
    ],
)
def test_a_row_without_a_usable_conversation_is_refused(row, named):
    with pytest.raises(UserError) as caught:
        told(row)
    assert named in str(caught.value)


def test_a_column_that_is_missing_is_named_with_those_that_are_there():
    with pytest.raises(UserError) as caught:
        told({"chats": PLAIN, "id": 3}, {"messages": "chat", "tools": "functions"})
    assert str(caught.value) == "data.columns.messages: no column 'chat' among chats, id"
