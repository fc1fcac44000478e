"""The form in which chat templates read messages."""

import pytest

from mars_platform.data.template_messages import adapted, reads_thinking

USER = {"role": "user", "content": "Rain?"}


def call(arguments, name="f", identifier="a"):
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def answer(*calls):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"unit": "C", "days": [1.5, null]}', {"unit": "C", "days": [1.5, None]}),
        ({"unit": "C"}, {"unit": "C"}),
        ("", {}),
        ("  ", {}),
        ('{"unit": ', '{"unit": '),  # invalid JSON stays as it is
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
        (r'{"a": "\ud800"}', r'{"a": "\ud800"}'),  # no text can hold half of a pair
        (r'{"a": "\ud83d\ude00"}', {"a": "\U0001f600"}),
    ],
)
def test_valid_arguments_become_objects_and_others_stay_text(given, arguments):
    messages = [USER, answer(call(given))]
    assert adapted(messages, "")[1] == answer(call(arguments))
    assert messages[1] == answer(call(given))


def test_arguments_can_be_text_for_templates_that_join_them():
    messages = [answer(call({"a": "é"}), call('{"a":1}'))]
    assert adapted(messages, "", as_text=True) == [answer(call('{"a": "é"}'), call('{"a":1}'))]


def test_a_tool_result_names_the_called_function():
    calls = answer(call("{}", "f", "a"), call("{}", "g", "b"))
    result = {"role": "tool", "content": "Wet."}
    given = [calls, *({**result, "tool_call_id": each} for each in "bac")]
    given.append({**result, "tool_call_id": "a", "name": "h"})
    assert [each.get("name") for each in adapted(given, "")[1:]] == ["g", "f", None, "h"]


def test_thinking_has_every_name_that_a_template_may_know():
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "Wet?", "name": None}
    names = ("reasoning_content", "reasoning", "thinking")
    expected = {"role": "assistant", "content": "Yes.", **dict.fromkeys(names, "Wet?")}
    assert adapted([turn], "") == [expected]


@pytest.mark.parametrize(
    ("template", "content", "shown"),
    [
        ("{{ m.thinking }}", "<think>\nWet?\n</think>\n\nYes.", ("Wet?", "Yes.")),
        ("{{ m.thinking }}", " <think>Wet?</think>Yes.", ("Wet?", "Yes.")),
        ("{{ m.thinking }}", "<think></think>Yes.", (None, "Yes.")),
        ("{{ m.thinking }}", "Wet?</think>Yes.", (None, "Wet?</think>Yes.")),
        ("{{ m.thinking }}", "So <think>Wet?</think>Yes.", (None, "So <think>Wet?</think>Yes.")),
        ("{{ m.thinking }}</think>", "<think>Wet?</think>Yes.", ("Wet?", "Yes.")),
        ("{{ m.thinking }}</think>", "Wet?\n</think>\n\nYes.", ("Wet?", "Yes.")),
        ("{{ m.content }}", "<think>Wet?</think>", (None, "<think>Wet?</think>")),
    ],
)
def test_thinking_in_a_content_is_told_to_templates_that_know_it_apart(template, content, shown):
    [turn] = adapted([{"role": "assistant", "content": content}], template)
    assert (turn.get("thinking"), turn["content"]) == shown


@pytest.mark.parametrize(
    ("template", "is_read"),
    [
        ("{{ message.reasoning_content }}", True),
        ("{{ m['thinking'] }}", True),
        ('{% if "reasoning" in m %}', True),
        ("{% if thinking %}Show your thinking.{% endif %}{{ 'my reasoning' }}", False),
        ("{# m.thinking #}reasoning_content{{ m.reasoning_effort }}", False),
    ],
)
def test_a_template_asks_for_thinking_by_one_of_the_names(template, is_read):
    assert reads_thinking(template) == is_read
