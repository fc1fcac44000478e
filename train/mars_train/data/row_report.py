"""Counts the rows of the training data and reports the ones that were dropped or cut.

Imports no Ray or torch.
"""

import json
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mars_platform.errors import UserError
from mars_train.recipe import Recipe

REPORT_FILE = "report.jsonl"
_SHOWN_ROWS = 3


@dataclass
class RowCounts:
    """Sums over the rows read so far."""

    num_files: int = 0
    num_examples: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_truncated: int = 0
    """Usable rows that were cut to ``data.max_length``."""
    num_noted: int = 0
    """Usable rows of which the chat template writes something otherwise than they have it."""
    num_with_end: int = 0
    """Usable rows in which an end token is supervised."""
    num_bad: int = 0
    max_token_id: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    """Usable rows of the files that were read as each shape."""

    @property
    def recognised(self) -> str:
        """Number of files, and what their rows were read as."""
        files = "1 file" if self.num_files == 1 else f"{self.num_files:,} files"
        rows = [f"{count:,} rows of {shape}" for shape, count in self.shapes.most_common()]
        return ", ".join([files, *rows])

    def add(self, usable: pa.Table) -> None:
        """Count usable rows, at least one, of ``ENCODED_SCHEMA``."""
        tokens = pc.list_flatten(usable["input_ids"])
        self.num_examples += usable.num_rows
        self.num_tokens += len(tokens)
        self.num_supervised += pc.sum(pc.list_flatten(usable["supervised"])).as_py() or 0
        self.num_truncated += pc.sum(pc.equal(usable["status"], "truncated")).as_py()
        self.num_noted += pc.sum(pc.equal(usable["status"], "noted")).as_py()
        self.num_with_end += pc.sum(usable["has_end"]).as_py() or 0
        self.shapes.update(shape for shape in usable["shape"].to_pylist() if shape is not None)
        self.max_token_id = max(self.max_token_id, pc.max(tokens).as_py() or 0)


class RowReport:
    """Report with one line for each row that was dropped, cut or noted, in the order of the input.

    Rows arrive in any order, so their lines wait in a file. In memory each takes 24 bytes.
    """

    def __init__(self, files: list[str], waiting: IO[bytes]) -> None:
        self._files, self._waiting = files, waiting
        self._keys = array("q")  # for each line: the row's file, its line, its offset in `waiting`

    def add(self, rows: pa.Table) -> None:
        """Add the rows of ``ENCODED_SCHEMA`` that were dropped, cut or noted."""
        columns = rows.select(["file", "line", "status", "reason"])
        for row in columns.filter(pc.not_equal(columns["status"], "used")).to_pylist():
            file = self._files[row["file"]]
            if row["line"] == 0:
                raise UserError(f"data.train: {file} {row['reason']}")
            entry = {"file": file, "line": row["line"], "what": row["status"]}
            line = json.dumps(entry | {"reason": row["reason"]}, ensure_ascii=False)
            self._keys.extend((row["file"], row["line"], self._waiting.tell()))
            self._waiting.write(f"{line}\n".encode(errors="backslashreplace"))

    def write(self, path: Path) -> list[str]:
        """Write the report; return ``file:line: reason`` of the first rows that were dropped."""
        dropped: list[str] = []
        files, lines, offsets = np.frombuffer(self._keys, np.int64).reshape(-1, 3).T
        with path.open("wb") as handle:
            for offset in offsets[np.lexsort((lines, files))]:
                self._waiting.seek(offset)
                line = self._waiting.readline()
                handle.write(line)
                row = json.loads(line)
                if row["what"] == "dropped" and len(dropped) < _SHOWN_ROWS:
                    dropped.append(f"{row['file']}:{row['line']}: {row['reason']}")
        return dropped


def refuse_bad_data(
    counts: RowCounts, max_bad_rows: int, dropped: Sequence[str], report: Path | None = None
) -> None:
    """Refuse data without a usable row or with more bad ones than the recipe allows.

    ``dropped`` has ``file:line: reason`` of bad rows, of which the message shows the first; it also
    names ``report``, the file that lists them all, if there is one.
    """
    if not counts.num_examples and not counts.num_bad:
        raise UserError("data.train: the files hold no row; name files with conversations")
    if counts.num_examples and counts.num_bad <= max_bad_rows:
        return
    problem = f"{counts.num_bad} bad rows, and data.max_bad_rows allows {max_bad_rows}"
    if not counts.num_examples:
        problem = f"none of the {counts.num_bad} rows read is usable"
    shown = dropped[:_SHOWN_ROWS]
    num_more = counts.num_bad - len(shown)
    more = f"; and {num_more} more" if num_more else ""
    listed = f", listed in {report}" if num_more and report is not None else ""
    raise UserError(f"data.train: {problem}: {'; '.join(shown)}{more}{listed}")


def refuse_no_end(counts: RowCounts, files: Sequence[str]) -> None:
    """Refuse data from which a model learns to answer, but never to end."""
    if counts.num_with_end or not counts.num_examples:
        return
    problem = f"data.train: no end of a turn is learned from {', '.join(files[:_SHOWN_ROWS])}"
    if counts.num_truncated == counts.num_examples:
        raise UserError(f"{problem}: all conversations are cut; raise data.max_length")
    raise UserError(
        f"{problem}: the chat template ends turns with none of the model's end tokens; add the "
        "token that it writes there to eos_token_id in the model's generation_config.json, or use "
        "a chat template that writes an end token"
    )


def refuse_few_rows(num_examples: int, recipe: Recipe) -> None:
    """Refuse data that does not fill one batch of each stage."""
    for stage in recipe.trained_stages:
        if num_examples < stage.batch_size:
            raise UserError(
                f"data.train: {num_examples} conversations do not fill one batch of "
                f"stages.{stage.name}.batch_size = {stage.batch_size}; lower it or add data"
            )
