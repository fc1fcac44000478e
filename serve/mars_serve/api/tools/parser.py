"""Takes tool calls out of a model's output while it is generated.

The text is read character by character, so the joined result does not depend on how it was divided
into pieces. Text that may belong to a call is held; it is released as content if it turns out not
to. Once a call's arguments have begun, they are passed on unchanged as they arrive.

The parsing methods are generators: `_read` suspends them at the end of the text so far, and `push`
resumes them with more text. So each model family's format reads as straight-line code.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from itertools import groupby

from pydantic_core import from_json

_MAX_NAME = 64
_HEADER = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL
)
# Long runs are taken at once, which only saves time.
_WORDS = re.compile(r"(?:\s*[^\s<\[]+)*")
_INERT = re.compile(r'[^"\\{}\[\]<]+')


@dataclass(frozen=True)
class ContentDelta:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class ToolStart:
    """The beginning of a call; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """The next piece of a call's arguments."""

    index: int
    text: str


ToolEvent = ContentDelta | ToolStart | ToolArguments

Steps = Generator[None, None, None]
"""A parsing method; it yields when it needs more text."""
ReadsCharacter = Generator[None, None, str]
"""A parsing method that returns a character, or an empty string at the end of the output."""
ReadsWhether = Generator[None, None, bool]
"""A parsing method that returns whether it found something."""


class JsonNesting:
    """Follows JSON text from an opening brace, already read, to the brace that closes it."""

    def __init__(self) -> None:
        self.depth = 1
        self.in_string = False
        self.is_escaped = False

    def take(self, char: str) -> None:
        """Follow one more character."""
        if self.in_string:
            if self.is_escaped:
                self.is_escaped = False
            elif char == "\\":
                self.is_escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class ToolParser(ABC):
    """Parser of one output; its text contains no special tokens except the tags of calls.

    ``names`` are the tools that the request offers. Unless ``is_parallel``, only the first call
    counts; if ``is_forced``, the output has no content.
    """

    def __init__(
        self, names: Collection[str], *, is_parallel: bool, is_forced: bool = False
    ) -> None:
        self.num_calls = 0
        """Number of calls that have begun."""
        self.num_whole = 0
        """Number of calls whose arguments have ended."""
        self._names = frozenset(names)
        self._is_parallel = is_parallel
        self.is_forced = is_forced
        self._input = ""
        self._position = 0
        """Index of the next character of the input."""
        self._is_last = False
        self._held: list[str] = []
        """Characters that were read and neither released nor dropped."""
        self._events: list[ToolEvent] = []
        self._steps = self._parse()

    def push(self, text: str, *, last: bool) -> list[ToolEvent]:
        """Return the events that this text completes; if ``last``, also all held text."""
        self._input = self._input[self._position :] + text
        self._position, self._is_last = 0, last
        next(self._steps, None)
        events, self._events = self._events, []
        if self.is_forced:
            events = [each for each in events if not isinstance(each, ContentDelta)]
        return list(_merged(events))

    def _parse(self) -> Steps:
        yield from self._calls()
        while (yield from self._read()):  # drops all text after the only call that counts
            self._held.clear()

    @abstractmethod
    def _calls(self) -> Steps:
        """Parse the output up to its end or to the last call that counts."""

    @property
    def _is_full(self) -> bool:
        return self.num_calls > 0 and not self._is_parallel

    # Reading and releasing text

    def _read(self) -> ReadsCharacter:
        while self._position == len(self._input):
            if self._is_last:
                return ""
            yield
        char = self._input[self._position]
        self._position += 1
        self._held.append(char)
        return char

    def _read_past_space(self) -> ReadsCharacter:
        while (char := (yield from self._read())).isspace():
            pass
        return char

    def _give_back(self, num_chars: int) -> None:
        if num_chars:
            again = "".join(self._held[-num_chars:])
            del self._held[-num_chars:]
            self._input = again + self._input[self._position :]
            self._position = 0

    def _skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._input, self._position)
        if found is None:
            return ""
        self._position = found.end()
        return found[0]

    def _release(self, num_kept: int = 0) -> None:
        end = len(self._held) - num_kept
        self._events.append(ContentDelta("".join(self._held[:end])))
        del self._held[:end]

    def _release_rest(self) -> Steps:
        while True:
            self._release()
            if not (yield from self._read()):
                return

    # Finding calls

    def _find(self, tag: str) -> ReadsWhether:
        """Release text up to a tag; hold the tag and the white space before it.

        White space between and after calls is not content. The search relies on tags whose first
        character occurs only once.
        """
        partial = ""
        while char := (yield from self._read()):
            if not partial and char.isspace():
                continue
            partial += char
            if partial == tag:
                return True
            if not tag.startswith(partial):
                partial = char if char == tag[0] else ""
                is_space = char.isspace()
                self._release(num_kept=1 if partial or is_space else 0)
                if not (partial or is_space):
                    self._events.append(ContentDelta(self._skip(_WORDS)))
        if partial or self.num_calls == 0:
            self._release()
        self._held.clear()
        return False

    def _call_object(self, *, any_name: bool) -> ReadsWhether:
        """Parse a call written as a JSON object whose opening brace was read.

        The call may name an unknown tool only if ``any_name``. If the object turns out to be no
        call, it is released. Usually the name comes first, and the arguments are passed on as they
        arrive. A ``<`` outside a string ends the object, since it can only begin a tag.
        """
        nesting, text, is_first = JsonNesting(), ["{"], True
        while nesting.depth:
            char = yield from self._read()
            if not char or (char == "<" and not nesting.in_string):
                self._give_back(len(char))
                self._release()
                return False
            text.append(char)
            nesting.take(char)
            if is_first and nesting.depth == 2:
                is_first = False
                header = _HEADER.fullmatch("".join(text))
                if header and (any_name or header[1] in self._names):
                    yield from self._stream_call(header[1])
                    yield from self._drop_object_end()
                    return True
        return self._take_whole("".join(text), any_name=any_name)

    def _take_whole(self, text: str, *, any_name: bool) -> bool:
        """Parse a whole object whose keys are in another order or that has no arguments."""
        call = _read_call(text)
        if call is None or not (any_name or call[0] in self._names):
            self._release()
            return False
        self._start(call[0])
        self._events.append(ToolArguments(self.num_calls - 1, call[1]))
        self.num_whole += 1
        return True

    def _stream_call(self, name: str) -> Steps:
        """Start a call and pass on its arguments, whose opening brace was read."""
        self._start(name)
        index, nesting, char = self.num_calls - 1, JsonNesting(), "{"
        self._events.append(ToolArguments(index, char))
        while nesting.depth:
            char = yield from self._read()
            if not char or (char == "<" and not nesting.in_string):
                self._give_back(len(char))
                return
            self._held.clear()
            nesting.take(char)
            is_plain = nesting.depth > 0 and not nesting.is_escaped
            run = self._skip(_INERT) if is_plain else ""
            self._events.append(ToolArguments(index, char + run))
        self.num_whole += 1

    def _start(self, name: str) -> None:
        self._held.clear()
        identifier = f"call_{secrets.token_hex(12)}"
        self._events.append(ToolStart(self.num_calls, identifier, name))
        self.num_calls += 1

    def _drop_object_end(self) -> Steps:
        """Drop the end of an object after its arguments; models may forget the brace."""
        char = yield from self._read_past_space()
        if char == ",":  # further keys, such as an id
            nesting = JsonNesting()
            while nesting.depth and (char := (yield from self._read())):
                if char == "<" and not nesting.in_string:
                    break
                nesting.take(char)
        if char not in ("}", ","):
            self._give_back(len(char))
        self._held.clear()


def _read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments' JSON text of a call; None if the text is no call."""
    try:
        call = from_json(text)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # some models write the arguments as a JSON string
            arguments = from_json(arguments)
        written = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    is_call = isinstance(name, str) and 0 < len(name) <= _MAX_NAME and written.startswith("{")
    return (name, written) if is_call else None


def _merged(events: list[ToolEvent]) -> Iterator[ToolEvent]:
    """Join consecutive texts of the same kind and call, and drop empty ones."""
    for (kind, index), group in groupby(events, lambda each: (type(each), _index_of(each))):
        if kind is ToolStart:
            yield from group
            continue
        text = "".join(each.text for each in group if not isinstance(each, ToolStart))
        if text:
            yield ContentDelta(text) if index is None else ToolArguments(index, text)


def _index_of(event: ToolEvent) -> int | None:
    return None if isinstance(event, ContentDelta) else event.index
