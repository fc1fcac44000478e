"""Shielded strings answer and cut as their originals do."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mars_platform.data.client_text import ClientText

STAND_INS = {"<": "\U00030000", ">": "\U00030001", "a": "\U00030002"}
text = st.text("<>ab \n", max_size=10)
some = st.text("<>ab ", min_size=1, max_size=3)


def shielded(original: str) -> ClientText:
    return ClientText(original.translate(str.maketrans(STAND_INS)), original)


def restored(value: Any) -> Any:
    """Return what a template's output would show in the end."""
    if isinstance(value, list | tuple):
        return type(value)(map(restored, value))
    if not isinstance(value, str):
        return value
    return "".join(value).translate({ord(new): old for old, new in STAND_INS.items()})


QUESTIONS = ["find", "rfind", "count", "startswith", "endswith", "__contains__", "__eq__", "__ne__"]
CUTS = ["split", "rsplit", "partition", "rpartition", "strip", "lstrip", "rstrip"]
OTHERS = ["removeprefix", "removesuffix", "__add__"]


@given(text, some)
def test_methods_do_what_those_of_plain_strings_do(original, part):
    client = shielded(original)
    for name in [*QUESTIONS, *CUTS, *OTHERS]:
        expected = getattr(original, name)(part)
        for argument in (part, shielded(part)):
            assert restored(getattr(client, name)(argument)) == expected, name
    assert restored(part + client) == part + original
    assert client.startswith((part, "b")) == original.startswith((part, "b"))
    assert original == client
    assert ({client: 1}.get(original), {original: 1}.get(client)) == (1, 1)


@given(text, some, text, st.integers(-1, 2))
def test_parts_are_replaced_where_the_original_has_them(original, old, new, count):
    found = shielded(original).replace(old, new, count)
    assert restored(found) == original.replace(old, new, count)
    assert restored(shielded(original).split(old, count)) == original.split(old, count)
    assert restored(shielded(original).rsplit(old, count)) == original.rsplit(old, count)


@given(text, st.integers(-3, 3), st.integers(-3, 3))
def test_white_space_lines_and_slices_are_those_of_the_original(original, start, end):
    client = shielded(original)
    for name in ("split", "rsplit", "strip", "lstrip", "rstrip", "splitlines"):
        assert restored(getattr(client, name)()) == getattr(original, name)(), name
    assert restored(client.splitlines(keepends=True)) == original.splitlines(keepends=True)
    assert restored(client[start:end]) == original[start:end]
    assert restored(list(client)) == list(original)


@given(text, some)
def test_nothing_that_is_cut_from_a_shielded_string_has_its_telling_characters(original, part):
    client = shielded(original)
    for name in [*CUTS, "removeprefix", "removesuffix"]:
        found = getattr(client, name)(part)
        pieces = [found] if isinstance(found, str) else found
        assert not any(each in "".join(piece) for piece in pieces for each in STAND_INS), name
    assert not set(STAND_INS) & set("".join(["", client, f"{client}", str(client)]))
