"""The spans of a request's outputs, and the refusal of thresholds of spans that cannot occur."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from chat_families import tokenizer_of
from mars_platform.checkpoint.directory import read_checkpoint
from mars_serve.api.errors import ApiError
from mars_serve.api.incoming.spans import spans_of, thinking_of
from mars_serve.api.incoming.structure import structure_of
from mars_serve.api.messages import Tools
from mars_serve.api.protocol import ChatCompletionRequest, CompletionRequest
from mars_serve.api.tools import RequestTools, prepare_tools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.decoding_options import Span, Spans, Thinking

USER = {"role": "user", "content": "x"}
TOOLS = [{"type": "function", "function": {"name": "get"}}]
THINKING, ANSWER, ARGUMENTS = Span.THINKING, Span.ANSWER, Span.TOOL_ARGUMENTS


@pytest.fixture(scope="module")
def make_model(mars_dir: Path) -> Any:
    """Make a model with a family's tokenizer."""
    base = read_checkpoint(mars_dir)

    def make(family: str, **fields: Any) -> ServedModel:
        checkpoint = replace(base, tokenizer=tokenizer_of(family))
        return ServedModel(ModelSettings(name="m", path="m", **fields), checkpoint, None, 0)

    return make


def tools_of(model: ServedModel) -> RequestTools | None:
    return prepare_tools(TypeAdapter(Tools).validate_python(TOOLS), None, None, model.checkpoint)


def found_in(model: ServedModel, *, has_tools: bool = False, **fields: Any) -> Spans | None:
    """Return the spans that a chat's output has."""
    body = ChatCompletionRequest(model="m", **{"messages": [USER], **fields})
    prompt = model.prompts.chat(
        [turn.model_dump(include={"role", "content"}) for turn in body.messages],
        template_kwargs=body.chat_template_kwargs,
    )
    return spans_of(body, model, prompt, tools_of(model) if has_tools else None)


def walked(spans: Spans, model: ServedModel, text: str) -> list[Span]:
    """Return the span of each token of a text, in which markers are tokens."""
    tokens = model.checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]
    return spans.of_tokens(spans.start, tokens)[:-1]


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("a<think>\n", THINKING),
        ("a<think>\n\n</think>\n\n", ANSWER),
        ("<think></think>a<think>b", THINKING),
        ("</think>a", ANSWER),
    ],
)
def test_a_template_may_begin_the_thinking(make_model, prompt, start):
    model = make_model("qwen")
    tokens = model.checkpoint.tokenizer(prompt)["input_ids"]
    body = ChatCompletionRequest(model="m", messages=[USER])
    assert spans_of(body, model, tokens, None).start is start


def test_markers_lead_from_span_to_span(make_model):
    model = make_model("qwen")
    spans = found_in(model, has_tools=True, confidence_threshold={"tool_arguments": 1})
    begin, end, call, done = "<think>", "</think>", "<tool_call>", "</tool_call>"
    text = [begin, call, end, done, call, call, end, done, end, call, begin, end]
    expected = [
        *(ANSWER, THINKING, THINKING, ANSWER, ANSWER, ARGUMENTS, ARGUMENTS, ARGUMENTS),
        *(ANSWER, ANSWER, ARGUMENTS, THINKING),
    ]
    assert walked(spans, model, "".join(text)) == expected


def test_calls_without_an_end_token_last_to_the_end(make_model):
    model = make_model("mistral")
    spans = found_in(model, has_tools=True, confidence_threshold={"answer": 0.5})
    found = walked(spans, model, "[INST][TOOL_CALLS][INST][TOOL_CALLS][INST]")
    assert found[-4:] == [ANSWER, ARGUMENTS, ARGUMENTS, ARGUMENTS]
    assert spans.thresholds == {ANSWER: 0.5}


def test_only_models_that_think_have_spans_without_thresholds(make_model):
    assert found_in(make_model("llama")) is None
    assert found_in(make_model("qwen", reasoning_parser="none")) is None
    assert found_in(make_model("qwen"), confidence_threshold=0.5).thresholds == {}


@pytest.mark.parametrize(
    ("prompt", "fields", "has_begun", "may_begin"),
    [
        ("a<think>\n", {}, True, True),
        ("a", {}, False, True),
        ("a<think>b</think>c", {}, False, True),  # the thinking of an earlier turn
        ("a<think>\n\n</think>\n\n", {}, False, False),  # as with enable_thinking: false
        ("a", {"chat_template_kwargs": {"enable_thinking": False}}, False, False),
        ("a", {"continue_final_message": True}, False, False),
    ],
)
def test_a_grammar_waits_for_thinking_that_has_begun_or_may_begin(
    make_model, prompt, fields, has_begun, may_begin
):
    model = make_model("qwen")
    tokens = model.checkpoint.tokenizer(prompt)["input_ids"]
    body = ChatCompletionRequest(model="m", messages=[USER], guided_regex="a", **fields)
    found = thinking_of(body, model, tokens, structure_of(body))
    assert found == Thinking(*dataclasses.astuple(model.thinking), has_begun, may_begin)
    other = CompletionRequest(model="m", prompt="x", guided_regex="a")
    of_completion = thinking_of(other, model, tokens, structure_of(other))
    assert of_completion == replace(found, may_begin=False)
    assert thinking_of(body, make_model("llama"), tokens, structure_of(body)) is None


def test_nothing_bounds_thinking_without_a_grammar_or_a_budget(make_model):
    model = make_model("qwen")
    for fields, budget in (({}, None), ({"thinking_token_budget": -1}, None), ({}, 0), ({}, 7)):
        given = {"thinking_token_budget": budget, **fields}
        body = ChatCompletionRequest(model="m", messages=[USER], **given)
        found = thinking_of(body, model, [5], None)
        assert (found and found.budget) == budget
        assert (found is None) == (budget is None)


@pytest.mark.parametrize(
    ("family", "fields", "has_tools", "message"),
    [
        ("llama", {"thinking": 1}, False, r"'thinking' needs a model that .*; leave it out"),
        ("qwen", {"tool_arguments": 1}, False, r"'tool_arguments' needs tools .* give some"),
        ("llama", {"tool_arguments": 1}, True, r"format 'llama', are not; leave it out"),
    ],
)
def test_spans_that_cannot_occur_are_refused(make_model, family, fields, has_tools, message):
    with pytest.raises(ApiError, match=f"^confidence_threshold: .*{message}") as refusal:
        found_in(make_model(family), has_tools=has_tools, confidence_threshold=fields)
    assert (refusal.value.status, refusal.value.param) == (400, "confidence_threshold")


def test_a_budget_is_refused_where_thinking_is_not_told_from_answers(make_model):
    body = ChatCompletionRequest(model="m", messages=[USER], thinking_token_budget=5)
    with pytest.raises(ApiError, match=r"^thinking_token_budget: a budget needs .*; leave it out"):
        thinking_of(body, make_model("llama"), [5], None)


def test_thinking_is_refused_where_its_parser_is_off(make_model):
    model = make_model("qwen", reasoning_parser="none")
    with pytest.raises(ApiError, match=r"'thinking' needs .* has reasoning_parser 'none'"):
        found_in(model, confidence_threshold={"thinking": 1})
