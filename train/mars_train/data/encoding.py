"""Encodes conversations as token ids, with the tokens that the loss is taken on.

Imports no Ray.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from mars_platform.checkpoint.tokenizer import read_end_ids, read_tokenizer
from mars_platform.data.conversations import Conversation
from mars_platform.data.files import find_files, parse_row, read_rows
from mars_platform.data.prompt_encoding import PromptEncoder
from mars_platform.data.rendering import RenderedTurns, Turn, render_turns
from mars_platform.errors import UserError, one_line
from mars_train.data.row_report import RowCounts, refuse_bad_data, refuse_few_rows, refuse_no_end
from mars_train.recipe import DataSettings, Recipe

ENCODED_SCHEMA = pa.schema(
    [
        ("file", pa.int64()),
        ("line", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(pa.bool_())),
        ("has_end", pa.bool_()),  # whether an end token is supervised; null if dropped
        ("status", pa.string()),  # used, noted, truncated or dropped
        ("reason", pa.string()),  # null if used
        ("length", pa.int64()),  # tokens before the cut; null if dropped
        ("shape", pa.string()),  # what the row was read as; null if dropped
    ]
)
_FIRST_ROWS = 200
"""Rows that are encoded before all others: a fraction of a second's work."""


@dataclass(frozen=True)
class TrainingEncoder:
    """Encodes conversations as serving does."""

    prompts: PromptEncoder
    """Encoder in which control tokens in the data are text, but for tags in answers."""
    end_ids: frozenset[int]
    """Ids at which serving ends an output."""
    ends: frozenset[str]
    """Their texts."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> Self:
        """Return the encoder of a checkpoint's tokenizer and end tokens."""
        texts = {tokenizer.backend_tokenizer.id_to_token(token) for token in end_ids}
        prompts = PromptEncoder(tokenizer, end_ids, answers_have_tags=True)
        return cls(prompts, end_ids, frozenset(texts - {None}))


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot encode conversations.

    Raises:
        UserError: it does not report the offsets of tokens.
    """
    if not tokenizer.is_fast:
        raise UserError(
            "model: the tokenizer does not report the offsets of tokens; add tokenizer.json"
        )


def check_columns(data: DataSettings, files: Iterable[str]) -> None:
    """Refuse names of columns that none of the first rows has.

    Raises:
        UserError: a name is unknown; the message lists those that are there.
    """
    if not data.columns:
        return
    rows = (content for file in files for _, content in read_rows(file, data.columns))
    names = list(dict.fromkeys(name for row in islice(rows, _FIRST_ROWS) for name in _names(row)))
    for column, name in data.columns.items():
        if names and name not in names:
            raise UserError(
                f"data.columns.{column}: none of the first rows has a column {name!r}; they have "
                f"{', '.join(names)}"
            )


def _names(content: bytes) -> Iterable[str]:
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):  # a bad row, which is counted with the others
        return ()
    return row if isinstance(row, dict) else ()


def check_first_rows(recipe: Recipe, encoder: TrainingEncoder, vocabulary_size: int) -> None:
    """Refuse data whose first rows show already that it is unusable; reading all of it takes long.

    Raises:
        UserError: a file cannot be read, too many of the rows are bad, all of them are too few, or
            none teaches the model to end; see `check_vocabulary` as well.
    """
    data, counts, dropped = recipe.data, RowCounts(), list[str]()
    files = find_files(data.train)
    check_columns(data, files)
    rows = ((file, *row) for file in files for row in read_rows(file, data.columns))
    first = list(islice(rows, _FIRST_ROWS + 1))
    for file, line, content in first[:_FIRST_ROWS]:
        if line == 0:
            raise UserError(f"data.train: {file} {content.decode()}; mend the file or leave it out")
        row = {"line": line, "content": content}
        for columns in _encode_row(row, encoder, data):
            if columns["status"] == "dropped":
                dropped.append(f"{file}:{line}: {columns['reason']}")
                counts.num_bad += 1
            else:
                counts.num_examples += 1
                counts.num_with_end += columns["has_end"]
                counts.num_truncated += columns["status"] == "truncated"
                counts.max_token_id = max(counts.max_token_id, *columns["input_ids"])
    are_all = len(first) <= _FIRST_ROWS
    if are_all or counts.num_bad > data.max_bad_rows:
        refuse_bad_data(counts, data.max_bad_rows, dropped)
    if are_all or counts.num_truncated < counts.num_examples:
        refuse_no_end(counts, files)
    if are_all:
        refuse_few_rows(counts.num_examples, recipe)
    check_vocabulary(counts.max_token_id, vocabulary_size)


def check_vocabulary(max_token_id: int, vocabulary_size: int) -> None:
    """Refuse data with tokens beyond the model's embedding of ``vocabulary_size`` rows."""
    if max_token_id >= vocabulary_size:
        raise UserError(
            f"model: the data's labels are out of vocabulary: token ids go up to {max_token_id}, "
            f"but the embedding has {vocabulary_size} rows; the tokenizer does not match the "
            "model, so take both from one checkpoint"
        )


def encode_conversation(
    encoder: TrainingEncoder,
    conversation: Conversation,
    loss_on: Literal["last", "all"],
    max_length: int,
) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Return the token ids of one conversation and which of them are labels, both [length].

    There are several pairs if turns need prompts of their own; see `render_turns`.

    Raises:
        UserError: it cannot be rendered, or has no label within ``max_length``.
    """
    found = _examples(encoder, conversation, loss_on, max_length)
    if found[0]["status"] == "dropped":
        raise UserError(f"messages: {found[0]['reason']}")
    return [(np.array(each["input_ids"], dtype=np.int64), each["supervised"]) for each in found]


def encode_rows(rows: pa.Table, tokenizer_path: str, settings: DataSettings) -> pa.Table:
    """Encode rows with the columns ``file``, ``line`` and ``content`` as a table of
    ``ENCODED_SCHEMA``.

    It has a row for each row of the input, or several for one whose turns need prompts of their
    own; see `render_turns`.
    """
    encoder = _encoder(tokenizer_path)
    columns = [
        {"file": row["file"], "line": row["line"]} | each
        for row in rows.to_pylist()
        for each in _encode_row(row, encoder, settings)
    ]
    return pa.Table.from_pylist(columns, schema=ENCODED_SCHEMA)


@lru_cache(maxsize=1)
def _encoder(path: str) -> TrainingEncoder:
    tokenizer = read_tokenizer(path)
    return TrainingEncoder.of(tokenizer, read_end_ids(path, tokenizer))


def _encode_row(
    row: dict[str, Any], encoder: TrainingEncoder, settings: DataSettings
) -> list[dict[str, Any]]:
    """Return the columns of the encoded rows that a row gives, at least one.

    A row of line 0 reports the problem with its file; see `read_rows`.
    """
    content: bytes = row["content"]
    if row["line"] == 0:
        return [_dropped(content.decode())]
    try:
        conversation = parse_row(content, settings.columns)
        found = _examples(encoder, conversation, settings.loss_on, settings.max_length)
    except UserError as error:
        return [_dropped(one_line(error))]
    if found[0]["status"] != "dropped":
        found[0]["shape"] = conversation.shape
    return found


def _examples(
    encoder: TrainingEncoder,
    conversation: Conversation,
    loss_on: Literal["last", "all"],
    max_length: int,
) -> list[dict[str, Any]]:
    """Return the columns of a conversation's encoded rows; a dropped one comes alone."""
    messages = [turn.as_message() for turn in conversation.messages]
    shield = encoder.prompts.shield_for(
        messages, conversation.tools, conversation.chat_template_kwargs
    )
    rendered = render_turns(
        encoder.prompts.tokenizer, conversation, loss_on, encoder.ends, shield=shield
    )
    found = [
        _label(encoder.end_ids, part, max_length)
        for each in rendered
        for part in _parts(encoder.prompts, each, is_sealed=shield is not None)
    ]
    kept = [each for each in found if each["status"] != "dropped"]
    if kept and len(kept) < len(found):  # later turns have longer prompts
        kept[-1] |= {"status": "truncated", "reason": found[-1]["reason"]}
    return kept or found[:1]


@dataclass(frozen=True)
class _Part:
    """Tokens of a rendered text with some of its turns."""

    ids: list[int]
    starts: NDArray[np.int64]
    """Place in the text at which each token starts."""
    turns: list[Turn]


def _parts(prompts: PromptEncoder, rendered: RenderedTurns, *, is_sealed: bool) -> list[_Part]:
    """Return the tokens of a rendered text, with all of its turns or parted from some.

    A prompt and what is written behind it never share a token. A turn for which a token had to be
    divided comes alone: in the prompts of later turns, that token is whole.
    """

    def encode(begin: int, end: int) -> tuple[list[int], NDArray[np.int64]]:
        part = text[begin:end]
        found = prompts.sealed(part) if is_sealed else prompts.plain(part, add_special_tokens=False)
        places = np.array(found.spans, dtype=np.int64).reshape(-1, 2) + begin
        return found.ids, places

    text, turns = rendered.text, rendered.turns
    ids, places = encode(0, len(text))
    starts, ends = places.T
    divided = [turn for turn in turns if ((starts < turn.start) & (turn.start < ends)).any()]
    whole = [turn for turn in turns if turn not in divided]
    found = list[_Part]()
    if whole:
        num_kept = (
            len(ids) if whole[-1] is turns[-1] else int(np.searchsorted(starts, whole[-1].end))
        )
        found.append(_Part(ids[:num_kept], starts[:num_kept], whole))
    for turn in divided:
        before, answer = encode(0, turn.start), encode(turn.start, turn.end)
        joined = np.concatenate([before[1], answer[1]])[:, 0]
        found.append(_Part([*before[0], *answer[0]], joined, [turn]))
    return found


def _label(end_ids: frozenset[int], part: _Part, max_length: int) -> dict[str, Any]:
    """Return the columns of an encoded row; tokens that start inside a span are supervised."""
    ids, starts = part.ids, part.starts[:max_length]
    supervised = np.zeros(len(starts), bool)
    for begin, end in (span for turn in part.turns for span in turn.spans):
        supervised |= (starts >= begin) & (starts < end)
    cut = len(ids) > max_length
    if not supervised[1:].any():  # the first token has no predecessor to predict it
        limit = f" within data.max_length = {max_length}" if cut else ""
        return _dropped(f"no supervised token{limit}, of {len(ids)} tokens")
    status, reason = "used", None
    if cut:
        status, reason = "truncated", f"{len(ids)} tokens, cut to data.max_length = {max_length}"
    elif problem := next((turn.problem for turn in part.turns if turn.problem), None):
        status, reason = "noted", problem
    return {
        "input_ids": ids[:max_length],
        "supervised": supervised,
        "length": len(ids),
        "has_end": not end_ids.isdisjoint(np.array(ids[:max_length])[supervised].tolist()),
        "status": status,
        "reason": reason,
    }


def _dropped(reason: str) -> dict[str, Any]:
    return {"input_ids": [], "supervised": [], "status": "dropped", "reason": reason}
