"""Bounds on what clients send: the size of JSON, and texts that are too long or take too long.

They are checked before anything is built, rendered, tokenized or copied. The time and memory that
JSON takes to parse depend on the number of its values rather than on its bytes, and those of its
validation on the number of its mistakes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from mars_platform.data.client_text import strings_in
from mars_serve.api.errors import TOO_LONG, ApiError, invalid_value
from mars_serve.api.messages import ChatMessage, PastAssistantMessage, RefusalPart, Tool
from mars_serve.config.served import ServedModel
from mars_serve.config.settings import LimitSettings

BYTES_PER_TOKEN = 16
"""Most bytes of text for each token that fits. Ordinary text has three to five; only long runs of
one character have more."""
MAX_COPIED_TOKENS = 2**20
"""Most prompt tokens of a request, counted once for each output: each goes to the model."""

MAX_VALUES_OF_ARGUMENTS = 2**15
"""Most names and values in the arguments of all tool calls of a conversation."""
MAX_REPORTED = 2**16
"""Most log-probabilities that a response holds at once. Each takes half a kilobyte of memory."""

_OPENING, _CLOSING = b"[{", b"]}"
_SEPARATORS = b",:"
_ZERO, _NUM_DIGITS = ord("0"), 10
_MOST_DIGITS = 399  # the longest float has 309 digits before its point
_FEW_DIGITS = 18
"""Digits of a number that takes next to no time to read: it fits 64 bits."""
_MOST_IN_LONG = 2**18
"""Most digits of longer numbers together, which take a millisecond."""
_DEPTH_OF = np.zeros(256, np.int8)
_DEPTH_OF[list(_OPENING)] = 1
_DEPTH_OF[list(_CLOSING)] = -1
_COUNTS = np.zeros(256, np.uint8)
_COUNTS[list(_OPENING + _SEPARATORS)] = 1
STEP = 2**17
"""Bytes of a body that are looked at at once, since other threads wait meanwhile."""
_QUOTE = ord('"')


# JSON


@dataclass
class JsonSize:
    """The size of a JSON text beside its strings; it is exact for valid JSON."""

    depth: int = 0
    num_values: int = 0
    """Number of separators and opening brackets: about the number of names and values."""
    has_long_number: bool = False
    """Whether a number has so many digits that reading it takes long."""
    num_in_long: int = 0
    """Digits of numbers that do not fit 64 bits."""

    @property
    def has_many_digits(self) -> bool:
        """Whether reading its numbers takes long."""
        return self.has_long_number or self.num_in_long > _MOST_IN_LONG


def json_size_of(text: bytes, max_values: int | None = None) -> JsonSize:
    """Measure a JSON text in UTF-8, up to where it has more than ``max_values``.

    It goes in small steps, so that in a thread it never holds up other threads.
    """
    found, level, in_string, start = JsonSize(), 0, False, 0
    while start < len(text) and (max_values is None or found.num_values <= max_values):
        end = start + STEP
        piece = text[start:end]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        end += num_backslashes % 2  # an escape sequence must not be cut in two
        codes, in_string = _outside_strings(text[start:end], in_string)
        steps = _DEPTH_OF[codes]
        levels = level + steps[steps != 0].cumsum(dtype=np.int64)
        if len(levels):
            level = int(levels[-1])
            found.depth = max(found.depth, int(levels.max()))
        found.num_values += int(_COUNTS[codes].sum(dtype=np.int64))
        runs = _runs(codes - _ZERO < _NUM_DIGITS)
        found.has_long_number |= bool(runs.max() > _MOST_DIGITS)
        found.num_in_long += int(runs[runs > _FEW_DIGITS].sum())
        start = end
    return found


def most_depth(text: bytes) -> int:
    """Return an upper bound of `JsonSize.depth` that takes next to no time."""
    return sum(text.count(code) for code in _OPENING)


def _outside_strings(text: bytes, in_string: bool) -> tuple[NDArray[np.uint8], bool]:
    """Return the bytes of a piece of JSON that belong to no string, and whether it ends in one.

    ``text`` does not end within an escape sequence; ``in_string`` says whether it begins in a
    string.
    """
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends one
    codes = np.frombuffer(plain, np.uint8)
    is_quote = codes == _QUOTE
    is_inside = np.logical_xor.accumulate(is_quote) ^ in_string
    ends_inside = bool(is_inside[-1]) if len(codes) else in_string
    return codes[~(is_inside | is_quote)], ends_inside


def _runs(flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.diff(np.flatnonzero(~flags), prepend=-1, append=len(flags)) - 1


def json_length(value: Any) -> int:
    """Return about the length of a value as JSON, several times as fast as `json` would write it.

    Values that cannot be written count nothing; `json` says more about them.
    """
    try:
        return len(to_json(value))
    except ValueError:  # half a surrogate pair
        return 0


# Texts. The checks raise `ApiError` 400.


def most_tokens(model: ServedModel, limits: LimitSettings) -> int:
    """Return the most tokens that a prompt may have."""
    return min(model.max_length, limits.prompt_tokens or model.max_length)


def check_length(where: str, num_bytes: int, model: ServedModel, limits: LimitSettings) -> None:
    """Refuse a text that is so long that its tokens cannot fit."""
    most = most_tokens(model, limits)
    if num_bytes > most * BYTES_PER_TOKEN:
        reason = f"{num_bytes} bytes of text cannot fit into the limit of {most} tokens"
        raise too_long(where, f"{reason}; shorten it")


def check_num_ids(where: str, num_ids: int, model: ServedModel, limits: LimitSettings) -> None:
    """Refuse a list of token ids that is longer than any that fits."""
    most = most_tokens(model, limits)
    if num_ids > most:
        raise too_long(where, f"{num_ids} tokens exceed the limit of {most}; send fewer")


def check_copies(where: str, num_tokens: int, num_outputs: int) -> None:
    """Refuse prompts that are too many tokens once each output has its own."""
    most = MAX_COPIED_TOKENS
    if num_outputs > 1 and num_tokens > most:
        reason = f"{num_tokens} prompt tokens, counted for each output, exceed the limit of {most}"
        raise too_long(where, f"{reason} per request; lower n or send several requests")


def check_reported(field: str, num_outputs: int, num_tokens: int, num_likely: int) -> None:
    """Refuse a response with more log-probabilities than may be held at once.

    They are those of ``num_tokens`` of each output, an echoed prompt's included, and of
    ``num_likely`` tokens beside each. ``field`` is the body's field that limits the output tokens.
    """
    if num_tokens > most_reported(num_outputs, num_likely):
        reason = f"{num_outputs} outputs of {num_tokens} tokens with {num_likely} likely ones each"
        remedy = f"lower {field}, n or the number of likely tokens, or send several requests"
        raise invalid_value(
            field, f"{reason} exceed the limit of {MAX_REPORTED} log-probabilities; {remedy}"
        )


def most_reported(num_outputs: int, num_likely: int) -> int:
    """Return the most tokens an output whose log-probabilities may be held together."""
    return max(1, MAX_REPORTED // (num_outputs * (num_likely + 1)))


def too_long(where: str, reason: str) -> ApiError:
    """Return the error for a prompt that is too long for the model or this server."""
    return invalid_value(where, reason, code=TOO_LONG)


def check_arguments(messages: Sequence[ChatMessage]) -> None:
    """Refuse tool calls whose arguments, JSON as text, would take long to read."""
    texts = [text for message in messages for text in _arguments_of(message)]
    if sum(map(len, texts)) <= MAX_VALUES_OF_ARGUMENTS:
        return
    left = MAX_VALUES_OF_ARGUMENTS
    for text in texts:
        found = json_size_of(text.encode("utf-8", "replace"), left)
        left -= found.num_values
        if left < 0:
            reason = f"the arguments of tool calls have over {MAX_VALUES_OF_ARGUMENTS} names and"
            raise invalid_value("messages", f"{reason} values; shorten them")
        if found.has_many_digits:
            reason = "the arguments of tool calls have numbers of too many digits; shorten them"
            raise invalid_value("messages", reason)


def num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def num_bytes_of_chat(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> int:
    """Return the bytes of all texts of a conversation.

    A message counts as a token, which templates write for it at least, and a text as a byte more.
    """
    texts = (num_bytes(text) + 1 for message in messages for text in _texts_of(message))
    schemas = [tool.function.parameters for tool in tools or ()]
    told = [tool.function.description or "" for tool in tools or ()]
    others = (num_bytes(text) + 1 for text in strings_in([schemas, told, template_kwargs]))
    return len(messages) * BYTES_PER_TOKEN + sum(texts) + sum(others)


def _texts_of(message: ChatMessage) -> Iterator[str]:
    content = message.content
    parts: Iterable[Any] = () if content is None or isinstance(content, str) else content
    yield content if isinstance(content, str) else ""
    for part in parts:
        yield part.refusal if isinstance(part, RefusalPart) else part.text
    if isinstance(message, PastAssistantMessage):
        yield message.refusal or ""
        yield from filter(None, (message.reasoning_content, message.reasoning))
        yield from _arguments_of(message)


def _arguments_of(message: ChatMessage) -> Iterator[str]:
    calls = message.tool_calls if isinstance(message, PastAssistantMessage) else None
    for call in calls or ():
        yield call.function.arguments
