"""Finds the spans of a request's outputs and their thinking, and checks what is asked for them."""

from collections.abc import Sequence

from mars_platform.data.thinking import ThinkingTokens
from mars_serve.api.errors import invalid_value, unsupported_value
from mars_serve.api.incoming.prompts import template_kwargs
from mars_serve.api.incoming.structure import Structure
from mars_serve.api.protocol import ChatCompletionRequest, GenerationRequest
from mars_serve.api.tools import RequestTools
from mars_serve.config.served import ServedModel
from mars_serve.engine.decoding_options import Span, Spans, Thinking

_FIELD = "confidence_threshold"
_MOST_BEHIND = 8
"""Most tokens from the end of an empty thought to the end of a prompt that holds it."""


def spans_of(
    body: GenerationRequest,
    model: ServedModel,
    prompt: Sequence[int],
    tools: RequestTools | None,
) -> Spans | None:
    """Return the spans of a prompt's outputs, with the thresholds that the body asks for.

    There are none if it asks for none and the model does not think. A template may have begun the
    thinking in the prompt already.

    Raises:
        ApiError: status 400: the body asks for a threshold of a span that no output can have.
    """
    asked = body.confidence_threshold if isinstance(body.confidence_threshold, dict) else {}
    thinking = model.thinking
    if not asked and thinking is None:
        return None
    if Span.THINKING in asked:
        _check_thinking(model, _FIELD, "'thinking'")
    if Span.TOOL_ARGUMENTS in asked:
        _check_calls(tools)
    calls = tools.call_tokens if tools else None
    markers: dict[Span, dict[int, Span]] = {span: {} for span in Span}
    if calls is not None:
        markers[Span.ANSWER][calls.begin] = Span.TOOL_ARGUMENTS
        if calls.end is not None:
            markers[Span.TOOL_ARGUMENTS][calls.end] = Span.ANSWER
    if thinking is None:
        return Spans(Span.ANSWER, markers, asked)
    markers[Span.ANSWER][thinking.begin] = Span.THINKING
    markers[Span.TOOL_ARGUMENTS][thinking.begin] = Span.THINKING
    markers[Span.THINKING][thinking.end] = Span.ANSWER
    return Spans(_span_behind(prompt, thinking), markers, asked)


def thinking_of(
    body: GenerationRequest, model: ServedModel, prompt: Sequence[int], structure: Structure | None
) -> Thinking | None:
    """Return how the thinking of a prompt's outputs is bounded; None if nothing bounds it.

    A grammar holds behind it. Where the prompt leaves open whether the model thinks, the model may
    begin to in its first token.

    Raises:
        ApiError: status 400: the body asks for a budget, and the model does not mark its thinking.
    """
    budget = body.thinking_token_budget
    budget = None if budget == -1 else budget
    if budget is not None:
        _check_thinking(model, "thinking_token_budget", "a budget")
    thinking = model.thinking
    if thinking is None or (structure is None and budget is None):
        return None
    return Thinking(
        thinking.begin,
        thinking.end,
        has_begun=_span_behind(prompt, thinking) is Span.THINKING,
        may_begin=_may_begin(body, model, prompt, thinking),
        budget=budget,
    )


def _may_begin(
    body: GenerationRequest, model: ServedModel, prompt: Sequence[int], thinking: ThinkingTokens
) -> bool:
    """Return whether a grammar lets an output begin with thinking.

    A completion's does not, and no thinking belongs into an answer that goes on, or behind the
    empty thinking with which templates say that there is to be none.
    """
    if not isinstance(body, ChatCompletionRequest) or body.continue_final_message:
        return False
    given, last = template_kwargs(body, model), list(prompt[-_MOST_BEHIND:])
    if given.get("enable_thinking") is False or given.get("thinking") is False:
        return False
    behind = last[last.index(thinking.end) + 1 :] if thinking.end in last else last
    return behind == last or bool(model.checkpoint.tokenizer.decode(behind).strip())


def _span_behind(prompt: Sequence[int], thinking: ThinkingTokens) -> Span:
    """Return the span that a prompt leads to, which its last marker tells."""
    backwards = list(reversed(prompt))
    if thinking.begin not in backwards:
        return Span.ANSWER
    behind = backwards[: backwards.index(thinking.begin)]
    return Span.ANSWER if thinking.end in behind else Span.THINKING


def _check_thinking(model: ServedModel, field: str, subject: str) -> None:
    if model.thinking is None:
        reason = "has no <think> in its chat template, or has reasoning_parser 'none'"
        raise unsupported_value(
            field,
            f"{subject} needs a model that marks its thinking with tokens, and "
            f"{model.settings.name!r} {reason}; leave it out",
        )


def _check_calls(tools: RequestTools | None) -> None:
    if tools is None:
        reason = "'tool_arguments' needs tools that the model may call; give some, or leave it out"
        raise invalid_value(_FIELD, reason)
    if tools.call_tokens is None:
        raise unsupported_value(
            _FIELD,
            "'tool_arguments' needs calls that are marked by tokens, and this model's, in the "
            f"format {tools.form.family.value!r}, are not; leave it out: here calls count as "
            "'answer'",
        )
