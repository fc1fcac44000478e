"""Items of a conversation in the Responses API, and the chat messages that they make.

An assistant's turn is spread over items here: its thinking, its texts and its calls. They make one
message, since chat templates know no other form.

Source: OpenAI API reference, "Responses", input items.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
)
from pydantic_core import PydanticCustomError

from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    Identifier,
    RefusalPart,
    Text,
    check_num_pieces,
)

OTHER = "other-kind"
"""Tag of what is refused. Tags have hyphens, so that errors do not take them for fields."""


def by_type(tags: Mapping[str, str], default: str = OTHER) -> Discriminator:
    """Return the discriminator that finds the tag of a model by its ``type``.

    A string is of the kind ``default``, and so is a short message, which has a role alone.
    """

    def tag(value: Any) -> str:
        if not isinstance(value, dict):
            return tags.get(getattr(value, "type", ""), default)
        kind = value.get("type")
        if kind is None and "role" not in value and "id" in value:
            kind = "item_reference"
        return tags.get(kind, OTHER) if isinstance(kind, str) else default

    return Discriminator(tag)


def refused(reason: str) -> AfterValidator:
    """Return the validator of a ``type`` that no request may have."""

    def refuse(_: str) -> str:
        raise PydanticCustomError("not_served", "{reason}", {"reason": reason})

    return AfterValidator(refuse)


class Refused(BaseModel):
    """Base of what is refused: the OpenAPI document has nothing that fits it."""

    model_config = ConfigDict(json_schema_extra={"not": {}})


class OtherPart(Refused):
    """A part of a kind that is refused: an image, a file, audio."""

    type: Annotated[str, refused("Input is text only; leave the part out, or describe it in words")]


class MessageText(BaseModel):
    """A text in a message or in the result of a call."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Any = None
    logprobs: Any = None


class ThinkingText(BaseModel):
    """A text of the model's thinking."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: Text


_TEXTS = dict.fromkeys(("input_text", "output_text", "text"), "text-part")
_Parts = Field(max_length=MAX_PARTS, fail_fast=True)
_TaggedText = Annotated[MessageText, Tag("text-part")]
_TaggedOther = Annotated[OtherPart, Tag(OTHER)]
MessagePart = Annotated[
    _TaggedText | Annotated[RefusalPart, Tag("refusal-part")] | _TaggedOther,
    by_type(_TEXTS | {"refusal": "refusal-part"}),
]
ResultPart = Annotated[_TaggedText | _TaggedOther, by_type(_TEXTS)]


def _shape_of(value: Any) -> str:
    return "several-parts" if isinstance(value, list) else "one-text"


_OneText = Annotated[Text, Tag("one-text")]
MessageContent = Annotated[
    _OneText | Annotated[list[MessagePart], _Parts, Tag("several-parts")], Discriminator(_shape_of)
]
ResultContent = Annotated[
    _OneText | Annotated[list[ResultPart], _Parts, Tag("several-parts")], Discriminator(_shape_of)
]


class MessageItem(BaseModel):
    """A message, in the short form without type and id or in the long one."""

    type: Literal["message"] = "message"
    id: Identifier | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: MessageContent
    status: Any = None
    phase: Any = None


class ThinkingItem(BaseModel):
    """Thinking of an earlier turn, which some chat templates repeat."""

    type: Literal["reasoning"]
    id: Identifier | None = None
    summary: Annotated[list[ThinkingText], _Parts] = []
    content: Annotated[list[ThinkingText], _Parts] | None = None
    """The thinking itself; it counts before its summary."""
    encrypted_content: str | None = None
    """Thinking that only its own server can read: it is accepted beside ``content`` alone."""
    status: Any = None


class CallItem(BaseModel):
    """A call by the model."""

    type: Literal["function_call"]
    id: Identifier | None = None
    call_id: Identifier
    name: Identifier
    namespace: Identifier | None = None
    arguments: Text
    """JSON text of an object. Models may write invalid JSON, so it is not checked."""
    status: Any = None


class ResultItem(BaseModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    id: Identifier | None = None
    call_id: Identifier
    output: ResultContent
    status: Any = None


class ReferenceItem(BaseModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Identifier


class OtherItem(Refused):
    """An item of a kind that is refused, such as the call of a tool that OpenAI's servers run."""

    type: Annotated[
        str,
        refused(
            "Items are messages, function_call, function_call_output, reasoning or item_reference; "
            "leave others out, or write what they hold into a message"
        ),
    ]


_ITEMS = {
    "message": "message-item",
    "reasoning": "thinking-item",
    "function_call": "call-item",
    "function_call_output": "result-item",
    "item_reference": "reference-item",
}
Item = Annotated[
    Annotated[MessageItem, Tag("message-item")]
    | Annotated[ThinkingItem, Tag("thinking-item")]
    | Annotated[CallItem, Tag("call-item")]
    | Annotated[ResultItem, Tag("result-item")]
    | Annotated[ReferenceItem, Tag("reference-item")]
    | Annotated[OtherItem, Tag(OTHER)],
    by_type(_ITEMS, default="message-item"),
]
_read = TypeAdapter[list[Item]](list[Item]).validate_python
_READ_ITEMS = 64
"""Stored items that are read at once."""
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "item_reference": "ref",
}
"""Beginnings of items' ids."""
_FIRST_INPUT = 1_000_000
"""Number in the id of a request's first item, behind those of all outputs."""
Items = Annotated[
    list[Item],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(check_num_pieces),
]


def read_items(stored: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return stored items, which may be more than a request may have.

    Some are read at a time, since pydantic lets no other thread run meanwhile.
    """
    starts = range(0, len(stored), _READ_ITEMS)
    return [item for start in starts for item in _read(stored[start : start + _READ_ITEMS])]


def stored_items(items: Sequence[Item], response: str) -> list[dict[str, Any]]:
    """Return items in their long forms, with ids, as they are stored with a response and listed.

    Args:
        items: The items of a request.
        response: Part of the response's id that items without one have in theirs.
    """
    found = []
    for number, item in enumerate(items):
        entry = item.model_dump(exclude_none=True, exclude={"phase"}) | {"status": "completed"}
        entry.setdefault("id", f"{_PREFIXES[item.type]}_{response}_{_FIRST_INPUT + number}")
        if isinstance(item, MessageItem):
            kind = "output_text" if item.role == "assistant" else "input_text"
            parts = item.content
            if isinstance(parts, str):
                parts = [MessageText(type="text", text=parts)]
            entry["content"] = [_stored_part(each, kind) for each in parts]
        elif isinstance(item, ThinkingItem) and item.content:  # all else of it is never read
            entry |= {"summary": [], "encrypted_content": None}
        elif isinstance(item, ResultItem) and isinstance(item.output, list):
            entry["output"] = [_stored_part(each, "input_text") for each in item.output]
        found.append(entry)
    return found


def _stored_part(part: MessageText | RefusalPart | OtherPart, kind: str) -> dict[str, Any]:
    if not isinstance(part, MessageText):
        return part.model_dump()
    if kind == "input_text":
        return {"type": kind, "text": part.text}
    return {"type": kind, "text": part.text, "annotations": [], "logprobs": []}


def name_within(namespace: str | None, name: str) -> str:
    """Return the one name that the model reads for a function of a namespace."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def messages_of(
    items: Sequence[Item], instructions: str | None, num_before: int = 0
) -> list[dict[str, Any]]:
    """Return the messages of a chat that items make, behind instructions if there are some.

    Instructions and the system's messages at the beginning become one, since many templates take
    one only. Results stand in the order of their calls, since many templates leave out the ids.

    Args:
        items: The conversation; its references were replaced.
        instructions: Text that stands before it.
        num_before: How many of the items are of earlier requests, for error messages.

    Raises:
        ApiError: status 400: a result belongs to no call, or thinking cannot be read.
    """
    turns = _Turns()
    if instructions:
        turns.add_message(MessageItem(role="system", content=instructions))
    for index, item in enumerate(items, start=-num_before):
        where = f"input[{index}]"
        if isinstance(item, MessageItem):
            turns.add_message(item)
        elif isinstance(item, ThinkingItem):
            turns.add_thinking(item, where)
        elif isinstance(item, CallItem):
            turns.add_call(item)
        elif isinstance(item, ResultItem):
            turns.add_result(item, where)
        else:
            raise _not_stored(where, item.id if isinstance(item, ReferenceItem) else "")
    return turns.ended()


class _Turns:
    """Messages, of which the last one or its results may go on."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._calls: dict[str, int] = {}
        """Place of each call among those of its turn, by id."""
        self._results: list[dict[str, Any]] = []
        """Results of the last turn's calls so far."""
        self._thoughts: list[tuple[dict[str, Any], list[str]]] = []
        """Messages with their thinking, which is joined at the end: there may be much of it."""

    def ended(self) -> list[dict[str, Any]]:
        """Return the messages of a conversation that is complete."""
        for turn, texts in self._thoughts:
            turn["reasoning_content"] = "\n".join(texts)
        return self.all()

    def all(self) -> list[dict[str, Any]]:
        """Return the messages."""
        self._results.sort(key=lambda each: self._calls[each["tool_call_id"]])
        self._messages += self._results
        self._results = []
        return self._messages

    def add_message(self, item: MessageItem) -> None:
        """Add a message, or its parts to the message that they belong to."""
        parts = _chat_parts(item.content)
        if item.role == "assistant":
            self._assistant().setdefault("content", []).extend(parts)
            return
        messages, is_instruction = self.all(), item.role in ("system", "developer")
        if is_instruction and len(messages) == 1 and messages[0]["role"] in ("system", "developer"):
            messages[0]["content"] += parts
        else:
            messages.append({"role": item.role, "content": parts})

    def add_thinking(self, item: ThinkingItem, where: str) -> None:
        """Add thinking to the assistant's message."""
        texts = [each.text for each in item.content or item.summary]
        if item.encrypted_content and not item.content:
            reason = (
                "only the server that wrote it can read it; give content, or leave the item out"
            )
            raise invalid_value(f"{where}.encrypted_content", reason)
        if any(texts):
            turn = self._assistant()
            if not self._thoughts or self._thoughts[-1][0] is not turn:
                self._thoughts.append((turn, []))
            self._thoughts[-1][1].extend(texts)

    def add_call(self, item: CallItem) -> None:
        """Add a call to the assistant's message."""
        calls = self._assistant().setdefault("tool_calls", [])
        self._calls[item.call_id] = len(calls)
        function = {"name": name_within(item.namespace, item.name), "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})

    def add_result(self, item: ResultItem, where: str) -> None:
        """Add the result of a call."""
        if item.call_id not in self._calls:
            reason = "there is no function_call with this id before it; give the call, too, or "
            raise invalid_value(f"{where}.call_id", f"{reason}previous_response_id")
        content = _chat_parts(item.output)
        self._results.append({"role": "tool", "tool_call_id": item.call_id, "content": content})

    def _assistant(self) -> dict[str, Any]:
        """Return the message of the assistant's turn, which begins behind any other message."""
        messages = self.all()
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        return messages[-1]


def _chat_parts(
    content: str | Sequence[MessageText | RefusalPart | OtherPart],
) -> list[dict[str, Any]]:
    """Return a content as parts of a chat's message, at least one."""
    if isinstance(content, str) or not content:
        return [{"type": "text", "text": content or ""}]
    return [
        each.model_dump() if isinstance(each, RefusalPart) else {"type": "text", "text": each.text}
        for each in content
        if isinstance(each, RefusalPart | MessageText)
    ]


def _not_stored(where: str, name: str) -> ApiError:
    reason = f"no stored response has an item {name!r}; give the item itself"
    return ApiError(404, f"{where}.id: {reason}", param="input", code="not_found")
