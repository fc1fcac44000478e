import ast
import json
import re
import textwrap

import pytest
from bench.beds import standard_library
from bench.beds.standard_library import MANIFEST, functions_of, is_held_out, passages_of, write
from typer.testing import CliRunner

from mars_platform.errors import UserError

SOURCE = '''
import os

class Shelf:
    """A shelf."""

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
        # all of them
        for place in list(self.places):
            del self.places[place]


async def later(seconds):
    """Wait
    for some time."""

    def inner(value):
        return value + seconds  # part of the body

    await sleep(inner(seconds))
'''


def held_out_name():
    return next(name for name in (f"held{index}" for index in range(1_000)) if is_held_out(name))


def trained_name():
    return next(
        name for name in (f"a_kept{index}" for index in range(1_000)) if not is_held_out(name)
    )


@pytest.fixture
def root(tmp_path):
    """A library of a trained package and, behind it, a held-out one, which share a function."""
    root = tmp_path / "lib"
    shared = "def shared(values):\n    total = sum(values)\n    return [total, *values, total]\n"
    for name in (trained_name(), held_out_name()):
        package = root / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"{SOURCE}\n{shared}".replace("later", name))
        (package / "more.py").write_text(
            f"def only_here(item):\n    found = [item, '{name}']\n    return tuple(found * 2)\n"
        )
    (root / "_sysconfigdata_of_a_build.py").write_text(SOURCE.replace("book", "build"))
    (root / "test").mkdir()
    (root / "test" / "checks.py").write_text(SOURCE)
    return root


def rows(file):
    return [json.loads(line)["messages"] for line in file.read_text().splitlines()]


def test_a_function_is_split_at_the_beginning_of_its_body():
    put, clear, later = functions_of("shop.shelf", SOURCE.encode())
    assert put.beginning.endswith(
        'place: int = 0) -> None:\n        """Put a book on the shelf."""'
    )
    assert put.body == (
        "# the first free place\nwhile place in self.places:\n    place += 1\n"
        "self.places[place] = book"
    )
    assert clear.beginning.endswith("def clear(self):")
    assert clear.body.startswith("# all of them\nfor place in")
    assert later.beginning.endswith('async def later(seconds):\n    """Wait\n    for some time."""')
    assert later.body.startswith("def inner(value):")
    assert later.row()["messages"][0]["content"].startswith("# shop.shelf\n")


def test_a_method_far_from_its_class_is_shown_with_it():
    method = "    def put(self, book):\n        return [self.find(book)] * 2 + [book, book]\n"
    source = "class Shelf(Furniture):\n" + "\n".join([method] * 9)
    *_, last = functions_of("shop", source.encode())
    assert last.beginning.startswith("class Shelf(Furniture):\n    ...\n")


def test_bodies_are_code():
    for function in functions_of("shop.shelf", SOURCE.encode()):
        ast.parse(f"async def function():\n{textwrap.indent(function.body, '    ')}")


def test_passages_are_the_module_in_pieces():
    source = "".join(f"value_{index} = {index} * {index}\n" for index in range(200))
    found = list(passages_of("shop", source.encode()))
    texts = [row["messages"][1]["content"] for row in found]
    assert "".join(texts) == source
    assert all(len(text) <= 1_000 for text in texts)
    assert found[1]["messages"][0]["content"].endswith(texts[0][-300:])


def test_the_same_library_gives_the_same_data(root, tmp_path):
    for name in ("one", "other"):
        write(tmp_path / name, root, None)
    for name in ("train.jsonl", "eval.jsonl", "standard_library.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_nothing_that_is_held_out_is_trained_on(root, tmp_path):
    num_train, num_held_out = write(tmp_path / "data", root, None)
    train, held_out = (rows(tmp_path / "data" / name) for name in ("train.jsonl", "eval.jsonl"))
    assert (len(train), len(held_out)) == (num_train, num_held_out)
    assert all(each[0]["content"].startswith(f"# {held_out_name()}") for each in held_out)
    assert all(each[0]["content"].startswith(f"# {trained_name()}") for each in train)
    answers = [each[1]["content"] for each in held_out]
    assert len(answers) == len(set(answers)) == 5
    functions = [each for each in train if ", continued\n" not in each[0]["content"]]
    assert not {each[1]["content"] for each in functions} & set(answers)
    assert not {"checks", "build"} & {*re.findall("[a-z]+", str(train + held_out))}


def test_another_library_is_refused(root, tmp_path):
    write(tmp_path / "data", root, None)
    expected = json.loads((tmp_path / "data" / "standard_library.json").read_text())
    write(tmp_path / "same", root, expected)
    changed = root / held_out_name() / "more.py"
    changed.write_text(changed.read_text().replace("* 2", "* 3"))
    with pytest.raises(UserError, match=rf"{held_out_name()}/more\.py of Python 3\.") as error:
        write(tmp_path / "other", root, expected)
    assert "--any-version" in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "other").exists()
    write(tmp_path / "other", root, None)
    expected["files"] = json.loads((tmp_path / "other" / MANIFEST.name).read_text())["files"]
    with pytest.raises(UserError, match=r"eval\.jsonl of Python"):  # as other rules would write it
        write(tmp_path / "another", root, expected)


def test_existing_data_is_kept(root, tmp_path):
    (tmp_path / "eval.jsonl").write_text("mine\n")
    with pytest.raises(UserError, match=r"has eval\.jsonl already"):
        write(tmp_path, root, None)
    assert (tmp_path / "eval.jsonl").read_text() == "mine\n"


def test_the_command_names_the_first_file_that_differs(root, tmp_path, monkeypatch):
    monkeypatch.setattr(standard_library, "library_root", lambda: root)
    app = standard_library.typer.Typer()
    app.command()(standard_library.main)
    refused = CliRunner().invoke(app, [str(tmp_path / "data")])
    assert refused.exit_code == 1
    assert refused.output.count("\n") == 1
    assert "is not that of Python 3.11.7" in refused.output
    taken = CliRunner().invoke(app, [str(tmp_path / "data"), "--any-version"])
    assert taken.exit_code == 0
    assert "5 held-out" in taken.output
