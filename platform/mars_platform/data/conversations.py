"""Parses chat data, one conversation a row, and scores answers to it.

Imports no Ray, torch or HTTP library.
"""

import json
import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from mars_platform.config import describe_validation_error
from mars_platform.errors import UserError

ANSWER_MARK = "Answer:"
"""Mark behind which a response states its answer, at its end."""
_MARKS = re.compile(rf"{ANSWER_MARK}|####")
_NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?")


class ChatTurn(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, StringConstraints(min_length=1)]


class Conversation(BaseModel):
    """One row of training or evaluation data; its other columns are kept as extra fields."""

    model_config = ConfigDict(extra="allow")

    messages: list[ChatTurn]


def parse_conversation(text: str) -> Conversation:
    """Parse one JSONL line into a conversation that ends with an assistant turn.

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
    return validate_conversation(row)


def validate_conversation(row: Any) -> Conversation:
    """Turn one decoded row into a conversation that ends with an assistant turn.

    Raises:
        UserError: the row is not such a conversation.
    """
    if not isinstance(row, dict):
        raise UserError('a row must be an object with "messages"')
    try:
        conversation = Conversation.model_validate(row)
    except ValidationError as error:
        raise UserError(describe_validation_error(error, Conversation)) from error
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
    """Return the text behind the last mark; the empty text if there is no mark."""
    return _MARKS.split(text)[-1].strip() if _MARKS.search(text) else ""


def _value(text: str) -> Decimal | str:
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else text
