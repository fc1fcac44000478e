"""Writes an answer as a message of content blocks, whole or as a stream of events.

Both are made of the same events, so that a whole message is what a client makes of a stream.

Source: Anthropic API reference, "Messages", the object and its streaming events.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json, to_json

from mars_serve.api.anthropic.blocks import INVALID_JSON
from mars_serve.api.anthropic.body import ConversationRequest
from mars_serve.api.anthropic.errors import error_body
from mars_serve.api.errors import ApiError
from mars_serve.api.outgoing.answer import Answer
from mars_serve.api.outgoing.choices import TOOL_CALLS, CallPart, Delta, Piece, Thought
from mars_serve.api.outgoing.events import sse
from mars_serve.engine.decoding_options import FinishReason

_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    TOOL_CALLS: "tool_use",
}

Event = dict[str, Any]


class MessageWriter:
    """Writes the answer to one request."""

    def __init__(self, answer: Answer, body: ConversationRequest) -> None:
        self._answer = answer
        self._body = body
        self._blocks = _Blocks()
        self._stop: dict[str, Any] = {}
        """Why the output ended; empty before that."""

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """Return the whole message."""
        events = [event for delta in deltas[0] for event in self._take(delta)]
        return to_json(
            {
                **self._head(),
                "content": _content_of(events),
                **self._stop,
                "usage": self._usage(),
                "mars": self._answer.mars(self._answer.passes),
            }
        )

    def begin(self) -> bytes:
        """Return the event that begins the message."""
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        return _written({"type": "message_start", "message": message})

    def events(self, delta: Delta) -> bytes:
        """Return the events for one forward pass.

        If the request asks what passes proposed, the last of them tells; a pass without any has a
        ping, which clients skip.
        """
        events = list(self._take(delta))
        if delta.details is not None:
            events = events or [{"type": "ping"}]
            events[-1]["mars"] = self._answer.mars_of(delta)
        return b"".join(map(_written, events))

    def end(self) -> bytes:
        """Return the events that tell why the message ended, and that it has."""
        end = {
            "type": "message_delta",
            "delta": self._stop,
            "usage": self._usage(),
            "mars": self._answer.mars(self._answer.passes),
        }
        return _written(end) + _written({"type": "message_stop"})

    def failed(self, problem: ApiError) -> bytes:
        """Return the event that ends a stream by an error."""
        return _written(error_body(problem))

    def _take(self, delta: Delta) -> Iterator[Event]:
        for piece in delta.pieces:
            yield from self._blocks.add(piece)
        if delta.finish_reason is not None:
            yield from self._blocks.close()
            self._stop = _stop_of(delta, is_full=self._is_full)

    @property
    def _is_full(self) -> bool:
        answer = self._answer
        return answer.counts.prompt + answer.options.max_tokens >= answer.model.max_length

    def _head(self) -> dict[str, Any]:
        answer = self._answer
        head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant"}
        return {**head, "model": answer.model.name}

    def _usage(self) -> dict[str, Any]:
        counts = self._answer.counts
        cached = min(counts.cached, counts.prompt)
        usage = {
            "input_tokens": counts.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts.output,
            "output_tokens_details": {"thinking_tokens": counts.thinking},
        }
        if self._body.service_tier is None:
            return usage
        tier = self._answer.tier.value
        return {**usage, "service_tier": "standard" if tier == "default" else tier}


class _Blocks:
    """Divides the pieces of an output into content blocks, one for each run of one kind."""

    def __init__(self) -> None:
        self._num = 0
        """Number of blocks that have begun."""
        self._kind: str | None = None
        """Kind of the open block; None if none is open."""
        self._thoughts: list[str] = []
        """Texts of the open block of thinking."""

    def add(self, piece: Piece) -> Iterator[Event]:
        if isinstance(piece, CallPart):
            yield from self._add_call(piece)
        elif isinstance(piece, Thought):
            self._thoughts.append(piece.text)
            yield from self._go_on({"type": "thinking", "thinking": "", "signature": ""})
            if piece.text:  # it is empty where the client wants the signature alone
                yield self._delta("thinking_delta", "thinking", piece.text)
        elif piece:
            yield from self._go_on({"type": "text", "text": ""})
            yield self._delta("text_delta", "text", piece)

    def close(self) -> Iterator[Event]:
        if self._kind == "thinking":
            text = "".join(self._thoughts)
            self._thoughts = []
            yield self._delta("signature_delta", "signature", _signature_of(text))
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._num - 1}
        self._kind = None

    def _add_call(self, part: CallPart) -> Iterator[Event]:
        if part.id is not None:
            own_id = f"toolu_{part.id.removeprefix('call_')}"
            block: Event = {"type": "tool_use", "id": own_id, "name": part.name, "input": {}}
            yield from self.close()
            yield from self._go_on(block)
        if part.arguments:
            yield self._delta("input_json_delta", "partial_json", part.arguments)

    def _go_on(self, block: dict[str, Any]) -> Iterator[Event]:
        """Yield the events that begin a block, unless one of its kind is open."""
        if self._kind == block["type"]:
            return
        yield from self.close()
        self._kind = block["type"]
        self._num += 1
        yield {"type": "content_block_start", "index": self._num - 1, "content_block": block}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self._num - 1, "delta": delta}


def _signature_of(text: str) -> str:
    """Return what stands for the signature of some thinking, which clients demand and send back."""
    return blake2b(text.encode(), digest_size=32).hexdigest()


def _stop_of(delta: Delta, *, is_full: bool) -> dict[str, Any]:
    if delta.finish_reason == FinishReason.STOP and isinstance(delta.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
    reason = _REASONS[delta.finish_reason or ""]
    if is_full and delta.finish_reason == FinishReason.LENGTH:
        reason = "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


def _content_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    blocks, grown = list[dict[str, Any]](), list[dict[str, list[str]]]()
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            grown.append({})
        elif event["type"] == "content_block_delta":
            (_, (field, text)) = event["delta"].items()
            grown[-1].setdefault(field, []).append(text)
    return [_grown(*each) for each in zip(blocks, grown, strict=True)]


def _grown(block: dict[str, Any], pieces: dict[str, list[str]]) -> dict[str, Any]:
    texts = {field: "".join(each) for field, each in pieces.items()}
    if block["type"] == "tool_use":
        return {**block, "input": _input_of(texts.get("partial_json", ""))}
    return {**block, **texts}


def _input_of(text: str) -> dict[str, Any]:
    """Return the input that a call's arguments make, also where they were cut.

    What is no JSON object is kept as text, in the form that Anthropic asks clients to send it.
    """
    try:
        value = from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def _written(event: Event) -> bytes:
    return sse(event, event["type"])
