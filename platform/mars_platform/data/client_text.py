"""Text from clients that cannot be taken for control tokens while a chat template handles it.

Imports no Ray or HTTP library.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, SupportsIndex, overload


class ClientText(str):
    """A string whose telling characters are replaced by others, one for one.

    The characters of the string are the replacements, so whatever is joined or cut from it by any
    means holds them. Where a template asks a question, such as ``'</think>' in content``, the
    original answers; where it cuts, it cuts as it would cut the original.
    """

    _original: str

    def __new__(cls, replaced: str, original: str) -> Self:
        """Pair a string with its original, which has the same length."""
        made = super().__new__(cls, replaced)
        made._original = original
        return made

    def __str__(self) -> str:
        return self  # jinja's filters call str() on what they are given

    # questions that the original answers

    def __eq__(self, other: object) -> bool:
        return bool(self._original == _original(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._original != _original(other))

    def __hash__(self) -> int:
        return hash(self._original)

    def __contains__(self, part: Any) -> bool:
        return _original(part) in self._original

    def startswith(self, prefix: Any, *where: Any) -> bool:
        """Return whether the original starts with a prefix, or with one of several."""
        return bool(self._original.startswith(_originals(prefix), *where))

    def endswith(self, suffix: Any, *where: Any) -> bool:
        """Return whether the original ends with a suffix, or with one of several."""
        return bool(self._original.endswith(_originals(suffix), *where))

    def find(self, part: str, *where: Any) -> int:
        """Return where a part first occurs in the original, or -1."""
        return self._original.find(_original(part), *where)

    def rfind(self, part: str, *where: Any) -> int:
        """Return where a part last occurs in the original, or -1."""
        return self._original.rfind(_original(part), *where)

    def index(self, part: str, *where: Any) -> int:
        """Return where a part first occurs in the original."""
        return self._original.index(_original(part), *where)

    def rindex(self, part: str, *where: Any) -> int:
        """Return where a part last occurs in the original."""
        return self._original.rindex(_original(part), *where)

    def count(self, part: str, *where: Any) -> int:
        """Return how often a part occurs in the original."""
        return self._original.count(_original(part), *where)

    # pieces, cut where the original would be cut

    @overload
    def __getitem__(self, key: SupportsIndex) -> ClientText: ...
    @overload
    def __getitem__(self, key: slice) -> ClientText: ...
    def __getitem__(self, key: SupportsIndex | slice) -> ClientText:
        return ClientText(super().__getitem__(key), self._original[key])

    def __iter__(self) -> Iterator[str]:
        return (self[place] for place in range(len(self)))

    def __add__(self, other: str) -> ClientText:
        return ClientText(super().__add__(other), self._original + _original(other))

    def __radd__(self, other: str) -> ClientText:
        return ClientText(str.__add__(other, self), _original(other) + self._original)

    def strip(self, characters: str | None = None) -> ClientText:
        """Cut characters off both ends."""
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None) -> ClientText:
        """Cut characters off the beginning."""
        kept = len(self._original.lstrip(_original(characters)))
        return self[len(self) - kept :]

    def rstrip(self, characters: str | None = None) -> ClientText:
        """Cut characters off the end."""
        return self[: len(self._original.rstrip(_original(characters)))]

    def removeprefix(self, prefix: str) -> ClientText:
        """Cut off a prefix."""
        return self[len(self) - len(self._original.removeprefix(_original(prefix))) :]

    def removesuffix(self, suffix: str) -> ClientText:
        """Cut off a suffix."""
        return self[: len(self._original.removesuffix(_original(suffix)))]

    def split(self, separator: str | None = None, maxsplit: SupportsIndex = -1) -> Any:
        """Cut at a separator, or at white space."""
        return self._located(self._original.split(_original(separator), maxsplit), separator)

    def rsplit(self, separator: str | None = None, maxsplit: SupportsIndex = -1) -> Any:
        """Cut at a separator, or at white space, from the end."""
        return self._located(self._original.rsplit(_original(separator), maxsplit), separator)

    def splitlines(self, keepends: bool = False) -> Any:
        """Cut into lines."""
        lines = self._original.splitlines(keepends=True)
        pieces = self._located(lines, "")
        if keepends:
            return pieces
        return [
            piece[: len(line.splitlines()[0])] for piece, line in zip(pieces, lines, strict=True)
        ]

    def partition(self, separator: str) -> Any:
        """Cut at the first separator into what is before it, itself, and what is behind."""
        head, found, _ = self._original.partition(_original(separator))
        return self._cut_around(len(head), len(found))

    def rpartition(self, separator: str) -> Any:
        """Cut at the last separator into what is before it, itself, and what is behind."""
        head, found, _ = self._original.rpartition(_original(separator))
        return self._cut_around(len(head), len(found))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> ClientText:
        """Put a new text where the original has an old one; neither is changed itself."""
        if not old:
            return ClientText(super().replace(old, new, count), self._original)
        pieces = self.split(old, count)
        originals = (piece._original for piece in pieces)
        return ClientText(str.join(new, pieces), _original(new).join(originals))

    def _located(self, pieces: Sequence[str], separator: str | None) -> list[ClientText]:
        """Return the pieces of the original, which lie in it in this order, cut from this text."""
        found, end = list[ClientText](), 0
        for number, piece in enumerate(pieces):
            start = end
            if separator is None:  # white space alone lies between
                start = self._original.find(piece, end)
            elif number:
                start += len(separator)
            end = start + len(piece)
            found.append(self[start:end])
        return found

    def _cut_around(self, start: int, length: int) -> tuple[ClientText, ClientText, ClientText]:
        return self[:start], self[start : start + length], self[start + length :]


def _original(value: Any) -> Any:
    return value._original if isinstance(value, ClientText) else value


def _originals(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_original, value))
    return _original(value)


@dataclass(frozen=True)
class Shield:
    """Keeps the texts of a request apart from the control tokens of the template around them."""

    edges: Mapping[str, str]
    """Replacements of the characters that begin or end a control token."""
    every: Mapping[str, str]
    """These and, if a text is among ``inner``, replacements of all characters in control tokens."""
    inner: frozenset[str]
    """Texts that a template could complete to a control token on both sides."""
    occurrence: re.Pattern[str]
    """Matches a control token's text."""
    names: Mapping[str, str]
    """Secret names by the control tokens' texts."""
    tags: re.Pattern[str] | None = None
    """Matches tags that stay control tokens in what the model wrote; None if none does."""

    def of(self, value: Any) -> Any:
        """Return a client's value, at any depth, with the telling characters replaced."""
        if isinstance(value, str):
            table = self.every if value.strip() in self.inner else self.edges
            replaced = _replaced(value, table)
            return value if replaced == value else ClientText(replaced, value)
        if isinstance(value, Mapping):
            return {self.of(key): self.of(each) for key, each in value.items()}
        return [self.of(each) for each in value] if isinstance(value, list) else value

    def of_answer(self, text: str) -> str:
        """Return the content of an answer with the telling characters replaced outside of tags."""
        replaced: str = self.of(text)
        if self.tags is None or replaced is text:
            return replaced
        parts, end = list[str](), 0
        for match in self.tags.finditer(text):
            parts += [replaced[end : match.start()], match[0]]
            end = match.end()
        return ClientText("".join([*parts, replaced[end:]]), text)

    def seal(self, text: str) -> str:
        """Name the template's control tokens in a rendered text, and restore the clients' texts."""
        named = self.occurrence.sub(lambda match: self.names[match[0]], text)
        return _replaced(named, {new: old for old, new in self.every.items()})


def _replaced(text: str, table: Mapping[str, str]) -> str:
    for old, new in table.items():
        text = text.replace(old, new)  # str.translate takes a second for 4 MB that are not ASCII
    return text


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string in a value, at any depth, keys included."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
