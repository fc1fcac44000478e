"""Parses chat data, one conversation a row, and scores answers to it.

Imports no Ray, torch or HTTP library.
"""

import json
import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from mars_platform.config import describe_validation_error
from mars_platform.data.shapes import NO_NAMES, ColumnNames, to_messages
from mars_platform.errors import UserError

ANSWER_MARK = "Answer:"
"""Mark behind which a response states its answer, at its end."""
_MARKS = re.compile(rf"{ANSWER_MARK}|####")
_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?")


Identifier = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]


def _check_texts(value: Any) -> Any:
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        raise ValueError("must not hold half of a surrogate pair; mend the text") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply; flatten it") from error
    return value


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise ValueError('must be {"type": "function", "function": {"name": ...}}')
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("function.name: must be a text that is not empty")
    return tool


_Variable = Annotated[str | bool | int | float | None, AfterValidator(_check_texts)]
Text = Annotated[str, AfterValidator(_check_texts)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_texts)]
Tool = Annotated[JsonObject, AfterValidator(_check_tool)]


class CalledFunction(BaseModel):
    """The function of a tool call."""

    name: Identifier
    arguments: Annotated[str | dict[str, Any], AfterValidator(_check_texts)]
    """Arguments as the row has them: an object, or JSON text of one."""


class ToolCall(BaseModel):
    """A tool call of an assistant turn, in OpenAI's form."""

    id: Identifier
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatTurn(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Identifier | None = None
    tool_call_id: Identifier | None = None
    """Call that a turn of the role ``tool`` answers."""
    reasoning_content: Text | None = None
    """Thinking before the content of an assistant turn."""
    weight: Literal[0, 1] | None = None
    """0 for an assistant turn that is not learned, whatever ``data.loss_on`` is."""
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=128)] | None = None
    content: Text = Field(default="", validate_default=True)
    """Text; empty at most beside thinking or tool calls, and in roles other than these two:
    ``user`` and ``assistant``."""

    @field_validator("content", mode="before")
    @classmethod
    def _says_something(cls, content: Any, info: ValidationInfo) -> Any:
        is_answer = info.data.get("role") == "assistant"
        says_more = info.data.get("tool_calls") or info.data.get("reasoning_content")
        if is_answer and says_more:
            return content or ""
        if content == "" and (is_answer or info.data.get("role") == "user"):
            raise ValueError("must not be empty; give a text or leave the row out")
        return content

    def as_message(self) -> dict[str, Any]:
        """Return the turn without the keys that it lacks, because templates test for them."""
        rest = self.model_dump(exclude={"weight"})
        found = {"role": self.role, "content": self.content, **rest}
        return {key: value for key, value in found.items() if value is not None}


class Conversation(BaseModel):
    """One row of training or evaluation data; its other columns are kept as extra fields."""

    model_config = ConfigDict(extra="allow")

    shape: str = "messages"
    """Name of the shape that the row had."""
    messages: list[ChatTurn]
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    """Functions that the model may call, in OpenAI's form."""
    chat_template_kwargs: dict[_VariableName, _Variable] | None = None
    """Variables of the chat template, such as ``enable_thinking``."""

    def request(self) -> dict[str, Any]:
        """Return the fields of a chat request that asks for the final turn."""
        messages = [turn.as_message() for turn in self.messages[:-1]]
        for call in (call for each in messages for call in each.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            if not isinstance(arguments, str):
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        fields = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        return {"messages": messages, **{key: each for key, each in fields.items() if each}}


def parse_conversation(text: str, columns: ColumnNames = NO_NAMES) -> Conversation:
    """Parse one JSONL line into a conversation that ends with an assistant turn.

    ``columns`` names those columns that have other names than `to_messages` knows.

    Raises:
        UserError: the line is malformed; the caller adds file and line number.
    """
    if not text.strip():
        raise UserError("empty line")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # too long a number, or nested too deeply
        raise UserError(f"not valid JSON ({error})") from error
    return validate_conversation(row, columns)


def validate_conversation(row: Any, columns: ColumnNames = NO_NAMES) -> Conversation:
    """Turn one decoded row of any shape into a conversation that ends with an assistant turn."""
    if not isinstance(row, dict):
        raise UserError('a row must be an object, such as {"messages": [...]}')
    shape, content = to_messages(row, columns)
    try:
        conversation = Conversation.model_validate({**content, "shape": shape})
    except ValidationError as error:
        read_as = "" if shape == "messages" else f" (in a row read as {shape})"
        raise UserError(f"{describe_validation_error(error, Conversation)}{read_as}") from error
    if not conversation.messages or conversation.messages[-1].role != "assistant":
        raise UserError("messages: the last turn must have the role 'assistant'")
    if len(conversation.messages) == 1:
        raise UserError("messages: an assistant turn needs a turn before it")
    return conversation


def read_answer(conversation: Conversation) -> str | None:
    """Return the expected answer from the column ``answer``; None if the row has none.

    Raises:
        UserError: the answer is empty, or neither a text nor a number.
    """
    answer = (conversation.model_extra or {}).get("answer")
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise UserError("answer: must be a text or a number; leave it out where there is none")
    if not str(answer).strip():
        raise UserError("answer: must not be empty; leave it out where there is none")
    return str(answer)


def is_correct(response: str, answer: str) -> bool:
    """Return whether a response ends with a mark followed by exactly this answer.

    The marks are ``Answer:`` and GSM8K's ``####``; the last one counts, also in the expected
    answer, which may stand at the end of a worked solution. White space around the answer does not
    matter, and numbers are compared by value: 1,234 is 1234 and 72.0 is 72. Everything else is
    compared exactly.
    """
    given = _behind_mark(response)
    return bool(given) and _value(given) == _value(_behind_mark(answer) or answer.strip())


def _behind_mark(text: str) -> str:
    return _MARKS.split(text)[-1].strip() if _MARKS.search(text) else ""


def _value(text: str) -> Decimal | str:
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else text
