"""Finds files of conversations and reads their rows: JSONL, JSON, Parquet and Arrow.

Imports no Ray, torch or HTTP library.
"""

import os
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from glob import has_magic
from pathlib import Path

from fsspec.core import url_to_fs

from mars_platform.data.contents import ARROW, SUFFIXES, read_contents
from mars_platform.data.conversations import Conversation, parse_conversation, read_answer
from mars_platform.data.shapes import NO_NAMES, ColumnNames
from mars_platform.data.sources import hub_files, is_of_hub
from mars_platform.errors import UserError, one_line

_KINDS = ".jsonl and .json, also .gz or .zst, .parquet, .arrow"
_DICT_FILE = "dataset_dict.json"
_NOTES = ("dataset_info.json", "dataset_infos.json", "state.json", _DICT_FILE)
"""Files beside data that are none."""
_MAGIC = re.compile(r"[*?[]")


def find_files(sources: Iterable[str], setting: str = "data.train") -> list[str]:
    """Return the data files that paths, directories, globs and URLs stand for, in order.

    Files and directories within them whose names begin with a dot are left out: editors and
    notebooks keep copies there.
    A URL is one of fsspec or of a data set on the hub; see `hub_files`. Relative paths stay
    relative. Errors name ``setting``, the field that the sources come from.

    Raises:
        UserError: a source is missing, holds no data file, or is of an unknown kind.
    """
    return [file for source in sources for file in _find(source, setting)]


def _find(source: str, setting: str) -> list[str]:
    if is_of_hub(source):
        return _of_hub(source, setting)
    try:
        fs, path = url_to_fs(source)
        if fs.isfile(path):
            found, problem = [path], f"{source} is of no supported kind ({_KINDS})"
        elif fs.isdir(path):
            found = _shown(fs.find(path), path)
            problem = f"{source} holds no file of a supported kind ({_KINDS})"
        else:
            matches = fs.glob(path, detail=True).items() if has_magic(path) else ()
            files = [name for name, info in matches if info["type"] != "directory"]
            found = _shown(files, _MAGIC.split(path)[0])
            problem = f"there is no file or directory {source}"
    except Exception as error:  # file systems raise errors of many types
        raise UserError(f"{setting}: {source} cannot be read ({one_line(error)})") from error
    dictionaries = [name for name in found if name.endswith(f"/{_DICT_FILE}")]
    usable = sorted(name for name in found if _is_data(name))
    splits = {name.removeprefix(path).lstrip("/").split("/")[0] for name in usable}
    if dictionaries and len(splits) > 1:
        raise UserError(
            f"{setting}: {source} holds the splits {', '.join(sorted(splits))}; name one of them, "
            f"such as {source.rstrip('/')}/{min(splits)}"
        )
    if not usable:
        raise UserError(f"{setting}: {problem}")
    if "://" in source:
        return [fs.unstrip_protocol(name) for name in usable]
    return usable if Path(source).is_absolute() else [os.path.relpath(name) for name in usable]


def _shown(names: Iterable[str], root: str) -> list[str]:
    return [name for name in names if "/." not in name.removeprefix(root.rstrip("/"))]


def _of_hub(source: str, setting: str) -> list[str]:
    try:
        found = hub_files(source)
    except UserError as error:
        raise UserError(f"{setting}: {error}") from error
    if other := [file for file in found if not _is_data(file)]:
        raise UserError(f"{setting}: {source}: {other[0]} is of no supported kind ({_KINDS})")
    return found


def _is_data(name: str) -> bool:
    base = name.rpartition("/")[2]
    is_cache = base.startswith("cache-") and base.endswith(ARROW)  # kept by datasets' map()
    return base.endswith(SUFFIXES) and base not in _NOTES and not is_cache


def absolute_url(file: str) -> str:
    """Return the URL of a file, for workers whose working directory is another one."""
    fs, path = url_to_fs(file)
    return file if "://" in file else fs.unstrip_protocol(path)


def read_conversations(
    sources: Iterable[str], setting: str = "data.train", columns: ColumnNames = NO_NAMES
) -> Iterator[Conversation]:
    """Yield the usable conversations of some sources (see `find_files`), skipping bad rows.

    Bad rows are counted and reported when the data is prepared for training.
    """
    for file in find_files(sources, setting):
        for line, content in read_rows(file, columns):
            if line == 0:
                raise UserError(f"{setting}: {file} {content.decode()}")
            try:
                conversation = parse_row(content, columns)
            except UserError:
                continue
            yield conversation


def read_checked_rows(
    files: Iterable[str | Path], setting: str, columns: ColumnNames = NO_NAMES
) -> Iterator[tuple[str, Conversation, str | None]]:
    """Yield the name of each row, as ``file:line``, its conversation, and its answer if it has one.

    Bad rows are never skipped: two models must be scored on the same items.

    Raises:
        UserError: a file cannot be read, or a row is bad; the latter names file and line.
    """
    for file in files:
        for line, content in read_rows(str(file), columns):
            if line == 0:
                raise UserError(f"{setting}: {file} {content.decode()}; check the file")
            try:
                conversation = parse_row(content, columns)
                yield f"{file}:{line}", conversation, read_answer(conversation)
            except UserError as error:
                raise UserError(f"{file}:{line}: {error}") from error


def read_rows(url: str, columns: ColumnNames = NO_NAMES) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and content of each row of a file, without blank lines.

    The content is JSON, and the number that of a line, or of an item or row in other files than
    JSONL. A byte order mark at the beginning is no part of a row. If the file cannot be read to its
    end, the last row has line 0 and its content is the problem.
    """
    line = 0
    try:
        for line, content in enumerate(read_contents(url, columns), start=1):
            row = content.removeprefix(BOM_UTF8) if line == 1 else content
            if row.strip():
                yield line, row
    except Exception as error:  # file systems and decoders raise errors of many types
        where = f" past row {line}" if line else ""
        yield 0, f"cannot be read{where} ({one_line(error)})".encode()


def parse_row(content: bytes, columns: ColumnNames = NO_NAMES) -> Conversation:
    """Parse the content of a row; see `parse_conversation`.

    Raises:
        UserError: the row is not UTF-8, or is no conversation.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"not valid UTF-8 (at byte {error.start + 1})") from error
    return parse_conversation(text, columns)
