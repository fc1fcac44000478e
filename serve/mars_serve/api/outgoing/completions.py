"""Answers in OpenAI's shapes for completions and chats; `mars_serve.api.schema` describes them.

Source: OpenAI API reference, "Completions" and "Chat", the objects and their streamed chunks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar

from pydantic_core import to_json

from mars_platform import __version__
from mars_serve.api.errors import ApiError
from mars_serve.api.outgoing.answer import Answer
from mars_serve.api.outgoing.choices import CallPart, Choice, Delta, ReportedToken
from mars_serve.api.outgoing.events import DONE, sse
from mars_serve.api.outgoing.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from mars_serve.api.protocol import GenerationRequest, StreamOptions
from mars_serve.config.served import ServedModel

_LISTS_OF_TOKENS = 4
"""Depth of the lists in a response that grow with its tokens: in its choices' log-probabilities."""
_STEP = 256
"""Entries of such a list that are written at once."""


class _OpenAiWriter(ABC):
    """Writes an answer, whole or as events of a stream."""

    prefix: ClassVar[str]
    """Beginning of the response's id."""
    kinds: ClassVar[tuple[str, str]]
    """Names of the whole response's type and of an event's."""
    has_one_prompt: ClassVar[bool] = False
    """Whether all choices have the same prompt, which is then reported beside them."""

    def __init__(self, answer: Answer, body: GenerationRequest) -> None:
        self.answer = answer
        self._body = body
        self._options = body.stream_options or StreamOptions()

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """Return the body of the whole response; ``deltas`` holds the parts of each choice.

        In a thread it never holds up other threads, however many tokens it reports.
        """
        response = {
            **self._head(self.kinds[0]),
            "choices": [self._choice(each) for each in deltas],
            **(self._prompt_of(self.answer.choices[0]) if self.has_one_prompt else {}),
            "usage": self.usage(),
            "mars": self.answer.mars(self.answer.passes),
        }
        if self.answer.options.num_logprobs is None and self._body.prompt_logprobs is None:
            return to_json(response)
        return _json_in_steps(response, _LISTS_OF_TOKENS)

    def begin(self) -> bytes:
        return b""

    def events(self, delta: Delta) -> bytes:
        entry: dict[str, Any] = {
            "index": delta.choice.index,
            **self._text_of(delta),
            "logprobs": self._logprobs(delta.choice, delta.reported),
            "finish_reason": delta.finish_reason,
        }
        event = {**self._chunk_head, "choices": [entry]}
        if self._body.return_token_ids:
            entry["token_ids"] = delta.tokens
            if delta.is_first:
                (event if self.has_one_prompt else entry).update(self._prompt_of(delta.choice))
        if self._options.continuous_usage_stats:
            event["usage"] = self.usage()
        elif self._options.include_usage:
            event["usage"] = None
        event["mars"] = self.answer.mars_of(delta)
        if delta.finish_reason is not None:
            entry["stop_reason"] = delta.stop_reason
        return sse(event)

    def end(self) -> bytes:
        """Return the event with the token counts of all choices, if asked for, and the last one."""
        if not self._options.include_usage:
            return DONE
        return sse({**self._chunk_head, "choices": [], "usage": self.usage()}) + DONE

    def failed(self, problem: ApiError) -> bytes:
        return sse(problem.body())

    def usage(self) -> dict[str, Any]:
        counts = self.answer.counts
        return {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.output,
            "total_tokens": counts.prompt + counts.output,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
            "completion_tokens_details": {"reasoning_tokens": counts.thinking},
        }

    @abstractmethod
    def _text_of(self, delta: Delta) -> dict[str, Any]:
        """Return the member of an event's choice that holds its text."""

    @abstractmethod
    def _choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return a choice of the whole response."""

    @abstractmethod
    def _logprobs(self, choice: Choice, reported: Sequence[ReportedToken]) -> dict[str, Any] | None:
        """Return the log-probabilities of some tokens; None if they are not reported."""

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head(self.kinds[1])

    def _head(self, kind: str) -> dict[str, Any]:
        answer = self.answer
        head = {
            "id": f"{self.prefix}-{answer.id}",
            "object": kind,
            "created": answer.created,
            "model": answer.model.name,
            "system_fingerprint": _fingerprint(answer.model),
        }
        return {**head, "service_tier": answer.tier} if self._body.service_tier else head

    def _end_of(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return what the choices of both shapes end with."""
        last = deltas[-1]
        reported = [each for delta in deltas for each in delta.reported]
        entry: dict[str, Any] = {
            "logprobs": self._logprobs(last.choice, reported),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        if self._body.return_token_ids:
            entry["token_ids"] = [token for delta in deltas for token in delta.tokens]
        return entry

    def _prompt_of(self, choice: Choice) -> dict[str, Any]:
        """Return what is reported of a choice's prompt, as vLLM does.

        A completion has it in each choice, a chat beside its choices.
        """
        tokens, found = choice.prompt.tokens, dict[str, Any]()
        num_likely = self._body.prompt_logprobs
        if num_likely is not None:
            found["prompt_logprobs"] = prompt_logprobs(
                tokens, choice.scored, num_likely, self.answer.names
            )
        return {**found, "prompt_token_ids": tokens} if self._body.return_token_ids else found


class CompletionWriter(_OpenAiWriter):
    """Writes the answer to a completion request."""

    prefix = "cmpl"
    kinds = ("text_completion", "text_completion")

    def _text_of(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text}

    def _choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choice = deltas[-1].choice
        text = "".join(delta.text for delta in deltas)
        ends = self._end_of(deltas)
        return {"index": choice.index, "text": text, **ends, **self._prompt_of(choice)}

    def _logprobs(self, choice: Choice, reported: Sequence[ReportedToken]) -> dict[str, Any] | None:
        if choice.request.options.num_logprobs is None:
            return None
        return completion_logprobs(reported, self.answer.names)


class ChatWriter(_OpenAiWriter):
    """Writes the answer to a chat request."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    has_one_prompt = True

    def _text_of(self, delta: Delta) -> dict[str, Any]:
        return {"delta": _chat_delta(delta, self.answer.model.settings.reasoning_fields)}

    def _choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        message = _message(deltas, self.answer.model.settings.reasoning_fields)
        return {"index": deltas[-1].choice.index, "message": message, **self._end_of(deltas)}

    def _logprobs(self, choice: Choice, reported: Sequence[ReportedToken]) -> dict[str, Any] | None:
        if choice.request.options.num_logprobs is None:
            return None
        return chat_logprobs(reported, self.answer.names)


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
