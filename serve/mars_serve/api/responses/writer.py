"""Writes an answer as a response with output items, whole or as a stream of events.

Whole and streamed answers go the same way, so that a stream's last event holds what a whole answer
is. The pieces of a forward pass come in the order in which the model wrote them.

Source: OpenAI API reference, "Responses", the object and its streaming events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from mars_serve.api.errors import ApiError
from mars_serve.api.outgoing.answer import Answer
from mars_serve.api.outgoing.choices import CallPart, Delta, Piece, ReportedToken, Thought
from mars_serve.api.outgoing.events import sse
from mars_serve.api.outgoing.logprobs import chat_logprobs
from mars_serve.api.responses.body import AnyTool, FunctionTool, OtherTool, ResponsesRequest
from mars_serve.engine.decoding_options import Span

_LENGTH = "length"
_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
_ARGUMENTS = "response.function_call_arguments."


class ResponseWriter:
    """Writes the answer to one request."""

    def __init__(self, answer: Answer, body: ResponsesRequest, *, is_stored: bool = False) -> None:
        self._answer = answer
        self._body = body
        self._is_stored = is_stored
        self._functions = {name: (of, each) for name, of, each in body.functions}
        self._events: list[bytes] | None = None
        """Events since they were last taken; None if the answer is not streamed."""
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The last item, while it may go on."""
        self._pending: list[ReportedToken] = []
        """Tokens of the text whose log-probabilities are not written yet."""
        self.final: dict[str, Any] | None = None
        """The response as it ended; None before that."""

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> bytes:
        """Return the whole response."""
        for delta in deltas[0]:
            self._take(delta)
        self._end(deltas[0][-1].finish_reason)
        return to_json(self.final)

    def begin(self) -> bytes:
        """Return the events that tell that the response was created and has begun."""
        self._events = []
        for kind in ("response.created", "response.in_progress"):
            self._emit(kind, response=self._response("in_progress"))
        return self._taken()

    def events(self, delta: Delta) -> bytes:
        """Return the events for one forward pass; there are none for text that is held back."""
        if delta.details is not None:
            self._emit("mars.pass", mars=self._answer.mars_of(delta))
        self._take(delta)
        if delta.finish_reason is not None:
            self._end(delta.finish_reason)
        return self._taken()

    def end(self) -> bytes:
        """Return the event with the whole response."""
        assert self.final is not None
        self._emit(f"response.{self.final['status']}", response=self.final)
        return self._taken()

    def failed(self, problem: ApiError) -> bytes:
        """Return the event with what there is of a response that failed."""
        if self._open is not None:
            self._open["status"] = "incomplete"
        self.final = self._response("failed", error=error_of(problem))
        self._emit("response.failed", response=self.final)
        return self._taken()

    def _taken(self) -> bytes:
        events, self._events = self._events or [], []
        return b"".join(events)

    def _emit(self, kind: str, place: Mapping[str, Any] | None = None, **fields: Any) -> None:
        if self._events is not None:
            event = {"type": kind, "sequence_number": self._number, **(place or {}), **fields}
            self._events.append(sse(event, kind))
            self._number += 1

    def _take(self, delta: Delta) -> None:
        """Add a forward pass's pieces to the output."""
        if self._body.reports_logprobs:
            self._pending += [each for each in delta.reported if each.span is Span.ANSWER]
        for piece in delta.pieces:
            kind, begins = _kind_of(piece), isinstance(piece, CallPart) and piece.id is not None
            if begins or self._open is None or self._open["type"] != kind:
                self._close()
                self._begin_item(piece)
            self._add(piece)

    def _begin_item(self, piece: Piece) -> None:
        """Open an item for a piece; the piece itself is not in it yet."""
        number, item = f"{self._answer.id}_{len(self._output)}", dict[str, Any]()
        self._open = item
        if isinstance(piece, CallPart):
            of, function = self._functions.get(piece.name or "", (None, None))
            item |= {"type": "function_call", "id": f"fc_{number}", "status": "in_progress"}
            item |= {"call_id": piece.id, "name": function.name if function else piece.name}
            item |= {"namespace": of.name} if of else {}
            item["arguments"] = ""
        elif isinstance(piece, Thought):
            item |= {"type": "reasoning", "id": f"rs_{number}", "status": "in_progress"}
            item |= {"summary": [], "content": [], "encrypted_content": None}
        else:
            item |= {"type": "message", "id": f"msg_{number}", "status": "in_progress"}
            item |= {"role": "assistant", "content": []}
        self._output.append(item)
        self._emit("response.output_item.added", self._place, item=item)
        if "content" in item:
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if item["type"] == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            self._emit("response.content_part.added", self._text_place, part=part)

    def _add(self, piece: Piece) -> None:
        """Add a piece to the open item."""
        assert self._open is not None
        if isinstance(piece, CallPart):
            self._open["arguments"] += piece.arguments
            self._pending.clear()  # its tags, where they are no tokens of their own
            self._emit(_ARGUMENTS + "delta", self._item_place, delta=piece.arguments)
            return
        part, text = self._open["content"][0], piece if isinstance(piece, str) else piece.text
        part["text"] += text
        if isinstance(piece, Thought):
            self._emit("response.reasoning_text.delta", self._text_place, delta=text)
        else:
            logprobs = self._taken_logprobs()
            part["logprobs"] += logprobs
            fields = {"delta": text, "logprobs": logprobs}
            self._emit("response.output_text.delta", self._text_place, **fields)

    def _close(self, *, is_cut: bool = False) -> None:
        """End the open item, if there is one; one that is cut is incomplete."""
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            is_cut = not _is_object(item["arguments"])
            fields = {"name": item["name"], "arguments": item["arguments"]}
            self._emit(_ARGUMENTS + "done", self._item_place, **fields)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._taken_logprobs()
                fields = {"text": part["text"], "logprobs": part["logprobs"]}
                self._emit("response.output_text.done", self._text_place, **fields)
            else:
                self._emit("response.reasoning_text.done", self._text_place, text=part["text"])
            self._emit("response.content_part.done", self._text_place, part=part)
        item["status"] = "incomplete" if is_cut else "completed"
        self._emit("response.output_item.done", self._place, item=item)
        self._open = None

    def _end(self, reason: str | None) -> None:
        """Complete the response."""
        is_cut = reason == _LENGTH
        if not (self._output or self._answer.choices[0].is_forced):
            self._begin_item("")
        self._close(is_cut=is_cut)
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        self.final = self._response("incomplete" if is_cut else "completed", **details)

    def _taken_logprobs(self) -> list[dict[str, Any]]:
        pending, self._pending = self._pending, []
        content = chat_logprobs(pending, self._answer.names)["content"] if pending else []
        return list(content)

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1}

    @property
    def _item_place(self) -> dict[str, Any]:
        return {**self._place, "item_id": self._output[-1]["id"]}

    @property
    def _text_place(self) -> dict[str, Any]:
        return {**self._item_place, "content_index": 0}

    def _response(self, status: str, **others: Any) -> dict[str, Any]:
        """Return the response as it is now."""
        answer, has_ended = self._answer, status != "in_progress"
        return {
            **echo_of(self._body),
            "id": f"resp_{answer.id}",
            "created_at": answer.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": answer.model.name,
            "status": status,
            "output": self._output,
            "service_tier": answer.tier,
            "store": self._is_stored,
            "usage": self._usage() if has_ended else None,
            **({"mars": answer.mars(answer.passes)} if has_ended else {}),
            **others,
        }

    def _usage(self) -> dict[str, Any]:
        counts = self._answer.counts
        return {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.output,
            "output_tokens_details": {"reasoning_tokens": counts.thinking},
            "total_tokens": counts.prompt + counts.output,
        }


def echo_of(body: ResponsesRequest) -> dict[str, Any]:
    """Return what a response repeats of its request, with defaults and empty places for the rest.

    Tools that the model is not told about are left out.
    """
    reasoning, text = body.reasoning, body.text
    form = {"type": "text"} if text is None or text.format is None else _dumped(text.format)
    return {
        "id": "",
        "object": "response",
        "created_at": 0,
        "completed_at": None,
        "status": "queued",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning and reasoning.effort,
            "summary": reasoning and reasoning.summary,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "auto",
        "store": True,
        "temperature": body.temperature or 0.0,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else _dumped(body.tool_choice),
        "tools": _echoed_tools(body.tools or ()),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def error_of(problem: ApiError) -> dict[str, Any]:
    """Return the error of a response that failed."""
    body = problem.body()["error"]
    return {"code": _CODES.get(problem.status, "server_error"), "message": body["message"]}


def _echoed_tools(tools: Sequence[AnyTool]) -> list[dict[str, Any]]:
    """Return the tools that the model is told about."""
    unused = {"allowed_callers", "defer_loading", "output_schema"}
    return [
        {**each.model_dump(exclude=unused), "strict": bool(each.strict)}
        if isinstance(each, FunctionTool)
        else {
            "type": each.type,
            "name": each.name,
            "description": each.description or "",
            "tools": _echoed_tools(each.tools),
        }
        for each in tools
        if not isinstance(each, OtherTool)
    ]


def _dumped(value: Any) -> Any:
    return (
        value.model_dump(by_alias=True, exclude_none=True)
        if hasattr(value, "model_dump")
        else value
    )


def _kind_of(piece: Piece) -> str:
    if isinstance(piece, CallPart):
        return "function_call"
    return "message" if isinstance(piece, str) else "reasoning"


def _is_object(arguments: str) -> bool:
    """Return whether the arguments of a call are whole."""
    try:
        return isinstance(from_json(arguments), dict)
    except ValueError:
        return False
