"""Reads held-out conversations from files, as items to decode and check."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from mars_platform.data.conversations import Conversation, is_correct
from mars_platform.data.files import read_checked_rows
from mars_platform.data.prompt_encoding import PromptEncoder
from mars_platform.data.shapes import NO_NAMES, ColumnNames
from mars_platform.errors import UserError


@dataclass(frozen=True)
class EvalItem:
    """One held-out conversation up to its final assistant turn."""

    source: str
    """Place of the row, as ``file:line``, which names the item."""
    prompt: tuple[int, ...]
    """Token ids that ask for the final turn."""
    answer: str | None
    """Text that a correct output ends with; None if the row has no ``answer``."""
    states_answer: bool
    """Whether the row's own final turn counts as correct. If it does not, a model trained on such
    rows will not count as correct either."""
    index: int = 0
    """Number of the item among all items, which seeds what it draws whoever decodes it."""
    messages: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)


def read_items(
    paths: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_items: int | None = None,
    columns: ColumnNames = NO_NAMES,
) -> list[EvalItem]:
    """Read conversations from files, up to ``max_items`` of all together.

    ``max_length`` is that of the model's context, prompt and output together; ``columns`` are names
    of columns that have others in the files.

    Raises:
        UserError: a file cannot be read, the files hold no row, or a row is bad; the latter names
            file and line.
    """
    encoder, rows = (
        PromptEncoder(tokenizer),
        islice(read_checked_rows(paths, "data", columns), max_items),
    )
    items = [_item(index, *row, encoder, max_length) for index, row in enumerate(rows)]
    if not items:
        raise UserError("data: the files hold no row; name files with conversations")
    return items


def _item(
    index: int,
    source: str,
    conversation: Conversation,
    answer: str | None,
    encoder: PromptEncoder,
    max_length: int,
) -> EvalItem:
    *before, final = conversation.messages
    messages = [turn.as_message() for turn in before]
    try:
        prompt = tuple(
            encoder.chat(
                messages, conversation.tools, template_kwargs=conversation.chat_template_kwargs
            )
        )
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    if len(prompt) >= max_length:
        raise UserError(
            f"{source}: messages: the prompt has {len(prompt)} tokens and leaves no room for an "
            f"output in the model's context of {max_length}; shorten it or leave the row out"
        )
    states_answer = answer is not None and is_correct(final.content, answer)
    return EvalItem(source, prompt, answer, states_answer, index, tuple(messages))
