"""Parsers for the formats in which each model family writes tool calls."""

import re

from mars_serve.api.tools.formats import HERMES_BEGIN, HERMES_END, LLAMA_TAG, MISTRAL_TAG, Family
from mars_serve.api.tools.parser import ReadsWhether, Steps, ToolParser

_NAMED_HEADER = re.compile(r"\s*([\w-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*\{", re.ASCII)
_NAMED_CHARACTERS = re.compile(r"[\w\s\[\]{-]", re.ASCII)
_MAX_NAMED_HEADER = 256


class HermesParser(ToolParser):
    """Parses calls that are JSON objects, each between two tags."""

    def _calls(self) -> Steps:
        while (yield from self._find(HERMES_BEGIN)):
            char = yield from self._read_past_space()
            if char != "{":
                self._give_back(len(char))
                self._release()
            elif (yield from self._call_object(any_name=True)):
                yield from self._drop_end_tag()
            if self._is_full:
                return

    def _drop_end_tag(self) -> Steps:
        """Drop the closing tag, which models may forget."""
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
    """Parses an output that is one JSON object, optionally after a tag, or contains no calls.

    Without the tag, an object is a call only if it names a known tool: an answer may be JSON, too.
    """

    def _calls(self) -> Steps:
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
            if char == ";":  # Llama's separator of several calls
                char = yield from self._read_past_space()
        if not char and self.num_calls:
            self._held.clear()
            return
        yield from self._release_rest()

    def _rest_of_tag(self) -> ReadsWhether:
        for expected in LLAMA_TAG[1:]:
            if (yield from self._read()) != expected:
                return False
        return True


class MistralParser(ToolParser):
    """Parses a tag followed by a JSON list of calls, or by a name and its arguments."""

    def _calls(self) -> Steps:
        while (yield from self._find(MISTRAL_TAG)):
            char = yield from self._read_past_space()
            if char == "[":
                yield from self._list()
            else:
                self._give_back(len(char))
                yield from self._named()
            if self._is_full:
                return

    def _list(self) -> Steps:
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

    def _named(self) -> Steps:
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


PARSERS: dict[Family, type[ToolParser]] = {
    Family.HERMES: HermesParser,
    Family.LLAMA: LlamaParser,
    Family.MISTRAL_LIST: MistralParser,
    Family.MISTRAL_NAMED: MistralParser,
}
