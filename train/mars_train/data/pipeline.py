"""Prepares training data: a Ray Data pipeline from files of conversations to a token store.

Every input row is used, cut to length or dropped, and a report lists the latter two with file, line
and reason.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray.data

from mars_platform.data.files import absolute_url, find_files, read_rows
from mars_platform.data.shapes import ColumnNames
from mars_platform.errors import UserError, one_line
from mars_train.data.encoding import encode_rows
from mars_train.data.row_report import (
    REPORT_FILE,
    RowCounts,
    RowReport,
    refuse_bad_data,
    refuse_no_end,
)
from mars_train.data.token_store import TokenStoreWriter
from mars_train.recipe import DataSettings

HOPELESS_ROWS = 10_000
"""Rows after which reading stops if none of them is usable."""
BLOCK_BYTES = 2**21
"""Bytes of text that one task tokenises: about a second's work."""
_BATCH_ROWS = 256


def prepare(settings: DataSettings, tokenizer_path: Path, output: Path) -> RowCounts:
    """Read, check and tokenise the training files into a token store; return sums over their rows.

    A JSONL file beside the store at ``output``, ``REPORT_FILE``, lists every row that was dropped,
    cut or noted: file, line, what, reason. It is written even if the data is refused. Files are
    streamed; memory use is under 100 bytes a row.

    Raises:
        UserError: a file is missing or broken, more rows are bad than allowed, none is usable, or
            ``output`` exists or cannot be written.
    """
    files = find_files(settings.train)
    counts = RowCounts(num_files=len(files))
    hopeless = max(HOPELESS_ROWS, settings.max_bad_rows)
    try:
        with TokenStoreWriter(output) as writer, TemporaryFile(dir=output.parent) as waiting:
            report = RowReport(files, waiting)
            for table in encoded_tables(files, settings, tokenizer_path):
                report.add(table)
                usable = table.filter(pc.not_equal(table["status"], "dropped"))
                counts.num_bad += table.num_rows - usable.num_rows
                if usable.num_rows:
                    counts.add(usable)
                    _append(usable, writer)
                if not counts.num_examples and counts.num_bad > hopeless:
                    break
            report_path = output.with_name(REPORT_FILE)
            dropped = report.write(report_path)
            refuse_bad_data(counts, settings.max_bad_rows, dropped, report_path)
            refuse_no_end(counts, files)
            writer.finish()
    except ray.exceptions.RayError:  # includes an OSError raised by a task
        raise
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({one_line(error)}); make room") from error
    return counts


def encoded_tables(
    files: list[str], settings: DataSettings, tokenizer_path: Path
) -> Iterator[pa.Table]:
    """Yield tables of ``ENCODED_SCHEMA`` for the files' rows, in the order that tasks finish."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.target_max_block_size = BLOCK_BYTES
    with ray.data.DataContext.current(context):
        items = ray.data.from_items(
            [{"file": index, "url": absolute_url(file)} for index, file in enumerate(files)]
        )
        # Ray Data does not fuse these two, because flat_map changes the number of rows and
        # map_batches sets a batch size. So a separate task tokenises each block that is read.
        tables = items.flat_map(_read_file, fn_kwargs={"columns": settings.columns}).map_batches(
            encode_rows,
            batch_format="pyarrow",
            batch_size=_BATCH_ROWS,
            fn_kwargs={
                "tokenizer_path": str(tokenizer_path),
                "settings": settings,
            },
        )
    yield from tables.iter_batches(batch_size=None, batch_format="pyarrow")


def _read_file(item: dict[str, Any], columns: ColumnNames) -> Iterator[dict[str, Any]]:
    for line, content in read_rows(item["url"], columns):
        yield {"file": item["file"], "line": line, "content": content}


def _append(usable: pa.Table, writer: TokenStoreWriter) -> None:
    writer.append(
        keys=np.stack([usable["file"].to_numpy(), usable["line"].to_numpy()], axis=1),
        lengths=pc.list_value_length(usable["input_ids"]).to_numpy(),
        tokens=pc.list_flatten(usable["input_ids"]).to_numpy(),
        supervised=pc.list_flatten(usable["supervised"]).to_numpy(),
    )
