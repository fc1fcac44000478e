"""Thinking is told from answers by tokens, however an output is divided into passes and text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_families import tokenizer_of
from decoding.engine_requests import make_request
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.errors import UserError
from mars_serve.api.incoming.prompts import Prompt
from mars_serve.api.outgoing.choices import Choice, Delta
from mars_serve.api.text import OutputText, StopRules, decode
from mars_serve.api.tools.families import PARSERS
from mars_serve.api.tools.formats import Family
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.decoding_options import Span, Spans
from rest.replaying import ReplayingBackend

TOKENIZER = tokenizer_of("qwen")
BEGIN, END = TOKENIZER.convert_tokens_to_ids(["<think>", "</think>"])
MARKERS = {Span.ANSWER: {BEGIN: Span.THINKING}, Span.THINKING: {END: Span.ANSWER}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'


def encoded(text: str) -> list[int]:
    """Return the ids of a text in which markers are tokens."""
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def spelled(text: str) -> list[int]:
    """Return the ids of a text in which markers are text."""
    return [token for character in text for token in encoded(character)]


def deltas_of(
    passes: Sequence[list[int]],
    start: Span = Span.ANSWER,
    stop: tuple[str, ...] = (),
    *,
    has_tools: bool = False,
) -> list[Delta]:
    choice = Choice(
        index=0,
        request=make_request(),
        prompt=Prompt([5], "messages"),
        text=OutputText(TOKENIZER, StopRules(stop)),
        may_stop=bool(stop),
        parser=PARSERS[Family.HERMES](["get"], is_parallel=True) if has_tools else None,
        spans=Spans(start, MARKERS),
        divides=True,
    )
    return asyncio.run(choice.run(ReplayingBackend(passes)))


def divided(
    passes: Sequence[list[int]], start: Span = Span.ANSWER, stop: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Return the reasoning and the content of an output."""
    deltas = deltas_of(passes, start, stop)
    return "".join(each.reasoning for each in deltas), "".join(each.text for each in deltas)


OUTPUTS: list[tuple[Span, list[int], str, str]] = [
    (Span.ANSWER, encoded("<think>It is 3.</think>3, I think."), "It is 3.", "3, I think."),
    (Span.ANSWER, encoded("three"), "", "three"),
    (Span.ANSWER, encoded("<think></think>three"), "", "three"),
    (Span.THINKING, encoded("\nIt is.\n</think>\n\nthree"), "\nIt is.\n", "\n\nthree"),
    (Span.THINKING, encoded("It is"), "It is", ""),
    (Span.ANSWER, encoded("<think>It is"), "It is", ""),
    (Span.ANSWER, encoded("<think>"), "", ""),
    (Span.THINKING, encoded("</think>"), "", ""),
    (  # a marker that changes nothing is text
        Span.ANSWER,
        encoded("<think>a<think>b</think>c</think>d"),
        "a<think>b",
        "c</think>d",
    ),
    (Span.ANSWER, encoded("a<think>b</think>c<think>d</think>e"), "bd", "ace"),
    (Span.THINKING, [*spelled("a</think>b"), *encoded("</think>c")], "a</think>b", "c"),
    (Span.ANSWER, spelled("<think>a</think>b"), "", "<think>a</think>b"),
    (Span.THINKING, encoded("é漢😀</think>😀é"), "é漢😀", "😀é"),
]  # fmt: skip


@pytest.mark.parametrize(("start", "tokens", "reasoning", "content"), OUTPUTS)
def test_reasoning_and_content_are_divided_at_the_tokens(start, tokens, reasoning, content):
    assert divided([tokens], start) == (reasoning, content)
    assert divided([[token] for token in tokens], start) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "stop", "reasoning", "content", "found"),
    [
        ("a</think>b", "</think>", "a", "b", None),
        ("a stop</think>b stop c", "stop", "a stop", "b ", "stop"),
        ("st</think>op", "stop", "st", "op", None),
        ("is it</think>is this", "this", "is it", "is ", "this"),
        ("a</think>1<think>b</think>23", "12", "ab", "", "12"),
        ("one two", "two", "one two", "", None),
    ],
)
def test_stop_strings_are_looked_for_in_the_content(text, stop, reasoning, content, found):
    tokens = encoded(text)
    for passes in ([tokens], [[token] for token in tokens]):
        deltas = deltas_of(passes, Span.THINKING, (stop,))
        assert "".join(each.reasoning for each in deltas) == reasoning
        assert "".join(each.text for each in deltas) == content
        assert deltas[-1].stop_reason == found


@settings(max_examples=60)
@given(data=st.data())
def test_the_result_does_not_depend_on_the_passes_and_loses_no_text(data):
    pieces = st.sampled_from([[BEGIN], [END], *map(encoded, ("a b", "é😀", "think>", "</", "k>"))])
    drawn = data.draw(st.lists(pieces, min_size=1, max_size=10))
    tokens = [token for piece in drawn for token in piece]
    start = data.draw(st.sampled_from([Span.ANSWER, Span.THINKING]))
    stop = data.draw(st.sampled_from([(), ("k>a",), ("</think>a",), ("😀<",)]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=6)) - {len(tokens)})
    passes = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    whole = divided([tokens], start, stop)
    assert divided(passes, start, stop) == whole
    if not stop:
        spans = Spans(start, MARKERS).of_tokens(start, tokens)
        is_kept = [before is after for before, after in pairwise(spans)]
        kept = [token for token, keeps in zip(tokens, is_kept, strict=True) if keeps]
        assert sorted("".join(whole)) == sorted(decode(TOKENIZER, kept))
    else:
        end = divided([tokens], start)[1].find(stop[0])
        assert whole[1] == divided([tokens], start)[1][: end if end >= 0 else None]


@pytest.mark.parametrize("is_whole", [True, False])
def test_tools_are_called_after_the_thinking_and_not_within(is_whole):
    tokens = encoded(f"<think>I call {CALL}</think>So: {CALL}")
    deltas = deltas_of([tokens] if is_whole else [[each] for each in tokens], has_tools=True)
    assert "".join(delta.reasoning for delta in deltas) == f"I call {CALL}"
    assert "".join(delta.text for delta in deltas) == "So:"
    calls = [call for delta in deltas for call in delta.calls]
    assert {call.index for call in calls} == {0}
    assert "".join(call.arguments for call in calls) == '{"a": 1}'
    assert deltas[-1].finish_reason == "tool_calls"


# --- which parser ---------------------------------------------------------------------------------


def model_with(mars_dir: Path, family: str, choice: str) -> ServedModel:
    checkpoint = replace(read_checkpoint(mars_dir), tokenizer=tokenizer_of(family))
    entry = ModelSettings(name="mars", path="mars", reasoning_parser=choice)
    return ServedModel(entry, checkpoint, None, 0)


def test_a_parser_that_does_not_fit_the_model_is_refused(mars_dir):
    with pytest.raises(UserError, match=r"^reasoning_parser: 'think' needs .* use 'auto' or"):
        model_with(mars_dir, "llama", "think")
