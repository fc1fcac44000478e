"""Writes conversations out of the Python standard library: the bed of real text.

A user turn is the beginning of a function, from some lines before it to its docstring; the response
is the function's body. All modules of a package are either trained on or held out, and no body
occurs twice, so that nothing held out can be known by heart. Functions alone are little text, so
the training data also has passages: whole modules, cut into pieces that each continue the last.

The library differs between patch versions of Python. `standard_library.json` beside this file holds
the hash of every source file and of the result, and another library is refused.

    python -m bench.beds.standard_library OUT [--any-version]
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import platform
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from bench.beds.command import telling_mistakes

from mars_platform.cli.report import writing
from mars_platform.errors import UserError

MANIFEST = Path(__file__).with_name("standard_library.json")
TRAIN, EVAL = "train.jsonl", "eval.jsonl"

_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
"""Folders without code of the library's own, with code that is made to be tested, or with modules
that are all alike."""
_OF_A_BUILD = "_sysconfigdata"
"""Beginning of the name of files that are written when Python is built."""
_HELD_OUT_SHARE = 16
"""One of so many packages is held out."""
_CONTEXT_LINES = 12
"""Most lines before a function that its user turn shows."""
_MAX_DOCSTRING = 400
"""Most characters of a docstring; the rest is left out."""
_BODY = (40, 1_000)
"""Least and most characters of a body."""
_PASSAGE, _PASSAGE_CONTEXT = 1_000, 300
"""Most characters of a passage, and of what its user turn shows of the text before it."""


@dataclass(frozen=True)
class Function:
    """A function of the library."""

    module: str
    """Dotted name of its module."""
    beginning: str
    """Lines before the function, its class, its signature and its docstring."""
    body: str
    """Body as it stands in the source, with the indent of its first line taken off all lines."""

    def row(self) -> dict[str, Any]:
        """Return the function as a row of chat data."""
        messages = [
            {"role": "user", "content": f"# {self.module}\n{self.beginning}"},
            {"role": "assistant", "content": self.body},
        ]
        return {"messages": messages}


# --- files ----------------------------------------------------------------------------------------


def library_root() -> Path:
    """Return the directory of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[Path]:
    """Return the source files that are used, in the order of their names relative to the root."""
    found = [
        file
        for file in root.rglob("*.py")
        if not _LEFT_OUT & {*file.relative_to(root).parts} and not file.name.startswith(_OF_A_BUILD)
    ]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def module_name(file: Path, root: Path) -> str:
    """Return the dotted name of a file's module."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_held_out(module: str) -> bool:
    """Return whether a module is held out, which follows from its package's name."""
    package = module.partition(".")[0]
    return int(hashlib.sha256(package.encode()).hexdigest(), 16) % _HELD_OUT_SHARE == 0


# --- functions ------------------------------------------------------------------------------------


def functions_of(module: str, source: bytes) -> Iterator[Function]:
    """Yield the functions and methods of a module, in the order of the source.

    Functions inside of functions are part of those. A function whose body is very short or long, or
    begins on the line of the signature, is left out.
    """
    text = _text_of(source)
    lines = text.split("\n")  # as ast counts them; splitlines also splits at form feeds
    for node, owner in _definitions(ast.parse(text)):
        found = _function(module, lines, node, owner)
        if found is not None:
            yield found


_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(
    tree: ast.Module | ast.ClassDef, owner: ast.ClassDef | None = None
) -> Iterator[tuple[_Definition, ast.ClassDef | None]]:
    """Yield the functions of a module or class with the class that each stands in."""
    for node in tree.body:
        if isinstance(node, _Definition):
            yield node, owner
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node, node)


def _function(
    module: str, lines: list[str], node: _Definition, owner: ast.ClassDef | None
) -> Function | None:
    docstring = ast.get_docstring(node, clean=False)
    statements = node.body if docstring is None else node.body[1:]
    if not statements:
        return None
    before = node.body[0].end_lineno if docstring is not None else _end_of_signature(lines, node)
    assert before is not None
    assert node.end_lineno is not None
    if before >= statements[0].lineno:  # on one line with what stands before it
        return None
    body = textwrap.dedent("\n".join(lines[before : node.end_lineno])).strip("\n")
    if not _BODY[0] <= len(body) <= _BODY[1]:
        return None
    return Function(module, _beginning(lines, node, owner, docstring), body)


def _end_of_signature(lines: list[str], node: _Definition) -> int:
    """Return the number of the last line of a signature: comments may stand before the body."""
    last = node.body[0].lineno - 1
    while last > node.lineno and (not lines[last - 1].strip() or _is_comment(lines[last - 1])):
        last -= 1
    return last


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _beginning(
    lines: list[str], node: _Definition, owner: ast.ClassDef | None, docstring: str | None
) -> str:
    """Return the lines before a function's body, with at most some of those before the function."""
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
    begin = max(first - _CONTEXT_LINES, 0)
    header = []
    if owner is not None and owner.lineno - 1 < begin:
        header = [lines[owner.lineno - 1], f"{' ' * node.col_offset}..."]
    shown = [*header, *lines[begin:first]]
    signature = lines[first : _end_of_head(lines, node, docstring)]
    text = "\n".join([*shown, *signature])
    if docstring is not None:
        said = docstring if len(docstring) <= _MAX_DOCSTRING else f"{docstring[:_MAX_DOCSTRING]}..."
        text += f'\n{" " * node.body[0].col_offset}"""{said}"""'
    return text.strip("\n")


def _end_of_head(lines: list[str], node: _Definition, docstring: str | None) -> int:
    if docstring is None:
        return _end_of_signature(lines, node)
    return node.body[0].lineno - 1


def passages_of(module: str, source: bytes) -> Iterator[dict[str, Any]]:
    """Yield a module's text as rows of chat data, whole lines each."""
    before, passage = "", ""
    for line in _text_of(source).splitlines(keepends=True):
        if passage and len(passage) + len(line) > _PASSAGE:
            yield _passage_row(module, before, passage)
            before, passage = passage, ""
        passage += line
    if passage.strip():
        yield _passage_row(module, before, passage)


def _passage_row(module: str, before: str, passage: str) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": f"# {module}, continued\n{before[-_PASSAGE_CONTEXT:]}"},
        {"role": "assistant", "content": passage},
    ]
    return {"messages": messages}


def _text_of(source: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return source.decode(encoding).replace("\r\n", "\n").expandtabs(8)


# --- data and manifest ----------------------------------------------------------------------------


def conversations(root: Path) -> tuple[list[str], list[str]]:
    """Return the rows of training and held-out data as JSON; no body stands in two rows."""
    train, held_out, seen = list[str](), list[str](), set[str]()
    modules = [(module_name(file, root), file.read_bytes()) for file in source_files(root)]
    # Held-out functions come first, so that a body which is also trained on is not lost to them.
    for module, source in sorted(modules, key=lambda each: not is_held_out(each[0])):
        for function in functions_of(module, source):
            if function.body not in seen:
                seen.add(function.body)
                rows = held_out if is_held_out(module) else train
                rows.append(json.dumps(function.row()))
        if not is_held_out(module):
            train += map(json.dumps, passages_of(module, source))
    return train, held_out


def manifest(root: Path, results: dict[str, bytes]) -> dict[str, Any]:
    """Return Python's version, and the hashes of all source files and of the results."""
    files = {
        file.relative_to(root).as_posix(): _digest(file.read_bytes()) for file in source_files(root)
    }
    return {
        "python": platform.python_version(),
        "results": {name: _digest(content) for name, content in results.items()},
        "files": files,
    }


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse a library that is not the expected one.

    Raises:
        UserError: a source file or a result differs; the first one is named.
    """
    for kind in ("files", "results"):
        ours, theirs = found[kind], expected[kind]
        different = [
            name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)
        ]
        if different:
            raise UserError(
                f"the bed differs: {different[0]} of Python {found['python']} is not that of "
                f"Python {expected['python']}, on which the bed is pinned ({len(different)} of "
                f"{len({*ours, *theirs})} {kind} differ); run that version, or go on with "
                "--any-version, whose figures compare with none of the log"
            )


def write(out: Path, root: Path, expected: dict[str, Any] | None) -> tuple[int, int]:
    """Write the data and its manifest, and return the numbers of conversations.

    Args:
        out: directory, which is made if it is missing.
        root: directory of the library.
        expected: manifest that the library must have; None takes any.

    Raises:
        UserError: the library is another one, or the directory has data already, or cannot be
            written.
    """
    for name in (TRAIN, EVAL):
        if (out / name).exists():
            raise UserError(f"OUT: {out} has {name} already; name another directory")
    train, held_out = conversations(root)
    results = {TRAIN: _joined(train), EVAL: _joined(held_out)}
    found = manifest(root, results)
    if expected is not None:
        check(found, expected)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, content in results.items():
            (out / name).write_bytes(content)
        (out / MANIFEST.name).write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    return len(train), len(held_out)


def _joined(rows: Iterable[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(
    out: Annotated[Path, typer.Argument(help="Directory to write train.jsonl and eval.jsonl to.")],
    any_version: Annotated[
        bool, typer.Option("--any-version", help="Take the library of any version of Python.")
    ] = False,
) -> None:
    """Write conversations out of the standard library of the Python that runs this."""
    expected = None if any_version else json.loads(MANIFEST.read_text(encoding="utf-8"))
    with telling_mistakes():
        num_train, num_held_out = write(out, library_root(), expected)
    typer.echo(
        f"{out}: {num_train:,} training conversations and {num_held_out:,} held-out functions"
    )


if __name__ == "__main__":
    typer.run(main)
