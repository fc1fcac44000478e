"""Every `marsray` command that a page shows exists, with its options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from mars_platform.cli.main import build_cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "k8s").rglob("*.md"),
         *(ROOT / "examples").rglob("*.md")]  # fmt: skip
_BLOCK = re.compile(r"^ *```(?:sh|bash|console)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r"(?:^|-- |\$ |bin/)\s*(?:[A-Z_]+=\S+ )*marsray (.*)")
_INLINE = re.compile(r"`(marsray [^`]+)`")


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `marsray` command in a page's blocks of shell and in its prose."""
    lines = [line for block in _BLOCK.findall(text) for line in _lines(block)]
    for line in [*lines, *_INLINE.findall(re.sub(r"\s*\n\s*", " ", text))]:
        for part in re.split(r"&&|\|\||[|;&()'\"]|\s#.*", line):
            found = _CALL.search(part)
            if found:
                yield found[1].split()


def _lines(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if "marsray" in line]


@cache
def root() -> Any:
    return typer.main.get_command(build_cli())


def unknown(words: list[str]) -> list[str]:
    """Return what a command has that the command line does not know."""
    command, rest = root(), list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    wrong = [
        word for word in rest if word.startswith("--") and word.partition("=")[0] not in options
    ]
    if hasattr(command, "commands") and rest and re.fullmatch(r"[a-z]+", rest[0]):
        wrong.append(rest[0])
    return wrong


def test_every_command_of_a_page_exists_with_its_options() -> None:
    found = [
        (str(page.relative_to(ROOT)), words)
        for page in PAGES
        if page.name != "CHANGELOG.md" and page.parent.name != "decisions"  # they name removed ones
        for words in commands(page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 60
    wrong = {(page, " ".join(words)): unknown(words) for page, words in found}
    assert {place: parts for place, parts in wrong.items() if parts} == {}


def test_wrong_commands_are_found() -> None:
    block = "X=1 marsray train a.yaml --sett b=c && marsray data \\\n    demmo  # so"
    page = f"```sh\n{block}\nkubectl -n marsray get pods --all\n```\nRun `marsray\nservee`."
    assert [unknown(words) for words in commands(page)] == [["--sett"], ["demmo"], ["servee"]]
