import json

import pytest

from mars_platform.data.conversations import parse_conversation
from mars_platform.errors import UserError

USER = {"role": "user", "content": "Count"}
ANSWER = {"role": "assistant", "content": "one"}


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_turns_of_every_role_and_other_columns_are_kept():
    roles = ["system", "developer", "user", "tool", "assistant"]
    turns = [{"role": role, "content": "x"} for role in roles]
    parsed = parse_conversation(json.dumps({"messages": turns, "answer": "1"}))
    assert [turn.model_dump() for turn in parsed.messages] == turns
    assert parsed.model_extra == {"answer": "1"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "empty line"),
        (" \t\n", "empty line"),
        ("{", "not valid JSON (Expecting property name enclosed in double quotes at column 2)"),
        ('{"messages": []} x', "not valid JSON (Extra data at column 18)"),
        ("9" * 5000, "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "a row must be an object"),
        ("null", "a row must be an object"),
        ("{}", "messages: required, but not given"),
        ('{"messages": 3}', "messages: "),
        ('{"messages": []}', "the last turn must have the role 'assistant'"),
        ('{"messages": ["hello"]}', "messages.0: "),
        ('{"messages": [{"content": "x"}]}', "messages.0.role: required, but not given"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content: required, but not given"),
    ],
)
def test_an_unusable_line_is_refused(text, named):
    assert named in refusal(parse_conversation, text)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([USER], "the last turn must have the role 'assistant'"),
        ([USER, ANSWER, USER], "the last turn must have the role 'assistant'"),
        ([ANSWER], "an assistant turn needs a turn before it"),
        ([USER, {**ANSWER, "content": ""}], "messages.1.content: "),
        ([{**USER, "content": None}, ANSWER], "messages.0.content: "),
        ([{**USER, "content": 3}, ANSWER], "messages.0.content: "),
        ([USER, {**ANSWER, "content": "\ud800"}], "messages.1.content: "),
        ([{**USER, "role": "human"}, ANSWER], "messages.0.role: "),
    ],
)
def test_unusable_messages_are_refused(messages, named):
    assert named in refusal(parse_conversation, json.dumps({"messages": messages}))
