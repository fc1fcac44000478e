"""Reads held-out conversations from files, as items to decode and check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from mars_platform.data.answers import is_correct
from mars_platform.data.conversations import (
    Conversation,
    parse_conversation,
    read_answer,
    validate_conversation,
)
from mars_platform.data.prompt_encoding import PromptEncoder
from mars_platform.errors import UserError, one_line


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
    """Messages that ask for the final turn."""


def read_items(
    paths: Iterable[Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    max_items: int | None = None,
) -> list[EvalItem]:
    """Read conversations from JSONL and Parquet files.

    Args:
        paths: the files, in order.
        tokenizer: the model's tokenizer, with its chat template.
        max_length: tokens of the model's context, prompt and output together.
        max_items: number of rows after which reading stops, over all files; None reads all.

    Raises:
        UserError: a file cannot be read, the files hold no row, or a row is bad; the latter names
            file and line. Bad rows are never skipped: two models must be scored on the same items.
    """
    items, encoder = [], PromptEncoder(tokenizer)
    for index, (source, row) in enumerate(islice(_rows(paths), max_items)):
        try:
            item = _item(source, _parse(row), encoder, max_length)
            items.append(replace(item, index=index))
        except UserError as error:
            raise UserError(f"{source}: {error}") from error
    if not items:
        raise UserError("data: the files hold no row; name files with conversations")
    return items


def _rows(paths: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each row with the row, as JSON bytes or decoded; lines count from 1."""
    for path in paths:
        read = _parquet_rows if path.suffix == ".parquet" else _jsonl_rows
        try:
            for line, row in enumerate(read(path), start=1):
                yield f"{path}:{line}", row
        except (OSError, pa.ArrowInvalid) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise UserError(f"data: {path} cannot be read ({reason}); check the file") from error


def _jsonl_rows(path: Path) -> Iterator[bytes]:
    with path.open("rb") as handle:
        yield from handle


def _parquet_rows(path: Path) -> Iterator[Any]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _parse(row: Any) -> Conversation:
    if not isinstance(row, bytes):
        return validate_conversation(row)
    try:
        text = row.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"not valid UTF-8 ({error.reason} at byte {error.start})") from error
    return parse_conversation(text)


def _item(
    source: str, conversation: Conversation, encoder: PromptEncoder, max_length: int
) -> EvalItem:
    *before, final = conversation.messages
    messages = [message.model_dump() for message in before]
    ids = encoder.chat(messages)
    if len(ids) >= max_length:
        raise UserError(
            f"messages: the prompt has {len(ids)} tokens and leaves no room for an output in the "
            f"model's context of {max_length}; shorten it or leave the row out"
        )
    answer = read_answer(conversation)
    states_answer = answer is not None and is_correct(final.content, answer)
    return EvalItem(source, tuple(ids), answer, states_answer, messages=tuple(messages))
