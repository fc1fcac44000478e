"""The spans of a request's outputs, and the refusal of thresholds of spans that cannot occur."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from chat_families import tokenizer_of
from mars_platform.checkpoint.directory import read_checkpoint
from mars_serve.api.errors import ApiError
from mars_serve.api.incoming.spans import spans_of
from mars_serve.api.incoming.structure import structure_of
from mars_serve.api.messages import Tools
from mars_serve.api.protocol import ChatCompletionRequest
from mars_serve.api.tools import RequestTools, prepare_tools
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.decoding_options import Span, Spans

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
    tools = tools_of(model) if has_tools else None
    return spans_of(body, model, prompt, tools, structure_of(body))


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
    assert spans_of(body, model, tokens, None, None).start is start


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


def test_an_output_with_a_grammar_is_all_answer(make_model):
    model = make_model("qwen")
    assert found_in(model, guided_regex="a+") is None
    spans = found_in(model, guided_regex="a+", confidence_threshold={"answer": 0.5})
    assert set(walked(spans, model, "<think>a</think>")) == {ANSWER}


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


def test_thinking_beside_a_grammar_is_refused(make_model):
    message = r"^confidence_threshold: 'thinking' cannot occur beside guided_regex.* leave one"
    with pytest.raises(ApiError, match=message):
        found_in(make_model("qwen"), guided_regex="a", confidence_threshold={"thinking": 1})


def test_thinking_is_refused_where_its_parser_is_off(make_model):
    model = make_model("qwen", reasoning_parser="none")
    with pytest.raises(ApiError, match=r"'thinking' needs .* has reasoning_parser 'none'"):
        found_in(model, confidence_threshold={"thinking": 1})
