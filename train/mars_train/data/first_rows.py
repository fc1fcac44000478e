"""Looks at the first rows of the training data, because reading all of it can take long.

Whatever is refused here would be refused as well once all rows are read. Imports no Ray or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mars_platform.errors import UserError, one_line
from mars_train.data.files import parse_row, read_rows
from mars_train.data.row_report import RowCounts, refuse_bad_data, refuse_few_rows
from mars_train.recipe import Recipe

_ROWS_OF_FILE = 500
_BYTES = 16 * 2**20
_LOCAL_FILES, _REMOTE_FILES = 500, 8  # a remote file takes a request or more


@dataclass(frozen=True)
class Row:
    """One row of a file."""

    file: str
    line: int
    """Number of the row in its file, from 1."""
    content: bytes


@dataclass(frozen=True)
class FirstRows:
    """The first rows of some files."""

    rows: list[Row]
    are_all: bool
    """Whether the files hold no other rows."""

    def check(self, counts: RowCounts, dropped: Sequence[str], recipe: Recipe) -> None:
        """Refuse data whose first rows show already that it is unusable.

        Args:
            counts: sums over these rows.
            dropped: ``file:line: reason`` of the bad ones among them.
            recipe: the recipe.

        Raises:
            UserError: too many rows are bad, or the files hold too few.
        """
        if self.are_all or counts.num_bad > recipe.data.max_bad_rows:
            refuse_bad_data(counts, recipe.data.max_bad_rows, dropped)
        if self.are_all:
            refuse_few_rows(counts.num_examples, recipe)


def read_first_rows(files: Sequence[str]) -> FirstRows:
    """Read the first rows of each file, or of the first files if there are many.

    Raises:
        UserError: a file cannot be read.
    """
    local = [file for file in files if "://" not in file]
    remote = [file for file in files if "://" in file]
    chosen = local[:_LOCAL_FILES] + remote[:_REMOTE_FILES]
    parts = [_first_of_file(file, _BYTES // len(chosen)) for file in chosen]
    return FirstRows(
        rows=[row for part in parts for row in part.rows],
        are_all=len(chosen) == len(files) and all(part.are_all for part in parts),
    )


def check_format(first: FirstRows, recipe: Recipe) -> None:
    """Refuse data whose first rows are no conversations.

    Raises:
        UserError: see `FirstRows.check`.
    """
    dropped = []
    for row in first.rows:
        try:
            parse_row(row.content)
        except UserError as error:
            dropped.append(f"{row.file}:{row.line}: {one_line(error)}")
    num_bad = len(dropped)
    counts = RowCounts(num_examples=len(first.rows) - num_bad, num_bad=num_bad)
    first.check(counts, dropped, recipe)


def _first_of_file(file: str, max_bytes: int) -> FirstRows:
    rows, num_bytes = list[Row](), 0
    for line, content in read_rows(file):
        if line == 0:
            raise UserError(f"data.train: {file} {content.decode()}; mend the file or leave it out")
        if line > _ROWS_OF_FILE or num_bytes > max_bytes:
            return FirstRows(rows, are_all=False)
        rows.append(Row(file, line, content))
        num_bytes += len(content)
    return FirstRows(rows, are_all=True)
