"""Checks training data as a run reads it, in this process and before any weight is loaded.

Imports no Ray.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.data.files import find_files, parse_row, read_checked_rows, read_rows
from mars_platform.errors import UserError, one_line
from mars_train.data.encoding import (
    ENCODED_SCHEMA,
    check_columns,
    check_tokenizer,
    check_vocabulary,
    encode_rows,
)
from mars_train.data.row_report import RowCounts, refuse_bad_data, refuse_few_rows, refuse_no_end
from mars_train.recipe import DataSettings, EvaluationSettings, Recipe

_BATCH_ROWS = 256
_VARYING = re.compile(r"\(got .*|'[^']*'|\d[\d,]*")
"""Parts in which reasons of one kind differ from row to row."""


@dataclass
class ReasonGroup:
    """Rows that were dropped, cut or noted for reasons of one kind."""

    what: str
    """Fate of these rows: ``dropped``, ``truncated``, or ``noted`` if they are used."""
    first: str
    """Place and reason of the first one."""
    num_rows: int = 0


@dataclass
class DataCheck:
    """Figures of the training data as a run would use it."""

    counts: RowCounts
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Tokens of each usable conversation before it is cut; empty without a tokenizer."""
    reasons: dict[str, ReasonGroup] = field(default_factory=dict)
    """Groups of the rows that were dropped, cut or noted."""
    shown: list[str] = field(default_factory=list)
    """Texts of the first conversations, with what is supervised in brackets."""
    refusals: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Return the check as values for JSON; those of tokens are null without a tokenizer."""
        counts, lengths = self.counts, np.array(self.lengths) if self.lengths else None
        return {
            "files": counts.num_files,
            "shapes": dict(counts.shapes),
            "conversations": counts.num_examples,
            "dropped": counts.num_bad,
            "cut": counts.num_truncated,
            "tokens": None if lengths is None else counts.num_tokens,
            "supervised_tokens": None if lengths is None else counts.num_supervised,
            "median_length": None if lengths is None else float(np.median(lengths)),
            "p95_length": None if lengths is None else float(np.percentile(lengths, 95)),
            "longest": None if lengths is None else int(lengths.max()),
            "reasons": list(self.reasons.values()),
            "shown": self.shown,
            "refusals": self.refusals,
        }


def check_data(
    settings: DataSettings, checkpoint: Checkpoint | None, recipe: Recipe | None, num_shown: int = 0
) -> DataCheck:
    """Read all training data and say what a run would make of it.

    Without a ``checkpoint``, whose tokenizer counts, rows are read and not encoded. A ``recipe``
    adds what its stages and its held-out data demand. ``num_shown`` conversations are shown.

    Raises:
        UserError: a file cannot be read, or the tokenizer cannot be used.
    """
    if checkpoint is not None:
        check_tokenizer(checkpoint.tokenizer)
    files = find_files(settings.train)
    check_columns(settings, files)
    found = DataCheck(RowCounts(num_files=len(files)))
    for index, file in enumerate(files):
        for table in _tables(index, file, settings, checkpoint):
            _add(found, file, table)
            if checkpoint is not None and len(found.shown) < num_shown:
                texts = _texts(table, checkpoint)
                found.shown += islice(texts, num_shown - len(found.shown))
    found.refusals = list(_refusals(found, settings, checkpoint, recipe))
    return found


def _refusals(
    found: DataCheck, settings: DataSettings, checkpoint: Checkpoint | None, recipe: Recipe | None
) -> Iterator[str]:
    dropped = [group.first for group in found.reasons.values() if group.what == "dropped"]
    checks = [partial(refuse_bad_data, found.counts, settings.max_bad_rows, dropped)]
    if checkpoint is not None:
        checks.append(partial(refuse_no_end, found.counts, find_files(settings.train)))
        checks.append(partial(settings.check_context, checkpoint.max_length))
        largest = found.counts.max_token_id
        checks.append(partial(check_vocabulary, largest, checkpoint.vocabulary_size))
    if recipe is not None:
        checks.append(partial(refuse_few_rows, found.counts.num_examples, recipe))
        if recipe.evaluation is not None:
            checks.append(partial(_check_held_out, recipe.evaluation, settings))
    for check in checks:
        try:
            check()
        except UserError as error:
            yield str(error)


def _tables(
    index: int, file: str, settings: DataSettings, checkpoint: Checkpoint | None
) -> Iterator[pa.Table]:
    rows = read_rows(file, settings.columns)
    while batch := list(islice(rows, _BATCH_ROWS)):
        if checkpoint is None:
            columns = [_parsed(line, content, settings) for line, content in batch]
            yield pa.Table.from_pylist(columns, schema=ENCODED_SCHEMA)
            continue
        contents = [{"file": index, "line": line, "content": content} for line, content in batch]
        yield encode_rows(pa.Table.from_pylist(contents), str(checkpoint.path), settings)


def _parsed(line: int, content: bytes, settings: DataSettings) -> dict[str, Any]:
    """Return the columns of a row that is not encoded."""
    try:
        if line == 0:
            raise UserError(content.decode())
        shape = parse_row(content, settings.columns).shape
    except UserError as error:
        return {"line": line, "status": "dropped", "reason": one_line(error)}
    return {"line": line, "status": "used", "shape": shape, "input_ids": [], "supervised": []}


def _add(found: DataCheck, file: str, table: pa.Table) -> None:
    usable = table.filter(pc.not_equal(table["status"], "dropped"))
    found.counts.num_bad += table.num_rows - usable.num_rows
    if usable.num_rows:
        found.counts.add(usable)
        found.lengths.extend(usable["length"].drop_null().to_pylist())
    others = table.select(["line", "status", "reason"]).filter(
        pc.not_equal(table["status"], "used")
    )
    for row in others.to_pylist():
        if row["line"] == 0:
            raise UserError(f"data.train: {file} {row['reason']}; mend the file or leave it out")
        kind = f"{row['status']} {_VARYING.sub('', row['reason'])}"
        first = f"{file}:{row['line']}: {row['reason']}"
        found.reasons.setdefault(kind, ReasonGroup(row["status"], first)).num_rows += 1


def _texts(table: pa.Table, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the text of each usable row of a table, with what is supervised in brackets."""
    decode = partial(checkpoint.tokenizer.decode, clean_up_tokenization_spaces=False)
    for row in table.filter(pc.not_equal(table["status"], "dropped")).to_pylist():
        ids, supervised = np.array(row["input_ids"]), np.array(row["supervised"])
        starts = np.flatnonzero(np.diff(supervised, prepend=supervised[0]))
        texts = [decode(part) for part in np.split(ids, starts)]
        yield "".join(
            text if at % 2 == supervised[0] else f"⟦{text}⟧" for at, text in enumerate(texts)
        )


def _check_held_out(evaluation: EvaluationSettings, settings: DataSettings) -> None:
    files = find_files(evaluation.data, "evaluation.data")
    rows = read_checked_rows(files, "evaluation.data", settings.columns)
    if not list(islice(rows, evaluation.max_items)):
        raise UserError("evaluation.data: the files hold no row; name files with conversations")
