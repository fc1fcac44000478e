"""Conversations and tools in request bodies, and their translation for chat templates.

Shapes and sizes are checked here; the template itself checks the order of roles.

Source: OpenAI API reference, "Chat": message roles, content parts, tools and tool calls.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, StringConstraints, Tag
from pydantic_core import PydanticCustomError

from mars_serve.api.bodies import at_most

MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Largest number of content parts in a message."""
MAX_PIECES = 4096
"""Largest number of content parts and tool calls in all messages together."""
MAX_TEXT_LENGTH = 4 * 2**20
"""Longest text of a message or content part, in characters."""
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
"""Largest number of tool calls in one assistant message."""

_MAX_KWARGS = 32

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
"""JSON schema of a function that takes no parameters; used if a definition gives no schema."""

Flag = Annotated[bool, Field(strict=True)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(max_length=MAX_TEXT_LENGTH)]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=256)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextPart(BaseModel):
    """A piece of a message's text; the server takes no images, audio or files."""

    type: Literal["text"]
    text: Text


class RefusalPart(BaseModel):
    """A piece of an assistant's refusal."""

    type: Literal["refusal"]
    refusal: Text


def _kind_of_content(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


_PARTS = Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)
AnswerPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
# The tag makes an error name the branch that the client meant.
Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], _PARTS, Tag("parts")],
    Discriminator(_kind_of_content),
]
AnswerContent = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[AnswerPart], _PARTS, Tag("parts")],
    Discriminator(_kind_of_content),
]


class CalledFunction(BaseModel):
    """The function of a tool call, with its arguments."""

    name: Identifier
    arguments: Text
    """JSON text of an object. Models may write invalid JSON, so it is not checked."""


class PastToolCall(BaseModel):
    """A tool call in an earlier assistant message."""

    id: Identifier
    type: Literal["function"]
    function: CalledFunction


_PastToolCalls = Annotated[list[PastToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]


class InstructionMessage(BaseModel):
    """Instructions for the model; ``developer`` is the newer name of the role ``system``."""

    role: Literal["system", "developer"]
    content: Content
    name: Identifier | None = None


class UserMessage(BaseModel):
    """A message from the user."""

    role: Literal["user"]
    content: Content
    name: Identifier | None = None


class PastAssistantMessage(BaseModel):
    """An earlier message from the model."""

    role: Literal["assistant"]
    content: AnswerContent | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    """Thinking before the answer, which some chat templates repeat."""
    reasoning: Text | None = None
    """Another name of ``reasoning_content``, vLLM's."""
    name: Identifier | None = None
    tool_calls: _PastToolCalls | None = None
    audio: None = None
    function_call: None = None
    """Superseded by ``tool_calls``; only null is accepted."""


class ToolMessage(BaseModel):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Identifier
    name: Identifier | None = None


ChatMessage = Annotated[
    InstructionMessage | UserMessage | PastAssistantMessage | ToolMessage,
    Field(discriminator="role"),
]
"""A message of a conversation, told apart by its role."""


def check_num_pieces(value: Any) -> Any:
    """Refuse conversations of too many pieces before a model is made of each."""
    messages = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    pieces = (piece for each in messages for piece in each.values())
    given = sum(len(each) for each in pieces if isinstance(each, list))
    if given > MAX_PIECES:
        raise PydanticCustomError(
            "too_many_pieces",
            "Messages should have at most {most} parts and tool calls together, not {given}",
            {"most": MAX_PIECES, "given": given},
        )
    return value


Messages = Annotated[
    list[ChatMessage],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(check_num_pieces),
]


class FunctionDefinition(BaseModel):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; without one, the function takes no parameters."""
    strict: Flag | None = None
    """Guarantee that every call satisfies the schema, even if ``tool_choice`` is auto."""


class Tool(BaseModel):
    """A tool that the model may use; the only type is a function."""

    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(BaseModel):
    """The name of a function."""

    name: FunctionName


class NamedTool(BaseModel):
    """The one tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class ToolSelection(BaseModel):
    """A subset of the tools, and whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(BaseModel):
    """Restricts the model to some of the tools in the request."""

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
"""Whether the model calls tools, and which; ``auto``, the default, lets the model decide."""

TemplateKwargs = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")],
        Annotated[str, StringConstraints(max_length=4096)] | Flag | Integer | Number | None,
    ],
    Field(max_length=_MAX_KWARGS),
    at_most(_MAX_KWARGS),
]
"""Variables for the chat template, such as enable_thinking (vLLM's ``chat_template_kwargs``)."""


def messages_for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages with their contents as texts and without the keys that they lack.

    Parts of a text are joined by line breaks.

    Source: vLLM for joining parts.
    """
    return [_turn(message) for message in messages]


def _turn(message: ChatMessage) -> dict[str, Any]:
    content = "" if message.content is None else _text_of(message.content)
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if isinstance(message, PastAssistantMessage):
        turn["content"] = content or message.refusal or ""
        if thinking := message.reasoning_content or message.reasoning:
            turn["reasoning_content"] = thinking
        if message.tool_calls:
            turn["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _text_of(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
