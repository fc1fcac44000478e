"""Turns of a conversation, and the tools that it offers, as requests give them.

Checks shapes and sizes; what a chat template makes of them is not known here.

Source: OpenAI API reference, "Chat": message roles, content parts, tools and tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag

MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Parts of one message's content."""
MAX_TEXT_LENGTH = 4 * 2**20
"""Characters of one message's text, or of one part of it."""
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""Calls of one turn."""

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""Schema of a function that takes none, as when its definition has no schema."""

Flag = Annotated[bool, Field(strict=True)]
Integer = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_LENGTH)]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=256)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(BaseModel):
    """A piece of a message's text; there are no parts of other types here."""

    type: Literal["text"]
    text: Text


class RefusalPart(BaseModel):
    """A piece of an assistant's refusal."""

    type: Literal["refusal"]
    refusal: Text


def _kind_of_content(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


AnswerPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
# The tags lead errors to the branch that was meant.
Content = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS), Tag("parts")],
    Discriminator(_kind_of_content),
]
AnswerContent = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[AnswerPart], Field(min_length=1, max_length=MAX_PARTS), Tag("parts")],
    Discriminator(_kind_of_content),
]


class CalledFunction(BaseModel):
    """What an assistant called."""

    name: Identifier
    arguments: Text
    """JSON text of an object; models do not always write it well."""


class ToolCall(BaseModel):
    """One call of an assistant's turn."""

    id: Identifier
    type: Literal["function"]
    function: CalledFunction


class InstructionMessage(BaseModel):
    """Instructions; ``developer`` is the newer name of ``system``."""

    role: Literal["system", "developer"]
    content: Content
    name: Identifier | None = None


class UserMessage(BaseModel):
    """A turn of the user's."""

    role: Literal["user"]
    content: Content
    name: Identifier | None = None


class AssistantMessage(BaseModel):
    """An earlier turn of the model's."""

    role: Literal["assistant"]
    content: AnswerContent | None = None
    refusal: Text | None = None
    name: Identifier | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS)] | None = None
    audio: None = None
    function_call: None = None
    """The old name of ``tool_calls``, which is not taken."""


class ToolMessage(BaseModel):
    """What a called function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Identifier
    name: Identifier | None = None


ChatMessage = Annotated[
    InstructionMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
"""One turn of a conversation."""
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; without one, the function takes no parameters."""
    strict: Flag | None = None
    """Whether every call satisfies the schema, also where the model is free not to call."""


class Tool(BaseModel):
    """A tool that the model may use: a function."""

    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class NamedFunction(BaseModel):
    """A function by its name."""

    name: FunctionName


class NamedTool(BaseModel):
    """The tool that has to be used."""

    type: Literal["function"]
    function: NamedFunction


class ToolSelection(BaseModel):
    """Some of the tools, and whether one of them has to be used."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(BaseModel):
    """The tools that may be used, of all that the request describes."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSelection


def _kind_of_choice(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None and not isinstance(value, dict):
        return "mode"
    return "allowed" if kind == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(_kind_of_choice),
]
"""Whether tools are used, and which; ``auto``, the default, leaves it to the model."""

TemplateKwargs = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")],
        Annotated[str, StringConstraints(max_length=4096)] | Flag | Integer | Number | None,
    ],
    Field(max_length=32),
]
"""Variables for the chat template (vLLM's ``chat_template_kwargs``), such as enable_thinking."""


def messages_for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The turns as Hugging Face's chat templates read them.

    Parts of a text are joined by line breaks, arguments become objects where they are the JSON of
    one, and a result names the function that it comes from.

    Source: transformers, "Tool use"; how vLLM joins parts.
    """
    names: dict[str, str] = {}
    turns = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            turn = _answer(message)
            names.update({call.id: call.function.name for call in message.tool_calls or ()})
        else:
            turn = {"role": message.role, "content": _text_of(message.content)}
        name = message.name
        if isinstance(message, ToolMessage):
            turn["tool_call_id"] = message.tool_call_id
            name = name or names.get(message.tool_call_id)
        if name is not None:
            turn["name"] = name
        turns.append(turn)
    return turns


def _answer(message: AssistantMessage) -> dict[str, Any]:
    """Keys that do not apply are left out: templates ask whether they are there."""
    content = "" if message.content is None else _text_of(message.content)
    turn: dict[str, Any] = {"role": "assistant", "content": content or message.refusal or ""}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    if not text.strip():
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):  # as a model wrote it; its next turn may set it right
        return text
    return arguments if isinstance(arguments, dict) else text


def _text_of(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
