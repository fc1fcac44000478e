"""Takes calls out of a model's text as it comes.

Text is looked at character by character, so that what comes out, joined, does not depend on how the
text was parted. Text that may belong to a call is held back; what turns out to be none comes out as
content. Once a call's arguments have begun they are passed on as they come, whatever they are.
Knows forms of calls; no tokens, schemas or responses.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from itertools import groupby

from mars_serve.api.tools.formats import HERMES_BEGIN, HERMES_END, LLAMA_TAG, MISTRAL_TAG

_MAX_NAME = 64
_HEADER = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL
)
_NAMED_HEADER = re.compile(r"\s*([\w-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*\{", re.ASCII)
_NAMED_CHARACTERS = re.compile(r"[\w\s\[\]{-]", re.ASCII)
_MAX_NAMED_HEADER = 256
# Long runs are taken at once, which changes nothing but the time.
_WORDS = re.compile(r"(?:\s*[^\s<\[]+)*")
_INERT = re.compile(r'[^"\\{}\[\]<]+')


@dataclass(frozen=True)
class ContentDelta:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True)
class ToolStart:
    """A call begins; its arguments follow."""

    index: int
    """Of the call in its turn."""
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """JSON text that continues a call's arguments."""

    index: int
    text: str


ToolEvent = ContentDelta | ToolStart | ToolArguments

_Steps = Generator[None, None, None]
_Char = Generator[None, None, str]  # returns a character, or nothing at the end of the output
_Found = Generator[None, None, bool]


class _Nesting:
    """Follows JSON text behind an opening brace to the brace that closes it."""

    def __init__(self) -> None:
        self.depth = 1
        self.in_string = False
        self.is_escaped = False

    def take(self, char: str) -> None:
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
    """The calls of one output. Feed it text without special tokens, but for the calls' tags."""

    def __init__(self, names: Collection[str], *, is_parallel: bool) -> None:
        """``names`` are the tools' own; without ``is_parallel`` only the first call counts."""
        self.num_calls = 0
        """Calls that have begun."""
        self._names = frozenset(names)
        self._is_parallel = is_parallel
        self._input = ""
        self._position = 0
        self._is_last = False
        self._held: list[str] = []
        """Characters read that are neither passed on nor dropped."""
        self._events: list[ToolEvent] = []
        self._steps = self._all()

    def push(self, text: str, *, last: bool) -> list[ToolEvent]:
        """What this text settles; with ``last``, also what was held back."""
        self._input = self._input[self._position :] + text
        self._position, self._is_last = 0, last
        next(self._steps, None)
        events, self._events = self._events, []
        return list(_joined(events))

    def _all(self) -> _Steps:
        yield from self._calls()
        while (yield from self._read()):  # behind the one call that was asked for
            self._held.clear()

    @abstractmethod
    def _calls(self) -> _Steps:
        """Read the output, to its end or to the last call that counts."""

    @property
    def _is_full(self) -> bool:
        return self.num_calls > 0 and not self._is_parallel

    def _read(self) -> _Char:
        """The next character, which is held; nothing at the output's end."""
        while self._position == len(self._input):
            if self._is_last:
                return ""
            yield
        char = self._input[self._position]
        self._position += 1
        self._held.append(char)
        return char

    def _read_past_space(self) -> _Char:
        while (char := (yield from self._read())).isspace():
            pass
        return char

    def _give_back(self, num_chars: int) -> None:
        """The last characters held are to be read again."""
        if num_chars:
            again = "".join(self._held[-num_chars:])
            del self._held[-num_chars:]
            self._input = again + self._input[self._position :]
            self._position = 0

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """What of the input that is there matches, at once; it is not held."""
        found = pattern.match(self._input, self._position)
        if found is None:
            return ""
        self._position = found.end()
        return found[0]

    def _release(self, num_kept: int = 0) -> None:
        """Pass on as content what is held, but for the last characters."""
        end = len(self._held) - num_kept
        self._events.append(ContentDelta("".join(self._held[:end])))
        del self._held[:end]

    def _release_rest(self) -> _Steps:
        while True:
            self._release()
            if not (yield from self._read()):
                return

    def _find(self, tag: str) -> _Found:
        """Pass text on up to a tag, which is held with the white space before it.

        White space between and behind calls is no content. No tag has its first character twice.
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

    def _call_object(self, *, any_name: bool) -> _Found:
        """Read a call given as a JSON object, behind its brace; False, and released, if it is none.

        As a rule its name comes first, and its arguments are passed on as they come. ``<`` outside
        a string ends it, as it can only begin a tag.
        """
        nesting, text, is_first = _Nesting(), ["{"], True
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
                    yield from self._drop_object()
                    return True
        return self._take_whole("".join(text), any_name=any_name)

    def _take_whole(self, text: str, *, any_name: bool) -> bool:
        """A call in some other order, such as one without arguments."""
        call = _read_call(text)
        if call is None or not (any_name or call[0] in self._names):
            self._release()
            return False
        self._start(call[0])
        self._events.append(ToolArguments(self.num_calls - 1, call[1]))
        return True

    def _stream_call(self, name: str) -> _Steps:
        """Pass arguments on, from behind their brace, which was read."""
        self._start(name)
        index, nesting, char = self.num_calls - 1, _Nesting(), "{"
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

    def _start(self, name: str) -> None:
        self._held.clear()
        identifier = f"call_{secrets.token_hex(12)}"
        self._events.append(ToolStart(self.num_calls, identifier, name))
        self.num_calls += 1

    def _drop_object(self) -> _Steps:
        """Leave out what an object has behind its arguments; models forget the brace."""
        char = yield from self._read_past_space()
        if char == ",":  # further keys, such as an id
            nesting = _Nesting()
            while nesting.depth and (char := (yield from self._read())):
                if char == "<" and not nesting.in_string:
                    break
                nesting.take(char)
        if char not in ("}", ","):
            self._give_back(len(char))
        self._held.clear()


class HermesParser(ToolParser):
    """Calls are JSON objects, each between two tags."""

    def _calls(self) -> _Steps:
        while (yield from self._find(HERMES_BEGIN)):
            char = yield from self._read_past_space()
            if char != "{":
                self._give_back(len(char))
                self._release()
            elif (yield from self._call_object(any_name=True)):
                yield from self._drop_end()
            if self._is_full:
                return

    def _drop_end(self) -> _Steps:
        """Leave the closing tag out; models forget it."""
        partial, num_space = "", 0
        while char := (yield from self._read()):
            if not partial and char.isspace():
                num_space += 1
                continue
            partial += char
            if partial == HERMES_END:
                break
            if not HERMES_END.startswith(partial):
                self._give_back(num_space + len(partial))
                break
        self._held.clear()


class LlamaParser(ToolParser):
    """An output is one JSON object, with a tag before it or without, or it has no calls.

    An object without the tag is a call only if it names a tool: answers may be JSON, too.
    """

    def _calls(self) -> _Steps:
        char, is_tagged = (yield from self._read_past_space()), False
        if char == LLAMA_TAG[0]:
            is_tagged = yield from self._rest_of_tag()
            char = (yield from self._read_past_space()) if is_tagged else char
        while char == "{":
            if not (yield from self._call_object(any_name=is_tagged)):
                break
            if self._is_full:
                return
            self._held.clear()
            char = yield from self._read_past_space()
            if char == ";":  # how it parts several
                char = yield from self._read_past_space()
        if not char and self.num_calls:
            self._held.clear()
            return
        yield from self._release_rest()

    def _rest_of_tag(self) -> _Found:
        for expected in LLAMA_TAG[1:]:
            if (yield from self._read()) != expected:
                return False
        return True


class MistralParser(ToolParser):
    """Behind a tag there is a list of calls, or a name with its arguments."""

    def _calls(self) -> _Steps:
        while (yield from self._find(MISTRAL_TAG)):
            char = yield from self._read_past_space()
            if char == "[":
                yield from self._list()
            else:
                self._give_back(len(char))
                yield from self._named()
            if self._is_full:
                return

    def _list(self) -> _Steps:
        num_before = self.num_calls
        while (char := (yield from self._read_past_space())) == "{":
            if not (yield from self._call_object(any_name=True)) or self._is_full:
                return
            self._held.clear()
            char = yield from self._read_past_space()
            if char != ",":
                break
        if char != "]":
            self._give_back(len(char))
        if self.num_calls == num_before:
            self._release()
        self._held.clear()

    def _named(self) -> _Steps:
        num_chars = 0
        while (char := (yield from self._read())) != "{":
            num_chars += 1
            if not (_NAMED_CHARACTERS.fullmatch(char) and num_chars < _MAX_NAMED_HEADER):
                self._give_back(len(char))
                self._release()
                return
        header = _NAMED_HEADER.fullmatch("".join(self._held[-num_chars - 1 :]))
        if header:
            yield from self._stream_call(header[1])
        else:
            self._release()


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments' text of a call given as a JSON object; None if it is none."""
    try:
        call = json.loads(text)
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):  # JSON text once more, as some models write it
            arguments = json.loads(arguments)
        written = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    is_call = isinstance(name, str) and 0 < len(name) <= _MAX_NAME and written.startswith("{")
    return (name, written) if is_call else None


def _joined(events: list[ToolEvent]) -> Iterator[ToolEvent]:
    """The same events with texts that belong together in one piece, and without empty ones."""
    for (kind, index), group in groupby(events, lambda each: (type(each), _index_of(each))):
        if kind is ToolStart:
            yield from group
            continue
        text = "".join(each.text for each in group if not isinstance(each, ToolStart))
        if text:
            yield ContentDelta(text) if index is None else ToolArguments(index, text)


def _index_of(event: ToolEvent) -> int | None:
    return None if isinstance(event, ContentDelta) else event.index
