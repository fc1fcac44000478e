"""Writes real text to train and measure on: functions of the running Python's standard library.

    python -m bench.standard_library OUT

The user turn is what stands before a function's body, the assistant turn is the body. Passages of
the trained modules are written, too. All modules of a package are either trained on or held out,
and no body stands in two conversations. The library differs between versions of Python, so compare
figures of one version only.
"""

import ast
import hashlib
import json
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
"""Directories of other packages, of code that is made to be tested, and of tables."""
_OF_A_BUILD = "_sysconfigdata"
"""Beginning of the name of files that are written when Python is built."""
_HELD_OUT_SHARE = 16
"""One of so many packages is held out."""
_CONTEXT_LINES, _MAX_DOCSTRING_LINES = 12, 8
"""Most lines before a function, and of its docstring, that its user turn shows."""
_BODY = range(40, 1_001)
"""Characters of a body."""
_PASSAGE, _PASSAGE_CONTEXT = 1_000, 300
"""Most characters of a passage, and of what its user turn shows of the text before it."""

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def is_held_out(module: str) -> bool:
    """Return whether a module is held out, which follows from its package's name."""
    package = module.partition(".")[0]
    return int(hashlib.sha256(package.encode()).hexdigest(), 16) % _HELD_OUT_SHARE == 0


def functions_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield what stands before each function's body, and the body without its indent.

    Functions inside of functions are part of those. A function whose body is very short or long, or
    begins on the line of the signature, is left out.
    """
    lines = source.split("\n")  # as ast counts them; splitlines also splits at form feeds
    for node in _definitions(ast.parse(source)):
        statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
        head_end = node.body[0].end_lineno if statements != node.body else node.body[0].lineno - 1
        signature_end = max(node.lineno, node.body[0].lineno - 1)
        if not statements or head_end is None or not node.lineno <= head_end < statements[0].lineno:
            continue
        body = textwrap.dedent("\n".join(lines[head_end : node.end_lineno])).strip("\n")
        if len(body) in _BODY:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
            last = min(head_end, signature_end + _MAX_DOCSTRING_LINES)
            yield "\n".join(lines[max(first - _CONTEXT_LINES, 0) : last]).strip("\n"), body


def _definitions(tree: ast.Module | ast.ClassDef) -> Iterator[_Definition]:
    for node in tree.body:
        if isinstance(node, _Definition):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node)


def passages_of(source: str) -> Iterator[tuple[str, str]]:
    """Yield the end of the text before each passage, and the passage, which has whole lines."""
    before, passage = "", ""
    for line in source.splitlines(keepends=True):
        if passage and len(passage) + len(line) > _PASSAGE:
            yield before[-_PASSAGE_CONTEXT:], passage
            before, passage = passage, ""
        passage += line
    if passage.strip():
        yield before[-_PASSAGE_CONTEXT:], passage


def conversations(root: Path) -> tuple[list[str], list[str]]:
    """Return the rows of training and held-out data as JSON."""
    train, held_out, seen = list[str](), list[str](), set[str]()
    # Held-out functions come first, so that a body which is also trained on is not lost to them.
    for module, source in sorted(_modules(root), key=lambda each: not is_held_out(each[0])):
        rows = held_out if is_held_out(module) else train
        for beginning, body in functions_of(source):
            if body not in seen:
                seen.add(body)
                rows.append(_row(f"# {module}\n{beginning}", body))
        if not is_held_out(module):
            for before, passage in passages_of(source):
                train.append(_row(f"# {module}, continued\n{before}", passage))
    return train, held_out


def _modules(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each module, in the order of the names."""
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if _LEFT_OUT.isdisjoint(path.parts) and not file.name.startswith(_OF_A_BUILD):
            parts = path.parts[:-1] if path.stem == "__init__" else path.with_suffix("").parts
            with tokenize.open(file) as opened:
                yield ".".join(parts), opened.read().expandtabs(8)


def _row(user: str, assistant: str) -> str:
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return json.dumps({"messages": turns})


def main(
    out: Annotated[Path, typer.Argument(help="Directory to write train.jsonl and eval.jsonl to.")],
) -> None:
    """Write conversations out of the standard library of the Python that runs this."""
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = conversations(Path(sysconfig.get_paths()["stdlib"]))
    for name, rows in (("train.jsonl", train), ("eval.jsonl", held_out)):
        (out / name).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        typer.echo(f"{out / name}: {len(rows):,} conversations")


if __name__ == "__main__":
    typer.run(main)
