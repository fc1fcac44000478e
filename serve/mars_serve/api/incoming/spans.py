"""Finds the spans that a request's outputs are divided into, and checks the thresholds by span."""

from __future__ import annotations

from collections.abc import Sequence

from mars_platform.data.thinking import ThinkingTokens
from mars_serve.api.errors import invalid_value, unsupported_value
from mars_serve.api.incoming.structure import Structure
from mars_serve.api.protocol import GenerationRequest
from mars_serve.api.tools import RequestTools
from mars_serve.config.served import ServedModel
from mars_serve.engine.decoding_options import Span, Spans

_FIELD = "confidence_threshold"


def spans_of(
    body: GenerationRequest,
    model: ServedModel,
    prompt: Sequence[int],
    tools: RequestTools | None,
    structure: Structure | None,
) -> Spans | None:
    """Return the spans of a prompt's outputs, with the thresholds that the body asks for.

    There are none if it asks for none and the model does not think. A template may have begun the
    thinking in the prompt already. An output with a grammar holds no thinking: grammars begin with
    the output and allow no token that begins or ends thinking.

    Raises:
        ApiError: status 400: the body asks for a threshold of a span that no output can have.
    """
    asked = body.confidence_threshold if isinstance(body.confidence_threshold, dict) else {}
    thinking = model.thinking if structure is None else None
    if not asked and thinking is None:
        return None
    if Span.THINKING in asked:
        _check_thinking(model, structure)
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


def _span_behind(prompt: Sequence[int], thinking: ThinkingTokens) -> Span:
    """Return the span that a prompt leads to, which its last marker tells."""
    backwards = list(reversed(prompt))
    if thinking.begin not in backwards:
        return Span.ANSWER
    behind = backwards[: backwards.index(thinking.begin)]
    return Span.ANSWER if thinking.end in behind else Span.THINKING


def _check_thinking(model: ServedModel, structure: Structure | None) -> None:
    if model.thinking is None:
        reason = "has no <think> in its chat template, or has reasoning_parser 'none'"
        raise unsupported_value(
            _FIELD,
            "'thinking' needs a model that marks its thinking with tokens, and "
            f"{model.settings.name!r} {reason}; leave it out",
        )
    if structure is not None:
        reason = f"'thinking' cannot occur beside {structure.field}, whose grammar begins at once"
        raise invalid_value(_FIELD, f"{reason}; leave one of the two out")


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
