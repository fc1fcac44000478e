"""Reads and writes what a checkpoint tells people about itself: example prompts, and its card.

``marsray calibrate`` writes the examples, the first prompts that it measured with. They may be
edited or removed by hand. Imports no Ray, torch or HTTP library.
"""

import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mars_platform.checkpoint.files import write_whole
from mars_platform.config import Settings, build_settings, read_json
from mars_platform.errors import UserError

EXAMPLES_FILE = "examples.json"
CARD_FILE = "README.md"

_REMEDY = "mend or remove it, or run marsray calibrate again"
_MOST = 8
_MAX_CHARACTERS = 4000  # of one example; longer prompts are left out
_MAX_CARD_BYTES = 2**17
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
"""Data for the Hugging Face hub at the beginning of a card."""


class ExampleMessage(Settings):
    """A message of an example."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Field(max_length=_MAX_CHARACTERS)]


class Example(Settings):
    """A conversation that the model is to answer."""

    messages: Annotated[list[ExampleMessage], Field(min_length=1, max_length=32)]


class _Examples(Settings):
    format_version: Literal[1] = 1
    examples: Annotated[list[Example], Field(max_length=64)]


def read_examples(path: Path) -> list[Example]:
    """Read the example prompts of a checkpoint directory; none if it has no such file."""
    file = path / EXAMPLES_FILE
    if not file.is_file():
        return []
    content = read_json(file, _REMEDY)
    return build_settings(content, _Examples, source=str(file), remedy=_REMEDY).examples


def write_examples(path: Path, prompts: Iterable[Iterable[Mapping[str, Any]]]) -> Path:
    """Write the first prompts that differ and are short into a checkpoint directory; return the
    file.

    A prompt is the messages of a conversation before the answer.
    """
    distinct = {json.dumps(kept): kept for prompt in prompts if (kept := _plain(prompt))}
    examples = [{"messages": messages} for messages in islice(distinct.values(), _MOST)]
    text = json.dumps({"format_version": 1, "examples": examples}, indent=2, ensure_ascii=False)
    return write_whole(path, EXAMPLES_FILE, text + "\n")


def read_card(path: Path) -> str | None:
    """Return the text of a checkpoint's card, without data for the hub; None if it has none."""
    file = path / CARD_FILE
    if not file.is_file():
        return None
    try:
        with file.open("rb") as handle:
            text = handle.read(_MAX_CARD_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {_REMEDY}") from error
    return _FRONT_MATTER.sub("", text.replace("\r\n", "\n")).strip() or None


def _plain(prompt: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    messages, length = list[dict[str, str]](), 0
    for each in prompt:
        role, content = each.get("role"), each.get("content")
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            return []
        messages.append({"role": role, "content": content})
        length += len(content)
    return messages if length <= _MAX_CHARACTERS else []
