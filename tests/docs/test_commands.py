"""Commands and configurations that pages show without running them are accepted as they stand."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.exceptions import TyperException

from mars_platform.cli.main import build_cli
from mars_platform.config import build_settings
from mars_train.recipe import Recipe
from marsray_docs.blocks import blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
_ENDS = ("&", "&&", "|", "||", ">", ">>", ";")
_SHELL = re.compile(r"^ *```(?:sh|bash)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"`marsray ([a-z]+)[ `]")
SHELL = [
    (str(page.relative_to(ROOT)), line.strip())
    for page in PAGES
    for block in _SHELL.findall(page.read_text(encoding="utf-8"))
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip().startswith("marsray ")
]


@cache
def commands() -> dict[str, Any]:
    """Return all commands by their words, such as ``data check``."""
    return dict(_below(typer.main.get_command(build_cli()), ""))


def _below(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield name, command
    for word, each in getattr(command, "commands", {}).items():
        yield from _below(each, f"{name} {word}".strip())


def parse(line: str) -> None:
    """Parse a command line as the program does, without running it."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: min((words.index(end) for end in _ENDS if end in words), default=None)]
    name = next(found for found in (words[0], " ".join(words[:2])) if found in commands())
    commands()[name].make_context(name, words[len(name.split()) :])


@pytest.mark.parametrize(("page", "line"), SHELL, ids=[line for _, line in SHELL])
def test_a_command_that_a_page_shows_has_these_options(page: str, line: str) -> None:
    parse(line)


def test_commands_that_the_prose_names_exist() -> None:
    texts = {page.name: " ".join(page.read_text(encoding="utf-8").split()) for page in PAGES}
    named = [(name, words) for name, text in texts.items() for words in _NAMED.findall(text)]
    first = {command.split()[0] for command in commands()}
    assert len(named) > 40
    assert [each for each in named if each[1] not in first] == []


def test_a_wrong_option_is_found() -> None:
    assert len(SHELL) > 30
    with pytest.raises(TyperException, match="--tau"):
        parse("marsray serve --model mine=DIR --tau 1 # lossy")


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_stages_and_programs_that_a_page_shows_are_valid(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.code, str(page), "exec")
        content = yaml.safe_load(block.code) if block.language == "yaml" else None
        if isinstance(content, dict) and "stages" in content:
            others = {"model": {"base": "DIR"}, "data": {"train": ["a.jsonl"]}, "output": "out"}
            build_settings(others | content, Recipe, source=page.name)
