"""Detects the format in which a model writes tool calls, from its chat template.

The template renders a known call; the text around the call's name and arguments shows the format
that the model was trained on. Known formats are those of Hermes (also Qwen2.5 and Qwen3), Llama 3.1
and later, and Mistral (an older and a newer one).

Source: the families' published chat templates and tokenizers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerBase

from mars_platform.data.rendering import render_prompt
from mars_platform.errors import UserError

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_TAG, MISTRAL_ARGUMENTS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

PROBE_ID = "probe0123"
"""Call id of the probe; nine characters, as Mistral's templates require."""
_NAME = "probe_function"
_FUNCTION = {
    "name": _NAME,
    "description": "A probe.",
    "parameters": {
        "type": "object",
        "properties": {"probe": {"type": "string", "description": "A probe."}},
        "required": ["probe"],
    },
}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {
    "id": PROBE_ID,
    "type": "function",
    "function": {"name": _NAME, "arguments": {"probe": "value"}},
}
_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Probe."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "Probed.", "tool_call_id": PROBE_ID, "name": _NAME},
]
_ARGUMENTS = r'\{"probe": ?"value"\}'


class Family(StrEnum):
    """Model families with a common format of tool calls."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL_LIST = "mistral list"
    """One tag, followed by a JSON list of calls."""
    MISTRAL_NAMED = "mistral named"
    """A tag, a name and arguments for each call."""


_MISTRAL_TAGS = (MISTRAL_TAG, MISTRAL_ARGUMENTS, MISTRAL_ID)
_TAGS = {
    Family.HERMES: (HERMES_BEGIN, HERMES_END),
    Family.LLAMA: (LLAMA_TAG,),
    Family.MISTRAL_LIST: _MISTRAL_TAGS,
    Family.MISTRAL_NAMED: _MISTRAL_TAGS,
}


@dataclass(frozen=True)
class CallTokens:
    """Ids of the tokens that begin and end a tool call."""

    begin: int
    end: int | None
    """None if the output ends with its calls."""


@dataclass(frozen=True)
class CallFormat:
    """The text that surrounds the names and arguments of tool calls."""

    family: Family
    first: str
    """Text before the first call."""
    opening: str
    """Text before a call's name."""
    middle: str
    """Text between a call's name and its arguments; `PROBE_ID` stands for a call's id."""
    closing: str
    """Text after a call's arguments."""
    separator: str | None
    """Text between two calls; None if a turn can have only one."""
    final: str
    """Text after the last call."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the model family."""
        return _TAGS[self.family]

    @property
    def begin(self) -> str | None:
        """Tag that always begins a call; None if the family has none."""
        return None if self.family is Family.LLAMA else self.tags[0]

    @property
    def end(self) -> str | None:
        """Tag that ends a call; None if the family has none."""
        return HERMES_END if self.family is Family.HERMES else None


def _pattern(first: str, opening: str, middle: str, closing: str) -> re.Pattern[str]:
    return re.compile(f"({first})({opening}){_NAME}({middle}){_ARGUMENTS}({closing})")


_FORMS: dict[Family, tuple[re.Pattern[str], str | None, str]] = {
    Family.HERMES: (
        _pattern("", r'<tool_call>\s*\{"name": ?"', r'", ?"arguments": ?', r"\}\s*</tool_call>"),
        "\n",
        "",
    ),
    Family.MISTRAL_LIST: (
        _pattern(r"\[TOOL_CALLS\]\s*\[", r'\{"name": ?"', r'", ?"arguments": ?', ""),
        ", ",
        "]",
    ),
    Family.MISTRAL_NAMED: (
        _pattern("", r"\[TOOL_CALLS\]", rf"(?:\[CALL_ID\]{PROBE_ID})?(?:\[ARGS\])?", ""),
        "",
        "",
    ),
    Family.LLAMA: (
        _pattern("", r'\{"name": ?"', r'", ?"parameters": ?', r"\}"),
        None,  # Llama's template refuses a turn with several calls
        "",
    ),
}


def find_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """Detect how a model writes calls; None if its template renders calls in no known format."""
    try:
        text = render_prompt(tokenizer, _TURNS, [_TOOL], add_generation_prompt=False)
    except UserError:  # the template may be unable to render a result, for instance
        render_prompt(tokenizer, _TURNS[:1], [_TOOL])
        return None
    for family, (pattern, separator, final) in _FORMS.items():
        found = pattern.search(text)
        if found:
            first, opening, middle, closing = found.groups()
            if family is Family.MISTRAL_LIST:  # the template writes an id that the model does not
                closing = "}"
            return CallFormat(family, first, opening, middle, closing, separator, final)
    return None


def tag_ids(tokenizer: PreTrainedTokenizerBase, family: Family) -> dict[str, int]:
    """Return the ids of a family's tags that are single tokens in this tokenizer."""
    added = tokenizer.get_added_vocab()
    return {tag: added[tag] for tag in _TAGS[family] if tag in added}


def call_tokens(form: CallFormat, ids: Mapping[str, int]) -> CallTokens | None:
    """Return the tokens that begin and end calls; None unless the format's tags are such tokens."""
    begin, end = form.begin, form.end
    if begin is None or not {begin, end or begin} <= ids.keys():
        return None
    return CallTokens(ids[begin], None if end is None else ids[end])


def kept_special(tokenizer: PreTrainedTokenizerBase, family: Family) -> frozenset[int]:
    """Return the ids of a family's tags that decoding would drop as special tokens."""
    special = tokenizer.added_tokens_decoder
    ids = tag_ids(tokenizer, family).values()
    return frozenset(token for token in ids if special[token].special)
