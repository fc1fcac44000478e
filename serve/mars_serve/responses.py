"""Response bodies in OpenAI's shapes. Knows no HTTP.

Source: OpenAI API reference, "Completions" and "Chat", the objects and their streamed chunks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mars_serve.choices import Choice, Delta, ReportedToken
from mars_serve.protocol import MarsBlock, Usage
from mars_serve.served import ServedModel
from mars_serve.text import TokenBytes

_LEAST_LOGPROB = -9999.0
"""What OpenAI reports for tokens that cannot be chosen: JSON has no infinity."""


@dataclass(frozen=True)
class Generation:
    """One request on its way through the server."""

    id: str
    is_chat: bool
    model: ServedModel
    choices: list[Choice]
    names: TokenBytes
    grammar_field: str | None
    """Field of the request that asked for a grammar."""

    def response(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """The whole response; ``deltas`` are those of each choice."""
        body = self._body("chat.completion" if self.is_chat else "text_completion")
        body["choices"] = [self._choice(each) for each in deltas]
        return {**body, "usage": self.usage(), "mars": _mars_block(self.choices)}

    def event(self, delta: Delta) -> dict[str, Any]:
        """The event of a stream for one forward pass of a choice."""
        entry = self._entry(delta, delta.reported)
        if self.is_chat:
            role = {"role": "assistant"} if delta.is_first else {}
            entry["delta"] = {**role, "content": delta.text}
        else:
            entry["text"] = delta.text
        summary = _mars_block([delta.choice]) if delta.finish_reason is not None else {}
        body = {**self._body(self._chunk_kind), "choices": [entry]}
        return {**body, "mars": {"tokens": delta.num_tokens, **summary}}

    def usage_event(self) -> dict[str, Any]:
        """The event behind all others that counts the tokens of the whole stream."""
        return {**self._body(self._chunk_kind), "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Token counts; the prompt counts once, however many choices share it."""
        prompt = self.choices[0].request.num_prompt
        completion = sum(choice.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
        ).model_dump()

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _body(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model.settings.name,
        }

    def _choice(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        entry = self._entry(deltas[-1], [each for delta in deltas for each in delta.reported])
        if self.is_chat:
            entry["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            entry["text"] = text
        return entry

    def _entry(self, last: Delta, reported: Sequence[ReportedToken]) -> dict[str, Any]:
        """What both shapes of a choice have in common."""
        logprobs = None
        if last.choice.request.options.num_logprobs is not None:
            shape = _chat_logprobs if self.is_chat else _completion_logprobs
            logprobs = shape(reported, self.names)
        return {
            "index": last.choice.index,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
        }


def _mars_block(choices: Sequence[Choice]) -> dict[str, Any]:
    """What was done to serve some choices of one request, all together."""
    options = choices[0].request.options
    num_passes = sum(choice.num_passes for choice in choices)
    num_tokens = sum(choice.num_tokens for choice in choices)
    return MarsBlock(
        mode=options.mode,
        confidence_threshold=options.threshold,
        forward_passes=num_passes,
        tokens_per_forward=round(num_tokens / max(num_passes, 1), 4),
    ).model_dump()


def _chat_logprobs(reported: Sequence[ReportedToken], names: TokenBytes) -> dict[str, Any]:
    content = []
    for each in reported:
        top = [_chat_token(token, value, names) for token, value in each.logprob.top]
        entry = _chat_token(each.token, each.logprob.logprob, names)
        content.append({**entry, "top_logprobs": top, "from_mask": each.logprob.from_mask})
    return {"content": content, "refusal": None}


def _chat_token(token: int, logprob: float, names: TokenBytes) -> dict[str, Any]:
    return {
        "token": names.name_of(token),
        "logprob": max(logprob, _LEAST_LOGPROB),
        "bytes": list(names.bytes_of(token)),
    }


def _completion_logprobs(reported: Sequence[ReportedToken], names: TokenBytes) -> dict[str, Any]:
    """Lists side by side, one item a token; ``from_mask`` is marsray's own."""
    return {
        "tokens": [names.name_of(each.token) for each in reported],
        "token_logprobs": [max(each.logprob.logprob, _LEAST_LOGPROB) for each in reported],
        "top_logprobs": [_top_by_name(each, names) for each in reported],
        "text_offset": [each.offset for each in reported],
        "from_mask": [each.logprob.from_mask for each in reported],
    }


def _top_by_name(reported: ReportedToken, names: TokenBytes) -> dict[str, float]:
    """The likeliest tokens and the chosen one; of tokens with the same text the likeliest."""
    top: dict[str, float] = {}
    for token, value in [*reported.logprob.top, (reported.token, reported.logprob.logprob)]:
        top.setdefault(names.name_of(token), max(value, _LEAST_LOGPROB))
    return top
