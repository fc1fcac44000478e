"""The conversations of real code are whole functions, and none is both trained on and held out."""

import ast
import json
import textwrap

import pytest
from bench import standard_library
from bench.standard_library import functions_of, is_held_out, main, passages_of

SOURCE = '''
import os

class Shelf:
    def put(self, book: str,
            place: int = 0) -> None:
        """Put a book on the shelf."""
        # the first free place
        while place in self.places:
            place += 1
        self.places[place] = book

    @property
    def size(self): return len(self.places)

    def clear(self):
        for place in list(self.places):
            del self.places[place]


async def later(seconds):
    def inner(value):
        return value + seconds  # part of the body

    await sleep(inner(seconds))
'''


def test_a_function_is_split_at_the_beginning_of_its_body():
    (put, put_body), (clear, clear_body), (later, later_body) = functions_of(SOURCE)
    assert put.endswith('place: int = 0) -> None:\n        """Put a book on the shelf."""')
    assert put_body == (
        "# the first free place\nwhile place in self.places:\n    place += 1\n"
        "self.places[place] = book"
    )
    assert clear.endswith("def clear(self):")
    assert clear_body.startswith("for place in")
    assert later.endswith("async def later(seconds):")
    assert later_body.startswith("def inner(value):")
    for _, body in functions_of(SOURCE):
        ast.parse(f"async def function():\n{textwrap.indent(body, '    ')}")


def test_passages_are_the_module_in_pieces():
    source = "".join(f"value_{index} = {index} * {index}\n" for index in range(200))
    passages = list(passages_of(source))
    assert "".join(text for _, text in passages) == source
    assert all(len(text) <= 1_000 for _, text in passages)
    assert passages[1][0] == passages[0][1][-300:]


@pytest.mark.parametrize("held_out_first", [False, True])
def test_nothing_that_is_held_out_is_trained_on(tmp_path, monkeypatch, held_out_first):
    names = [f"{'az'[index % 2]}{index}" for index in range(200)]
    kept = next(name for name in names if not is_held_out(name) and (name < "b") != held_out_first)
    held = next(name for name in names if is_held_out(name) and (name < "b") == held_out_first)
    for name in (kept, held):
        (tmp_path / "lib" / name).mkdir(parents=True)
        own = f"def own(item):\n    found = [item, '{name}']\n    return tuple(found * 2)\n"
        (tmp_path / "lib" / name / "__init__.py").write_text(SOURCE + own)
    paths = {"stdlib": str(tmp_path / "lib")}
    monkeypatch.setattr(standard_library.sysconfig, "get_paths", lambda: paths)
    main(tmp_path / "data")
    train, held_out = (
        [
            json.loads(line)["messages"]
            for line in (tmp_path / "data" / name).read_text().splitlines()
        ]
        for name in ("train.jsonl", "eval.jsonl")
    )
    assert all(each[0]["content"].startswith(f"# {held}\n") for each in held_out)
    assert all(each[0]["content"].startswith(f"# {kept}") for each in train)
    answers = {each[1]["content"] for each in held_out}
    assert len(answers) == len(held_out) == 4
    functions = [each for each in train if ", continued\n" not in each[0]["content"]]
    assert [kept in each[1]["content"] for each in functions] == [True]
