"""From files of conversations to tokenised rows: a Ray Data pipeline with a report.

Every input row is accounted for: usable, cut to length, or bad with its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import ray.data
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_platform.conversations import (
    Conversation,
    parse_conversation,
    render_turns,
)
from mars_platform.errors import UserError
from mars_train.recipe import DataSettings

_SHOWN_BAD_ROWS = 3
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(pa.bool_())),
        ("truncated", pa.bool_()),
        ("error", pa.string()),
        ("path", pa.string()),
        ("line", pa.int64()),
    ]
)


@dataclass(frozen=True)
class PreparedData:
    """Tokenised rows on disk, and what became of the input."""

    path: Path
    num_examples: int
    num_tokens: int
    num_supervised: int
    num_truncated: int
    bad_rows: list[str]
    """``file:line: what is wrong`` of each skipped row."""

    def dataset(self) -> ray.data.Dataset:
        """The usable rows, with columns ``input_ids`` and ``supervised``."""
        usable = ray.data.expressions.col("error").is_null()
        rows = ray.data.read_parquet(str(self.path)).filter(expr=usable)
        return rows.select_columns(["input_ids", "supervised"])


def prepare(settings: DataSettings, tokenizer_path: Path, output: Path, seed: int) -> PreparedData:
    """Read, check, tokenise and shuffle the training files into Parquet under ``output``.

    Raises:
        UserError: a file is missing, more rows are bad than allowed, or none is usable.
    """
    files = find_files(settings.train)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([{"path": str(file)} for file in files])
    rows = rows.flat_map(_read_rows).random_shuffle(seed=seed)
    tokenised = rows.map_batches(
        _tokenize_batch,
        batch_format="pyarrow",
        batch_size=1024,
        fn_kwargs={
            "tokenizer_path": str(tokenizer_path),
            "loss_on": settings.loss_on,
            "max_length": settings.max_length,
        },
    )
    tokenised.write_parquet(str(output))
    prepared = _summarise(output)
    _check(prepared, settings)
    return prepared


def find_files(paths: list[Path]) -> list[Path]:
    """Data files among files and directories, in order.

    Raises:
        UserError: a path is missing, or a directory has no data file.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(f for f in path.rglob("*") if f.suffix in (".jsonl", ".parquet"))
            if not inside:
                raise UserError(f"data.train: {path} holds no .jsonl or .parquet file")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"data.train: there is no file or directory {path}")
    return found


def _read_rows(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one file as text; line numbers start at 1."""
    path = Path(item["path"])
    if path.suffix == ".parquet":
        batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024)
        records = (json.dumps(row, default=str) for b in batches for row in b.to_pylist())
        for line, text in enumerate(records, start=1):
            yield {"path": str(path), "line": line, "text": text}
    else:
        with path.open(encoding="utf-8", errors="replace") as handle:
            for line, text in enumerate(handle, start=1):
                yield {"path": str(path), "line": line, "text": text}


def read_conversations(paths: list[Path]) -> Iterator[Conversation]:
    """The usable conversations of some files; bad rows are passed over."""
    for path in find_files(paths):
        for row in _read_rows({"path": str(path)}):
            try:
                yield parse_conversation(row["text"])
            except UserError:
                continue  # counted and reported when the data is prepared


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path)


def _tokenize_batch(
    batch: pa.Table, tokenizer_path: str, loss_on: Any, max_length: int
) -> pa.Table:
    tokenizer = _tokenizer(tokenizer_path)
    rows = batch.to_pylist()
    rendered: list[tuple[str, list[tuple[int, int]]]] = []
    for row in rows:
        try:
            rendered.append(render_turns(tokenizer, parse_conversation(row["text"]), loss_on))
            row["error"] = None
        except UserError as error:
            rendered.append(("", []))
            row["error"] = str(error)
    encoded = tokenizer(
        [text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True
    )
    columns = zip(rows, rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True)
    records = [
        _record(row, spans, ids, offsets, max_length) for row, (_, spans), ids, offsets in columns
    ]
    return pa.Table.from_pylist(records, schema=_SCHEMA)


def _record(
    row: dict[str, Any],
    spans: list[tuple[int, int]],
    ids: list[int],
    offsets: list[tuple[int, int]],
    max_length: int,
) -> dict[str, Any]:
    """One output row; a token is supervised if it starts inside a supervised span."""
    starts = np.array([start for start, _ in offsets[:max_length]], dtype=np.int64)
    supervised = np.zeros(len(starts), bool)
    for begin, end in spans:
        supervised |= (starts >= begin) & (starts < end)
    error = row["error"]
    if error is None and not supervised[1:].any():
        error = f"no supervised token within data.max_length = {max_length}"
    return {
        "input_ids": ids[:max_length],
        "supervised": supervised.tolist(),
        "truncated": len(ids) > max_length,
        "error": error,
        "path": row["path"],
        "line": row["line"],
    }


def _summarise(path: Path) -> PreparedData:
    num_examples = num_tokens = num_supervised = num_truncated = 0
    bad: list[dict[str, Any]] = []
    for batch in pyarrow.dataset.dataset(path, schema=_SCHEMA).to_batches():
        bad += batch.filter(pa.compute.is_valid(batch["error"])).to_pylist()
        good = batch.filter(pa.compute.is_null(batch["error"]))
        num_examples += good.num_rows
        num_tokens += len(good["input_ids"].flatten())
        num_supervised += good["supervised"].flatten().true_count
        num_truncated += good["truncated"].true_count
    bad.sort(key=lambda row: (row["path"], row["line"]))
    bad_rows = [f"{row['path']}:{row['line']}: {row['error']}" for row in bad]
    return PreparedData(path, num_examples, num_tokens, num_supervised, num_truncated, bad_rows)


def _check(prepared: PreparedData, settings: DataSettings) -> None:
    bad = prepared.bad_rows
    if len(bad) > settings.max_bad_rows:
        shown = "; ".join(bad[:_SHOWN_BAD_ROWS])
        more = f"; and {len(bad) - _SHOWN_BAD_ROWS} more" if len(bad) > _SHOWN_BAD_ROWS else ""
        raise UserError(
            f"data.train: {len(bad)} bad rows, and data.max_bad_rows allows "
            f"{settings.max_bad_rows}: {shown}{more}"
        )
    if prepared.num_examples == 0:
        raise UserError("data.train: the files hold no usable row")
