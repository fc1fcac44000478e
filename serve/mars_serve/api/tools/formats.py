"""How a model writes its calls, as its chat template shows it.

The template is asked to render a known call, and what stands around its name and its arguments is
the form: it is what the model was trained on. Forms that are known are those of the Hermes models
(and Qwen2.5 and Qwen3), of Llama 3.1 and later, and of Mistral's, older and newer.

Source: the families' published chat templates and tokenizers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerBase

from mars_platform.data.conversations import render_prompt
from mars_platform.errors import UserError

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_TAG, MISTRAL_ARGUMENTS, MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

PROBE_ID = "probe0123"
"""Stands where a form has the id of a call; nine characters, as Mistral's templates demand."""
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
    """Families of models that write calls alike."""

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL_LIST = "mistral list"
    """One tag, and a JSON list of calls behind it."""
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
class CallFormat:
    """What stands around the names and the arguments of calls."""

    family: Family
    first: str
    """Before the first call."""
    opening: str
    """Before a name."""
    middle: str
    """Between a name and its arguments; may have `PROBE_ID` where an id stands."""
    closing: str
    """Behind arguments."""
    separator: str | None
    """Between two calls; None where a turn has one at the most."""
    final: str
    """Behind the last call."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The family's tags."""
        return _TAGS[self.family]


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
        None,  # their template refuses turns with several
        "",
    ),
}


def find_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """How a model writes its calls; None where its template shows no form that is known.

    Raises:
        UserError: the model has no chat template, or one that does not know tools.
    """
    try:
        text = render_prompt(tokenizer, _TURNS, [_TOOL], add_generation_prompt=False)
    except UserError:  # such as where it cannot render results; it has no form then
        render_prompt(tokenizer, _TURNS[:1], [_TOOL])
        return None
    for family, (pattern, separator, final) in _FORMS.items():
        found = pattern.search(text)
        if found:
            first, opening, middle, closing = found.groups()
            if family is Family.MISTRAL_LIST:  # the template may write an id; the model does not
                closing = "}"
            return CallFormat(family, first, opening, middle, closing, separator, final)
    return None


def tag_ids(tokenizer: PreTrainedTokenizerBase, family: Family) -> dict[str, int]:
    """Ids of a family's tags that are tokens of their own in this tokenizer, whole in any text."""
    added = tokenizer.get_added_vocab()
    return {tag: added[tag] for tag in _TAGS[family] if tag in added}


def kept_special(tokenizer: PreTrainedTokenizerBase, family: Family) -> frozenset[int]:
    """Ids of a family's tags that decoding would leave out as special tokens."""
    special = tokenizer.added_tokens_decoder
    ids = tag_ids(tokenizer, family).values()
    return frozenset(token for token in ids if special[token].special)
