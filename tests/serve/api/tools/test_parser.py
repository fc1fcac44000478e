"""Parsing of tool calls in a model's output."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_serve.api.tools import ContentDelta, ToolArguments, ToolEvent, ToolParser, ToolStart
from mars_serve.api.tools.families import PARSERS
from mars_serve.api.tools.formats import Family

UNIT = '{"unit": "C"}'
ODD = '{ "a":"}]\\"<tool_call>\\\\", "b": [{"c": "\\n"}, 1.0]}'
OUTPUTS: list[tuple[Family, str, str, list[tuple[str, str]]]] = [
    (Family.HERMES, "Hello  there.\n", "Hello  there.\n", []),
    (Family.HERMES, " \n ", " \n ", []),
    (Family.HERMES, "1 < 2 <tool <tool_cal", "1 < 2 <tool <tool_cal", []),
    (
        Family.HERMES,
        f'Wait.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {UNIT}}}\n</tool_call>',
        "Wait.",
        [("get_weather", UNIT)],
    ),
    (
        Family.HERMES,
        f'<tool_call>{{"name" :"unknown","arguments":{ODD}}} </tool_call>\n'
        f'<tool_call>\n{{"arguments": {UNIT}, "name": "get_weather"}}\n</tool_call>\n',
        "",
        [("unknown", ODD), ("get_weather", UNIT)],
    ),
    (  # no arguments, arguments as a string, and further keys
        Family.HERMES,
        '<tool_call>{"name": "f"}</tool_call>'
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
        '<tool_call>{"name": "f", "arguments": {}, "id": ["}<"]}</tool_call>and <b>text</b> ',
        "and <b>text</b>",
        [("f", "{}"), ("f", '{"a": 1}'), ("f", "{}")],
    ),
    (  # a forgotten brace and a forgotten end tag
        Family.HERMES,
        f'<tool_call>{{"name": "f", "arguments": {UNIT}</tool_call>'
        f'<tool_call>{{"name": "f", "arguments": {UNIT}}}\n</tool_ca text'
        f'<tool_call>{{"name": "f", "arguments": {UNIT}}}<tool_call>{{"name": "f", "arguments": {{',
        "\n</tool_ca text",
        [("f", UNIT)] * 3 + [("f", "{")],
    ),
    (Family.HERMES, '<tool_call>{"name": "f", "arguments": {}}\n</tool', "", [("f", "{}")]),
    (
        Family.HERMES,
        'A <tool_call>no</tool_call> <tool_call>{"name": 1}</tool_call> <tool_call>{"name": ',
        'A <tool_call>no</tool_call> <tool_call>{"name": 1}</tool_call> <tool_call>{"name": ',
        [],
    ),
    (
        Family.HERMES,
        '<tool_call><tool_call>{"a": <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        '<tool_call><tool_call>{"a": ',
        [("f", "{}")],
    ),
    (  # text that looks like a tag, directly before one
        Family.HERMES,
        '1 <<tool_call>{"name": "f"}</tool_call>2 < <tool_call>{"name": "f"}</tool_call>',
        "1 <2 <",
        [("f", "{}")] * 2,
    ),
    (Family.LLAMA, "The name is {", "The name is {", []),
    (Family.LLAMA, '\n{"name": "Bob", "parameters": {"a": 1}} ok', None, []),
    (Family.LLAMA, '{"a": 1, "b": [', None, []),
    (
        Family.LLAMA,
        f'\n{{"name": "get_weather", "parameters": {UNIT}}}\n',
        "",
        [("get_weather", UNIT)],
    ),
    (
        Family.LLAMA,
        f'<|python_tag|>{{"name": "other", "parameters": {ODD}}}; '
        '{"type": "function", "name": "get-time", "parameters": {}}',
        "",
        [("other", ODD), ("get-time", "{}")],
    ),
    (  # half of a surrogate pair, which no response can hold
        Family.LLAMA,
        r'{"type": "function", "name": "get-time", "parameters": {"a": "\ud800"}}',
        None,
        [],
    ),
    (Family.LLAMA, "<|python_tag|>search.call(1)", "<|python_tag|>search.call(1)", []),
    (Family.LLAMA, '{"name": "get-time", "parameters": {}} ok', " ok", [("get-time", "{}")]),
    (
        Family.MISTRAL_LIST,
        f'So [1]: [TOOL_CALLS] [{{"name": "f", "arguments": {ODD}}}, '
        '{"name": "g", "arguments": {}, "id": "abcdefghi"}]',
        "So [1]:",
        [("f", ODD), ("g", "{}")],
    ),
    (Family.MISTRAL_LIST, '[TOOL_CALLS] [1] [TOOL_CALLS][{"name": ', None, []),
    (
        Family.MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}] [TOOL_CALLS] [1]',
        " [TOOL_CALLS] [1]",
        [("f", "{}")],
    ),
    (Family.MISTRAL_LIST, '[TOOL_CALLS][{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    (
        Family.MISTRAL_NAMED,
        f"[TOOL_CALLS]f{UNIT}[TOOL_CALLS]get-time[ARGS]{{}}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{ODD}\n",
        "",
        [("f", UNIT), ("get-time", "{}"), ("g", ODD)],
    ),
    (Family.MISTRAL_NAMED, "[TOOL_CALLS] no name {} [TOOL_CALLS] f", None, []),
]  # fmt: skip


def parser_of(family: Family, *, is_parallel: bool = True, is_forced: bool = False) -> ToolParser:
    names = ["get_weather", "get-time"]
    return PARSERS[family](names, is_parallel=is_parallel, is_forced=is_forced)


def gather(events: list[ToolEvent]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the calls; check indices and ids on the way."""
    content, calls, ids = "", list[tuple[str, str]](), set[str]()
    for event in events:
        match event:
            case ContentDelta(text):
                assert text
                content += text
            case ToolStart(index, identifier, name):
                assert index == len(calls)
                assert re.fullmatch("call_[0-9a-f]{24}", identifier)
                assert identifier not in ids
                ids.add(identifier)
                calls.append((name, ""))
            case ToolArguments(index, text):
                assert index == len(calls) - 1
                assert text
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


def parse(family: Family, *parts: str) -> tuple[str, list[tuple[str, str]]]:
    parser = parser_of(family)
    events = [event for part in parts for event in parser.push(part, last=False)]
    return gather(events + parser.push("", last=True))


@pytest.mark.parametrize(("family", "text", "content", "calls"), OUTPUTS)
def test_calls_and_content_are_separated(family, text, content, calls):
    expected = (text if content is None else content, calls)
    assert parse(family, text) == expected
    assert parse(family, *text) == expected
    assert gather(parser_of(family).push(text, last=True)) == expected


PIECES = st.sampled_from([
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[", "]", ";", ",",
    '{"name": "f", "arguments": ', '{"name": "get-time", "parameters": ', UNIT, ODD, "}", "{", "f",
    "\n", " ", '"', "\\", "<", "text", '{"name": "f"}', "é", "</tool",
])  # fmt: skip


@settings(max_examples=150)
@given(data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_divided(data):
    family = data.draw(st.sampled_from(list(PARSERS)))
    pieces = data.draw(st.lists(PIECES, max_size=12)) or [data.draw(st.sampled_from(OUTPUTS))[1]]
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(family, text)
    assert parse(family, *parts) == whole
    if not whole[1]:
        assert whole[0] == text  # text that belongs to no call is never lost


def test_only_text_that_may_begin_a_call_is_held():
    parser = parser_of(Family.HERMES)
    assert parser.push("I see", last=False) == [ContentDelta("I see")]
    assert parser.push(" <tool", last=False) == []
    assert parser.push("s> it. <tool_call>\n", last=False) == [ContentDelta(" <tools> it.")]
    assert parser.push('{"name": "f", "argu', last=False) == []
    start, arguments = parser.push('ments": {"a', last=False)
    assert isinstance(start, ToolStart)
    assert (start.index, start.name) == (0, "f")
    assert arguments == ToolArguments(0, '{"a')
    assert parser.num_calls == 1
    assert parser.push('": 1', last=False) == [ToolArguments(0, '": 1')]
    assert parser.push("}}\n</", last=False) == [ToolArguments(0, "}")]
    assert parser.push("tool_call>", last=True) == []


@pytest.mark.parametrize(
    ("family", "name", "text"),
    [
        (Family.HERMES, "f", '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2),
        (Family.LLAMA, "get-time", '{"name": "get-time", "parameters": {}};' * 2),
        (Family.MISTRAL_LIST, "f", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]'),
        (Family.MISTRAL_NAMED, "f", "[TOOL_CALLS]f{}" * 2),
    ],
)
def test_without_parallel_calls_only_the_first_call_counts(family, name, text):
    parser = parser_of(family, is_parallel=False)
    events = [event for char in text for event in parser.push(char, last=False)]
    assert gather(events + parser.push("", last=True)) == ("", [(name, "{}")])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (Family.HERMES, f'<tool_call>\n{{"name": "get-time", "arguments": {ODD}}}\n</tool_call>'),
        (Family.HERMES, f'<tool_call>{{"arguments": {UNIT}, "name": "get-time"}}</tool_call>'),
        (Family.LLAMA, f'{{"name": "get-time", "parameters": {ODD}}}'),
        (Family.MISTRAL_LIST, f'[TOOL_CALLS] [{{"name": "get-time", "arguments": {ODD}}}]'),
        (Family.MISTRAL_NAMED, f"[TOOL_CALLS]get-time{ODD}"),
    ],
)
def test_a_forced_call_is_whole_once_its_arguments_have_ended_and_leaves_no_content(family, text):
    for end in range(len(text) + 1):
        parser = parser_of(family, is_forced=True)
        content, calls = gather(parser.push(text[:end], last=True))
        assert content == ""
        assert parser.num_calls == len(calls)
        assert parser.num_whole == [arguments in (ODD, UNIT) for _, arguments in calls].count(True)
