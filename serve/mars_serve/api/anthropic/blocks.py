"""Turns of a conversation in the Messages API, and the chat messages that they make.

Here the results of tools stand in the user's turn, and calls and thinking in blocks of the
assistant's. Turns of one role that follow each other are one turn.

Source: Anthropic API reference, "Messages"; what Claude Code sends.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError, to_json

from mars_serve.api.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    CalledFunction,
    ChatMessage,
    Flag,
    Identifier,
    InstructionMessage,
    PastAssistantMessage,
    PastToolCall,
    Text,
    TextPart,
    ToolMessage,
    UserMessage,
)

_BILLING = "x-anthropic-billing-header:"
"""Beginning of a block of Claude Code's system prompt that differs from request to request. No
prefix could be found in the cache behind it, and no model is told anything by it."""
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"
"""How Claude Code itself marks instructions within a user's turn."""
INVALID_JSON = "INVALID_JSON"
"""Name under which the input of a call holds arguments that are no JSON object, as text."""


class _Block(BaseModel):
    cache_control: Any = None
    """Has no effect: every prefix is cached."""


class TextBlock(_Block):
    """A piece of text."""

    type: Literal["text"]
    text: Text
    citations: Any = None
    """Sources that an earlier answer named; models here are not told."""


class ThinkingBlock(BaseModel):
    """Thinking of the assistant, which some chat templates repeat."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None
    """Accepted whatever it is."""


class RedactedThinkingBlock(BaseModel):
    """Thinking of another server's model that nobody else can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(_Block):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: Identifier
    name: Identifier
    input: dict[str, Any]
    caller: Any = None
    """Who called; it is always the model."""


def _one_of(*kinds: str, remedy: str) -> Discriminator:
    """Return the discriminator of blocks by type; tags have hyphens to be no names of fields."""
    names = ", ".join(kinds)

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"{kind}-block" if kind in kinds else None

    message = f"Input should be a block of type {names}; {remedy}"
    return Discriminator(tag, custom_error_type="block_type", custom_error_message=message)


def _kind_of_content(value: Any) -> str:
    return "of-blocks" if isinstance(value, list) else "of-text"


_READS_TEXT = "models here read text only, so put what it says into text"
_Blocks = Field(max_length=MAX_PARTS, fail_fast=True)
_TextBlocks = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("text-block")], _one_of("text", remedy=_READS_TEXT)]],
    _Blocks,
]
TextContent = Annotated[
    Annotated[Text, Tag("of-text")] | Annotated[_TextBlocks, Tag("of-blocks")],
    Discriminator(_kind_of_content),
]


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Identifier
    content: TextContent | None = None
    is_error: Flag | None = None
    """Whether the tool failed, which the model is told by a first line."""


UserBlock = Annotated[
    Annotated[TextBlock, Tag("text-block")] | Annotated[ToolResultBlock, Tag("tool_result-block")],
    _one_of("text", "tool_result", remedy=_READS_TEXT),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("text-block")]
    | Annotated[ThinkingBlock, Tag("thinking-block")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking-block")]
    | Annotated[ToolUseBlock, Tag("tool_use-block")],
    _one_of(
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        remedy="this server runs no tools of its own, so leave it out",
    ),
]
Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


def _blocks_of(content: str | Sequence[Block]) -> Sequence[Block]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


class UserTurn(BaseModel):
    """A turn of the user, with the results of the calls in the turn before."""

    role: Literal["user"]
    content: Annotated[
        Annotated[Text, Tag("of-text")]
        | Annotated[list[UserBlock], _Blocks, Field(min_length=1), Tag("of-blocks")],
        Discriminator(_kind_of_content),
    ]

    @property
    def blocks(self) -> Sequence[Block]:
        """Content as blocks."""
        return _blocks_of(self.content)


class AssistantTurn(BaseModel):
    """An earlier turn of the model; if it is the last one, the model goes on with it."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[Text, Tag("of-text")]
        | Annotated[list[AssistantBlock], _Blocks, Tag("of-blocks")],
        Discriminator(_kind_of_content),
    ]

    @property
    def blocks(self) -> Sequence[Block]:
        """Content as blocks."""
        return _blocks_of(self.content)


class SystemTurn(BaseModel):
    """Instructions within the conversation, which become part of the user's turn.

    Many chat templates take instructions at the beginning only.
    """

    role: Literal["system"]
    content: TextContent

    @property
    def blocks(self) -> Sequence[Block]:
        """Content as blocks of a user's turn."""
        told = texts_of(self.content)
        return [TextBlock(type="text", text=_REMINDER.format(each)) for each in told]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


def _num_blocks(value: Any) -> int:
    if not isinstance(value, list):
        return 0
    return sum(1 + _num_blocks(each.get("content")) for each in value if isinstance(each, dict))


def _check_num_blocks(value: Any) -> Any:
    """Refuse conversations of too many pieces before a model is made of each."""
    if (given := _num_blocks(value)) > 2 * MAX_MESSAGES:
        raise PydanticCustomError(
            "too_many_blocks",
            "Messages should be at most {most} turns and blocks together, not {given}",
            {"most": 2 * MAX_MESSAGES, "given": given},
        )
    return value


Turns = Annotated[
    list[Turn],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(_check_num_blocks),
]


def texts_of(content: str | Sequence[TextBlock]) -> list[str]:
    """Return the texts of some content."""
    return [content] if isinstance(content, str) else [block.text for block in content]


def chat_of(system: str | Sequence[TextBlock] | None, turns: Sequence[Turn]) -> list[ChatMessage]:
    """Return the messages of a chat that a system prompt and turns make.

    A turn of results and text becomes a message for each result and one for the text. Thinking,
    text and calls of an assistant's turn are one message.
    """
    told, num_first = texts_of(system or ""), 0
    while num_first < len(turns) and isinstance(turn := turns[num_first], SystemTurn):
        told += texts_of(turn.content)
        num_first += 1
    told = [each for each in told if each and not each.startswith(_BILLING)]
    found: list[ChatMessage] = []
    if told:
        found.append(InstructionMessage.model_construct(role="system", content=_parts(told)))
    for is_answer, group in groupby(turns[num_first:], key=lambda turn: turn.role == "assistant"):
        blocks = [block for turn in group for block in turn.blocks]
        found += _answer_of(blocks) if is_answer else _asked_of(blocks)
    return found


def _parts(texts: Sequence[str]) -> list[Any]:
    return [TextPart.model_construct(type="text", text=text) for text in texts]


def _asked_of(blocks: Sequence[Block]) -> Iterator[ChatMessage]:
    texts = list[str]()
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield UserMessage.model_construct(role="user", content=_parts(texts))
            texts = []
            told = texts_of(block.content or "")
            yield ToolMessage.model_construct(
                role="tool",
                content=_parts(["Error:", *told] if block.is_error else told),
                tool_call_id=block.tool_use_id,
            )
    if texts:
        yield UserMessage.model_construct(role="user", content=_parts(texts))


def _answer_of(blocks: Sequence[Block]) -> Iterator[ChatMessage]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call_of(block) for block in blocks if isinstance(block, ToolUseBlock)]
    if texts or calls or any(thoughts):
        yield PastAssistantMessage.model_construct(
            role="assistant",
            content=_parts(texts) or None,
            reasoning_content="\n".join(filter(None, thoughts)) or None,
            tool_calls=calls or None,
        )


def _call_of(block: ToolUseBlock) -> PastToolCall:
    given = block.input
    text = given.get(INVALID_JSON) if len(given) == 1 else None
    if not isinstance(text, str):
        text = to_json(given).decode()
    function = CalledFunction.model_construct(name=block.name, arguments=text)
    return PastToolCall.model_construct(id=block.id, type="function", function=function)
