"""Reads the rows of one file as JSON, a few at a time: JSONL, JSON arrays, Parquet and Arrow.

Imports no Ray, torch or HTTP library.
"""

import io
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet
from fsspec.core import url_to_fs

from mars_platform.data.shapes import KNOWN_COLUMNS, ColumnNames, missing_column

_PARQUET, ARROW = ".parquet", ".arrow"
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_LINES, _JSON = (tuple(kind + end for end in ("", *_CODECS)) for kind in (".jsonl", ".json"))
SUFFIXES = (*_LINES, *_JSON, _PARQUET, ARROW)
_BATCH_ROWS = 256
MAX_ROW_BYTES = 64 * 2**20
"""Longest row of a JSON file; a few KiB, compressed, could otherwise take all memory."""
_PIECE = 2**18
"""Characters of a JSON array that are read at once."""
_TOO_LONG = f"the next has more than {MAX_ROW_BYTES:,} bytes; shorten it"
_SPACE = re.compile(r"[ \t\n\r]*")
_MAGIC = b"ARROW1"
_DECODER = json.JSONDecoder()


def read_contents(url: str, columns: ColumnNames) -> Iterator[bytes]:
    """Yield the rows of a file as JSON, blank lines and a byte order mark included.

    Raises:
        Exception: file systems and decoders raise errors of many types.
    """
    fs, path = url_to_fs(url)
    with fs.open(path, "rb") as handle:
        if path.endswith((_PARQUET, ARROW)):
            yield from _table_rows(handle, columns, is_parquet=path.endswith(_PARQUET))
            return
        codec = next((_CODECS[suffix] for suffix in _CODECS if path.endswith(suffix)), None)
        stream = io.BufferedReader(pa.CompressedInputStream(handle, codec) if codec else handle)
        begin = stream.peek(_PIECE).removeprefix(BOM_UTF8).lstrip()[:1]
        if path.endswith(_JSON) and begin == b"[":
            with io.TextIOWrapper(stream, "utf-8-sig") as reader:
                yield from _array_items(reader)
            return
        while line := stream.readline(MAX_ROW_BYTES + 1):
            if len(line) > MAX_ROW_BYTES:
                raise ValueError(_TOO_LONG)
            yield line


def _array_items(reader: io.TextIOWrapper) -> Iterator[bytes]:
    """Yield the text of each item of the JSON array at the beginning, and hold a few at a time."""
    while reader.read(1) != "[":
        pass  # white space before the array
    text, at = "", 0
    while True:
        found = _item(text, at)
        if found is not None:
            begin, end, behind = found
            if end > begin:
                yield text[begin:end].encode()
            if text[behind] == "]":
                _check_end(reader, text[behind + 1 :])
                return
            at = behind + 1
            continue
        if len(text) - at > MAX_ROW_BYTES:
            raise ValueError(_TOO_LONG)
        more = reader.read(max(_PIECE, len(text) - at))
        if not more:
            raise ValueError("the next item is not valid JSON, or the array has no end")
        text, at = text[at:] + more, 0


def _check_end(reader: io.TextIOWrapper, rest: str) -> None:
    while rest:
        if rest.strip():
            raise ValueError("something follows the end of the array")
        rest = reader.read(_PIECE)


def _item(text: str, at: int) -> tuple[int, int, int] | None:
    """Return begin and end of the next item and the place of what is behind it.

    None means that the text ends before. At the array's end, the item is empty.
    """
    begin = _after_space(text, at)
    if text.startswith("]", begin):
        return begin, begin, begin
    try:
        _, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError:
        return None
    behind = _after_space(text, end)
    if behind == len(text):
        return None
    if text[behind] not in ",]":
        raise ValueError("a comma is missing behind the next item")
    return begin, end, behind


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()


def _table_rows(handle: IO[bytes], columns: ColumnNames, *, is_parquet: bool) -> Iterator[bytes]:
    if is_parquet:
        file = pyarrow.parquet.ParquetFile(handle)
        names = _names_to_read(file.schema_arrow.names, columns)
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=names)
    else:
        is_file = handle.read(len(_MAGIC)) == _MAGIC
        handle.seek(0)
        reader = pa.ipc.open_file(handle) if is_file else pa.ipc.open_stream(handle)
        names = _names_to_read(reader.schema.names, columns)
        read = (
            (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        )
        batches = (
            batch.select(names).slice(at, _BATCH_ROWS)
            for batch in read
            for at in range(0, batch.num_rows, _BATCH_ROWS)
        )
    for batch in batches:
        for row in batch.to_pylist():
            # A value that JSON cannot hold, such as bytes, becomes a list, which makes the row bad.
            kept = {name: _without_nulls(value) for name, value in row.items()}
            yield json.dumps(kept, default=lambda _: []).encode()


def _names_to_read(names: list[str], columns: ColumnNames) -> list[str]:
    if problem := missing_column(columns, names):
        raise ValueError(problem)
    known = {*KNOWN_COLUMNS, *columns.values()}
    if not (found := [name for name in names if name in known]):
        raise ValueError(f"no column of a known name among {', '.join(names)}; see data.columns")
    return found


def _without_nulls(value: Any) -> Any:
    """Leave out what a value lacks: in a table, all structs of a column have all keys of any."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
