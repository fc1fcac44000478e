"""Response bodies in OpenAI's shapes; `mars_serve.api.schema` describes them.

Source: OpenAI API reference, "Completions" and "Chat", the objects and their streamed chunks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

from pydantic_core import to_json

from mars_platform import __version__
from mars_serve.api.outgoing.choices import (
    CallPart,
    Choice,
    Delta,
    PassDetails,
    Passes,
    ReportedToken,
)
from mars_serve.api.outgoing.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from mars_serve.api.protocol import ServiceTier, StreamOptions
from mars_serve.api.text import TokenBytes
from mars_serve.config.served import ServedModel
from mars_serve.engine.decoding_options import DecodingOptions, Span

_LISTS_OF_TOKENS = 4
"""Depth of the lists in a response that grow with its tokens: in its choices' log-probabilities."""
_STEP = 256
"""Entries of such a list that are written at once."""


@dataclass(frozen=True)
class ResponseBuilder:
    """Builds the response bodies of one request, whole or as events of a stream."""

    id: str
    is_chat: bool
    model: ServedModel
    choices: list[Choice]
    names: TokenBytes
    tier: ServiceTier | None = None
    """The tier used, if the request gave one."""
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    grammar_field: str | None = None
    """Field of the request that gave a grammar, for error messages."""
    num_prompt_logprobs: int | None = None
    """Likely tokens to report beside each prompt token; None for no report of the prompt's."""
    reports_ids: bool = False
    """Whether the token ids of prompt and output are reported."""
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """Return the body of the whole response; ``deltas`` holds the parts of each choice.

        In a thread it never holds up other threads, however many tokens it reports.
        """
        response = self._response(deltas)
        if self.options.num_logprobs is None and self.num_prompt_logprobs is None:
            return to_json(response)
        return _json_in_steps(response, _LISTS_OF_TOKENS)

    def size_of(self, deltas: Sequence[Sequence[Delta]]) -> int:
        """Return about how many bytes of text take as long as writing the whole response."""
        num_characters = sum(
            len(delta.text) + len(delta.reasoning) for each in deltas for delta in each
        )
        num_reported = sum(len(delta.reported) for each in deltas for delta in each)
        num_reported += sum(len(choice.scored) for choice in self.choices)
        num_likely = max(self.options.num_logprobs or 0, self.options.num_prompt_logprobs or 0)
        return num_characters // 16 + 16 * num_reported * (num_likely + 1)

    def _response(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        return {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": [self._choice(each) for each in deltas],
            **(self._of_prompt(self.choices[0]) if self.is_chat else {}),
            "usage": self.usage(),
            "mars": self._mars_object(self.passes),
        }

    def event(self, delta: Delta) -> dict[str, Any]:
        """Return the stream's event for one forward pass of a choice."""
        entry: dict[str, Any] = {"index": delta.choice.index}
        if self.is_chat:
            entry["delta"] = _chat_delta(delta, self.model.settings.reasoning_fields)
        else:
            entry["text"] = delta.text
        entry["logprobs"] = self._logprobs(delta.choice, delta.reported)
        entry["finish_reason"] = delta.finish_reason
        event = {**self._chunk_head, "choices": [entry]}
        if self.reports_ids:
            entry["token_ids"] = delta.tokens
            if delta.is_first:
                (event if self.is_chat else entry).update(self._of_prompt(delta.choice))
        if self.stream_options.continuous_usage_stats:
            event["usage"] = self.usage()
        elif self.stream_options.include_usage:
            event["usage"] = None
        mars: dict[str, Any] = {"tokens": delta.num_tokens}
        event["mars"] = mars
        if delta.details is not None:
            mars["pass"] = self._pass_object(delta.details)
        if delta.finish_reason is not None:
            entry["stop_reason"] = delta.stop_reason
            mars |= self._mars_object(delta.choice.passes)
        return event

    def _pass_object(self, details: PassDetails) -> dict[str, Any]:
        """Return what a stream's event tells about what its forward pass proposed."""
        return {
            "confidence_threshold": details.threshold,
            "accepted": [self._proposal(*each) for each in details.accepted],
            "rejected": [self._proposal(*each) for each in details.rejected],
        }

    def _proposal(self, token: int, confidence: float) -> dict[str, Any]:
        return {"id": token, "token": self.names.name_of(token), "confidence": confidence}

    def usage_event(self) -> dict[str, Any]:
        """Return the stream's last event, which reports the token counts of all choices."""
        return {**self._chunk_head, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the token counts; a prompt counts once, however many choices share it."""
        prompts = {id(choice.prompt): choice for choice in reversed(self.choices)}.values()
        num_prompt = sum(len(choice.prompt.tokens) for choice in prompts)
        num_output = sum(choice.passes.num_tokens for choice in self.choices)
        num_thinking = sum(choice.passes.num_thinking for choice in self.choices)
        num_cached = sum(choice.passes.num_cached for choice in prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"reasoning_tokens": num_thinking},
        }

    @property
    def passes(self) -> Passes:
        """Totals over the forward passes of all choices."""
        total = Passes()
        for choice in self.choices:
            total.add(choice.passes)
        return total

    @property
    def options(self) -> DecodingOptions:
        """Decoding options of the first choice; those of the others differ only in the seed."""
        return self.choices[0].request.options

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        head = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": _fingerprint(self.model),
        }
        return head if self.tier is None else {**head, "service_tier": self.tier}

    def _choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        last = deltas[-1]
        entry: dict[str, Any] = {"index": last.choice.index}
        if self.is_chat:
            entry["message"] = _message(deltas, self.model.settings.reasoning_fields)
        else:
            entry["text"] = "".join(delta.text for delta in deltas)
        reported = [each for delta in deltas for each in delta.reported]
        entry["logprobs"] = self._logprobs(last.choice, reported)
        entry["finish_reason"] = last.finish_reason
        entry["stop_reason"] = last.stop_reason
        if self.reports_ids:
            entry["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return entry if self.is_chat else {**entry, **self._of_prompt(last.choice)}

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """Return what is reported of a choice's prompt, as vLLM does.

        A completion has it in each choice, a chat beside its choices.
        """
        tokens, found = choice.prompt.tokens, dict[str, Any]()
        if self.num_prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(
                tokens, choice.scored, self.num_prompt_logprobs, self.names
            )
        return {**found, "prompt_token_ids": tokens} if self.reports_ids else found

    def _logprobs(self, choice: Choice, reported: Sequence[ReportedToken]) -> dict[str, Any] | None:
        if choice.request.options.num_logprobs is None:
            return None
        shape = chat_logprobs if self.is_chat else completion_logprobs
        return shape(reported, self.names)

    def _mars_object(self, passes: Passes) -> dict[str, Any]:
        """Return the ``mars`` object, which tells how the choices were decoded."""
        entry = {
            "mode": self.options.mode,
            **_thresholds(passes),
            "forward_passes": passes.num_passes,
            "tokens_per_forward": round(passes.num_tokens / max(passes.num_passes, 1), 4),
        }
        by_span = {span: passes.by_span[span] for span in Span if span in passes.by_span}
        if by_span:
            entry["spans"] = {span: self._span_object(span, each) for span, each in by_span.items()}
        return entry

    def _span_object(self, span: Span, passes: Passes) -> dict[str, Any]:
        """Return what the ``mars`` object tells about a span."""
        spans = self.choices[0].spans
        asked = spans.thresholds.get(span) if spans else None
        return {
            **({} if asked is None else {"requested_confidence_threshold": asked}),
            **_thresholds(passes),
            "tokens": passes.num_tokens,
            "forward_passes": passes.num_passes,
        }


def _thresholds(passes: Passes) -> dict[str, float]:
    """Return the mean τ of some passes, and the lowest one if τ moved."""
    has_moved = passes.min_threshold < passes.max_threshold
    lowest = {"min_confidence_threshold": passes.min_threshold} if has_moved else {}
    return {"confidence_threshold": passes.mean_threshold, **lowest}


def _json_in_steps(value: Any, depth: int) -> bytes:
    """Return a value as JSON, written in small steps as deep as lists of tokens lie."""
    if depth and isinstance(value, dict):
        members = (to_json(k) + b":" + _json_in_steps(v, depth - 1) for k, v in value.items())
        return b"{" + b",".join(members) + b"}"
    if depth and isinstance(value, list):
        return b"[" + b",".join(_json_in_steps(each, depth - 1) for each in value) + b"]"
    if isinstance(value, list):
        pieces = (value[start : start + _STEP] for start in range(0, len(value), _STEP))
        return b"[" + b",".join(to_json(piece)[1:-1] for piece in pieces) + b"]"
    return to_json(value)


def _chat_delta(delta: Delta, reasoning_fields: Sequence[str]) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": "assistant"} if delta.is_first else {}
    others: dict[str, Any] = {}
    if delta.reasoning:
        others |= dict.fromkeys(reasoning_fields, delta.reasoning)
    if delta.calls:
        others["tool_calls"] = [_call_chunk(call) for call in delta.calls]
    if not (others or delta.choice.is_forced):
        return {**entry, "content": delta.text}
    if delta.text or delta.is_first:
        entry["content"] = delta.text or None
    return {**entry, **others}


def _message(deltas: Sequence[Delta], reasoning_fields: Sequence[str]) -> dict[str, Any]:
    """Return the assistant message that the parts of a choice make."""
    text = "".join(delta.text for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for part in (call for delta in deltas for call in delta.calls):
        if part.id is not None:
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"id": part.id, "type": "function", "function": function}
        calls[part.index]["function"]["arguments"] += part.arguments
    others: dict[str, Any] = dict.fromkeys(reasoning_fields, reasoning) if reasoning else {}
    if calls:
        others["tool_calls"] = list(calls.values())
    content = text or (None if others or deltas[0].choice.is_forced else "")
    return {"role": "assistant", "content": content, "refusal": None, **others}


def _call_chunk(part: CallPart) -> dict[str, Any]:
    """Return a streamed piece of a tool call; the first piece has its id and name."""
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.id is None:
        return {"index": part.index, "function": function}
    function = {"name": part.name, **function}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _fingerprint(model: ServedModel) -> str:
    """Return a fingerprint of what outputs may depend on: model, number type and server version."""
    settings = model.settings
    parts = [__version__, settings.name, settings.path, settings.adapter or "", settings.dtype]
    text = "\n".join(parts)
    return "fp_" + blake2b(text.encode(), digest_size=5).hexdigest()
