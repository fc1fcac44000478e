"""Finds files of conversations and reads their rows: JSONL, plain or compressed, and Parquet.

Imports no Ray, torch or HTTP library.
"""

import io
import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from glob import has_magic
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet
from fsspec.core import url_to_fs

from mars_platform.data.conversations import Conversation, parse_conversation, read_answer
from mars_platform.errors import UserError, one_line

_PARQUET = ".parquet"
_CODECS = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
_SUFFIXES = (*_CODECS, _PARQUET)
_KINDS = ", ".join(_SUFFIXES)
_PARQUET_BATCH = 256
_MAX_ROW_BYTES = 64 * 2**20
"""Longest line of a JSONL file; a few KiB, compressed, could otherwise take all memory."""


def find_files(sources: Iterable[str], setting: str = "data.train") -> list[str]:
    """Return the data files that paths, directories, globs and fsspec URLs stand for, in order.

    Relative paths stay relative. Errors name ``setting``, the field that the sources come from.

    Raises:
        UserError: a source is missing, holds no data file, or is of an unknown kind.
    """
    return [file for source in sources for file in _find(source, setting)]


def _find(source: str, setting: str) -> list[str]:
    try:
        fs, path = url_to_fs(source)
        if fs.isfile(path):
            found, problem = [path], f"{source} is of no supported kind ({_KINDS})"
        elif fs.isdir(path):
            found, problem = fs.find(path), f"{source} holds no file of a supported kind ({_KINDS})"
        else:
            matches = fs.glob(path, detail=True).items() if has_magic(path) else ()
            found = [name for name, info in matches if info["type"] != "directory"]
            problem = f"there is no file or directory {source}"
    except Exception as error:  # file systems raise errors of many types
        raise UserError(f"{setting}: {source} cannot be read ({one_line(error)})") from error
    usable = sorted(name for name in found if name.endswith(_SUFFIXES))
    if not usable:
        raise UserError(f"{setting}: {problem}")
    if "://" in source:
        return [fs.unstrip_protocol(name) for name in usable]
    return usable if Path(source).is_absolute() else [os.path.relpath(name) for name in usable]


def absolute_url(file: str) -> str:
    """Return the URL of a file, for workers whose working directory is another one."""
    fs, path = url_to_fs(file)
    return file if "://" in file else fs.unstrip_protocol(path)


def read_conversations(
    sources: Iterable[str], setting: str = "data.train"
) -> Iterator[Conversation]:
    """Yield the usable conversations of some sources (see `find_files`), skipping bad rows.

    Bad rows are counted and reported when the data is prepared for training.

    Raises:
        UserError: a file is missing or broken.
    """
    for file in find_files(sources, setting):
        for line, content in read_rows(file):
            if line == 0:
                raise UserError(f"{setting}: {file} {content.decode()}")
            try:
                conversation = parse_row(content)
            except UserError:
                continue
            yield conversation


def read_checked_rows(
    files: Iterable[str | Path], setting: str
) -> Iterator[tuple[str, Conversation, str | None]]:
    """Yield the name of each row, as ``file:line``, its conversation, and its answer if it has one.

    Bad rows are never skipped: two models must be scored on the same items.

    Raises:
        UserError: a file cannot be read, or a row is bad; the latter names file and line.
    """
    for file in files:
        for line, content in read_rows(str(file)):
            if line == 0:
                raise UserError(f"{setting}: {file} {content.decode()}; check the file")
            try:
                conversation = parse_row(content)
                yield f"{file}:{line}", conversation, read_answer(conversation)
            except UserError as error:
                raise UserError(f"{file}:{line}: {error}") from error


def read_rows(url: str) -> Iterator[tuple[int, bytes]]:
    """Yield line number, from 1, and content of each row of a file, without blank lines.

    A byte order mark at the beginning is no part of a row. If the file cannot be read to its end,
    the last row has line 0 and its content is the problem.
    """
    line = 0
    try:
        for line, content in enumerate(_contents(url), start=1):
            row = content.removeprefix(BOM_UTF8) if line == 1 else content
            if row.strip():
                yield line, row
    except Exception as error:  # file systems and decoders raise errors of many types
        where = f" past row {line}" if line else ""
        yield 0, f"cannot be read{where} ({one_line(error)})".encode()


def parse_row(content: bytes) -> Conversation:
    """Parse the content of a row.

    Raises:
        UserError: the row is not UTF-8, or is no conversation.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"not valid UTF-8 (at byte {error.start + 1})") from error
    return parse_conversation(text)


def _contents(url: str) -> Iterator[bytes]:
    fs, path = url_to_fs(url)
    with fs.open(path, "rb") as handle:
        if path.endswith(_PARQUET):
            yield from _parquet_rows(handle)
            return
        codec = next((_CODECS[suffix] for suffix in _CODECS if path.endswith(suffix)), None)
        stream = io.BufferedReader(pa.CompressedInputStream(handle, codec) if codec else handle)
        while line := stream.readline(_MAX_ROW_BYTES + 1):
            if len(line) > _MAX_ROW_BYTES:
                raise ValueError(f"the next has more than {_MAX_ROW_BYTES:,} bytes; shorten it")
            yield line


def _parquet_rows(handle: IO[bytes]) -> Iterator[bytes]:
    file = pyarrow.parquet.ParquetFile(handle)
    names = file.schema_arrow.names
    if "messages" not in names:
        raise ValueError(f"no column messages among {', '.join(names)}")
    columns = [name for name in ("messages", "answer") if name in names]
    for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=columns):
        for row in batch.to_pylist():
            # A value that JSON cannot hold, such as bytes, becomes a list, which makes the row bad.
            yield json.dumps(row, default=lambda _: []).encode()
