"""From files of conversations to a store of tokenised rows: a Ray Data pipeline with a report.

Every input row is accounted for: used, cut to length, or dropped, with its file, line and reason.
Knows nothing of how rows are ordered or trained on.
"""

from __future__ import annotations

import io
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from glob import has_magic
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import ray.data
from fsspec.core import url_to_fs
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_platform.data.conversations import Conversation, parse_conversation, render_turns
from mars_platform.errors import UserError
from mars_train.data.token_store import TokenStoreWriter
from mars_train.recipe import DataSettings

REPORT_FILE = "report.jsonl"
_PARQUET = ".parquet"
_CODECS = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
_SUFFIXES = (*_CODECS, _PARQUET)
_KINDS = ", ".join(_SUFFIXES)

_SHOWN_ROWS = 3
_REASON_CHARACTERS = 300
_HOPELESS_ROWS = 10_000  # where none of so many is usable, the rest is not read
_BLOCK_BYTES = 2**21  # of text that one task tokenises: about a second's work
_BATCH_ROWS = 256
_SCHEMA = pa.schema(
    [
        ("file", pa.int64()),
        ("line", pa.int64()),
        ("input_ids", pa.list_(pa.int32())),
        ("supervised", pa.list_(pa.bool_())),
        ("outcome", pa.string()),  # used, truncated or dropped
        ("reason", pa.string()),  # null where used
    ]
)


@dataclass(frozen=True)
class PreparedData:
    """A token store, and what became of the input."""

    path: Path
    """The store's directory; see `mars_train.data.token_store.TokenStore`."""
    fingerprint: str
    """The store's."""
    num_examples: int
    """Usable rows."""
    num_tokens: int
    num_supervised: int
    num_truncated: int
    """Usable rows that were cut to ``data.max_length``."""
    num_bad: int
    """Rows that were dropped."""
    longest: int
    """Tokens of the longest usable row."""
    max_token_id: int
    bad_rows: list[str]
    """``file:line: reason`` of the first rows that were dropped."""
    truncated_rows: list[str]
    """Likewise of the first ones that were cut."""

    @property
    def report(self) -> Path:
        """Every row that was dropped or cut, as JSONL: file, line, what, reason."""
        return self.path.with_name(REPORT_FILE)


def prepare(settings: DataSettings, tokenizer_path: Path, output: Path) -> PreparedData:
    """Read, check and tokenise the training files into a token store at ``output``.

    The report is written beside it, and left there when the data is refused. Files are streamed;
    what is kept in memory is under 100 bytes a row.

    Raises:
        UserError: a file is missing or broken, the tokenizer has no chat template, more rows are
            bad than allowed, none is usable, or ``output`` exists or cannot be written.
    """
    files = find_files(settings.train)
    _check_tokenizer(tokenizer_path)
    counts, hopeless = _Counts(), max(_HOPELESS_ROWS, settings.max_bad_rows)
    try:
        with TokenStoreWriter(output) as writer, TemporaryFile(dir=output.parent) as waiting:
            report = _Report(files, waiting)
            for table in _tokenized(files, settings, tokenizer_path):
                report.add(table)
                usable = table.filter(pc.not_equal(table["outcome"], "dropped"))
                counts.num_bad += table.num_rows - usable.num_rows
                if usable.num_rows:
                    counts.add(usable)
                    _append(usable, writer)
                if not counts.num_examples and counts.num_bad > hopeless:
                    break
            first = report.write(output.with_name(REPORT_FILE))
            _check(counts, settings, first["dropped"], output.with_name(REPORT_FILE))
            store = writer.finish()
    except ray.exceptions.RayError:  # a task's OSError is one of these, too
        raise
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({_one_line(error)}); make room") from error
    return PreparedData(
        path=output,
        fingerprint=store.fingerprint,
        bad_rows=first["dropped"],
        truncated_rows=first["truncated"],
        **vars(counts),
    )


def check_vocabulary(prepared: PreparedData, vocabulary_size: int) -> None:
    """Refuse data whose tokens the model's embedding of ``vocabulary_size`` rows does not have.

    Raises:
        UserError: the tokenizer is another model's.
    """
    if prepared.max_token_id >= vocabulary_size:
        raise UserError(
            f"model: the data's labels are out of vocabulary: token ids go up to "
            f"{prepared.max_token_id}, but the embedding has {vocabulary_size} rows; the tokenizer "
            "does not match the model, so take both from one checkpoint"
        )


# --- files ----------------------------------------------------------------------------------------


def find_files(sources: Iterable[str], setting: str = "data.train") -> list[str]:
    """Data files among files, directories and globs, in order; each a path or an fsspec URL.

    Args:
        sources: as the user wrote them; relative paths stay relative.
        setting: the field that messages name.

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
    except Exception as error:  # file systems raise whatever they like
        raise UserError(f"{setting}: {source} cannot be read ({_one_line(error)})") from error
    usable = sorted(name for name in found if name.endswith(_SUFFIXES))
    if not usable:
        raise UserError(f"{setting}: {problem}")
    if "://" in source:
        return [fs.unstrip_protocol(name) for name in usable]
    return usable if Path(source).is_absolute() else [os.path.relpath(name) for name in usable]


def read_conversations(
    sources: Iterable[str], setting: str = "data.train"
) -> Iterator[Conversation]:
    """The usable conversations of some sources (see `find_files`); bad rows are passed over.

    Raises:
        UserError: a file is missing or broken.
    """
    for file in find_files(sources, setting):
        for row in _read_rows({"file": 0, "url": file}):
            try:
                yield parse_conversation(_decode(row))
            except UserError as error:
                if row["line"] == 0:
                    raise UserError(f"{setting}: {file} {error}") from error
                continue  # counted and reported when the data is prepared


def _read_rows(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of one file as bytes; line numbers start at 1.

    A row of line 0 says what is wrong with the file as a whole, and is the last.
    """
    file, line = item["file"], 0
    try:
        for line, content in enumerate(_contents(item["url"]), start=1):
            yield {"file": file, "line": line, "content": content}
    except Exception as error:  # file systems and decoders raise whatever they like
        where = f" past row {line}" if line else ""
        problem = f"cannot be read{where} ({_one_line(error)})"
        yield {"file": file, "line": 0, "content": problem.encode()}


def _contents(url: str) -> Iterator[bytes]:
    fs, path = url_to_fs(url)
    with fs.open(path, "rb") as handle:
        if path.endswith(_PARQUET):
            yield from _parquet_rows(handle)
            return
        codec = next(codec for suffix, codec in _CODECS.items() if path.endswith(suffix))
        yield from io.BufferedReader(pa.CompressedInputStream(handle, codec)) if codec else handle


def _parquet_rows(handle: IO[bytes]) -> Iterator[bytes]:
    file = pyarrow.parquet.ParquetFile(handle)
    if "messages" not in file.schema_arrow.names:
        raise ValueError(f"no column messages among {', '.join(file.schema_arrow.names)}")
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=["messages"]):
        for row in batch.to_pylist():
            # what is no JSON, such as bytes, becomes null, and the row a bad one
            yield json.dumps(row, default=lambda _: None).encode()


# --- tokens ---------------------------------------------------------------------------------------


def _tokenized(
    files: list[str], settings: DataSettings, tokenizer_path: Path
) -> Iterator[pa.Table]:
    """Tables of `_SCHEMA`, in the order that Ray Data finishes them."""
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.target_max_block_size = _BLOCK_BYTES
    with ray.data.DataContext.current(context):
        items = ray.data.from_items(
            [{"file": index, "url": _absolute(file)} for index, file in enumerate(files)]
        )
        # Ray Data does not fuse these two, as flat_map changes the number of rows and map_batches
        # asks for a batch size: each block read is tokenised by a task of its own.
        tables = items.flat_map(_read_rows).map_batches(
            _tokenize_batch,
            batch_format="pyarrow",
            batch_size=_BATCH_ROWS,
            fn_kwargs={
                "tokenizer_path": str(tokenizer_path),
                "loss_on": settings.loss_on,
                "max_length": settings.max_length,
            },
        )
    yield from tables.iter_batches(batch_size=None, batch_format="pyarrow")


def _absolute(file: str) -> str:
    """Workers have directories of their own."""
    fs, path = url_to_fs(file)
    return file if "://" in file else fs.unstrip_protocol(path)


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path)


def _check_tokenizer(path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.chat_template is None:
        raise UserError(
            "model: the tokenizer has no chat template; add the model's as chat_template.jinja"
        )
    if not tokenizer.is_fast:
        raise UserError("model: the tokenizer does not tell where tokens stand; add tokenizer.json")


def _tokenize_batch(
    batch: pa.Table, tokenizer_path: str, loss_on: Literal["last", "all"], max_length: int
) -> pa.Table:
    tokenizer = _tokenizer(tokenizer_path)
    rows = batch.to_pylist()
    rendered = [_render(row, tokenizer, loss_on) for row in rows]
    encoded = tokenizer(
        [text for text, _, _ in rendered], add_special_tokens=False, return_offsets_mapping=True
    )
    outcomes = [
        _outcome(ids, offsets, spans, max_length) if problem is None else _dropped(problem)
        for (_, spans, problem), ids, offsets in zip(
            rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]
    places = [{"file": row["file"], "line": row["line"]} for row in rows]
    return pa.Table.from_pylist(
        [place | outcome for place, outcome in zip(places, outcomes, strict=True)], schema=_SCHEMA
    )


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    loss_on: Literal["last", "all"],
    max_length: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids of one conversation and which of them are labels, both [length].

    Raises:
        UserError: it cannot be rendered, or has no label within ``max_length``.
    """
    text, spans = render_turns(tokenizer, conversation, loss_on)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    outcome = _outcome(encoded["input_ids"], encoded["offset_mapping"], spans, max_length)
    if outcome["outcome"] == "dropped":
        raise UserError(f"messages: {outcome['reason']}")
    return np.array(outcome["input_ids"], dtype=np.int64), outcome["supervised"]


def _render(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, loss_on: Literal["last", "all"]
) -> tuple[str, list[tuple[int, int]], str | None]:
    """The conversation's text, its supervised spans, and what is wrong with it."""
    try:
        conversation = parse_conversation(_decode(row))
        return *render_turns(tokenizer, conversation, loss_on), None
    except UserError as error:
        return "", [], _one_line(error)


def _decode(row: dict[str, Any]) -> str:
    content: bytes = row["content"]
    if row["line"] == 0:
        raise UserError(content.decode())
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"not valid UTF-8 (at byte {error.start + 1})") from error


def _outcome(
    ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]], max_length: int
) -> dict[str, Any]:
    """What becomes of a rendered row; a token is supervised if it starts inside a span."""
    starts = np.array([start for start, _ in offsets[:max_length]], dtype=np.int64)
    supervised = np.zeros(len(starts), bool)
    for begin, end in spans:
        supervised |= (starts >= begin) & (starts < end)
    cut = len(ids) > max_length
    if not supervised[1:].any():  # nothing predicts the first token
        limit = f" within data.max_length = {max_length}" if cut else ""
        return _dropped(f"no supervised token{limit}, of {len(ids)} tokens")
    return {
        "input_ids": ids[:max_length],
        "supervised": supervised,
        "outcome": "truncated" if cut else "used",
        "reason": f"{len(ids)} tokens, cut to data.max_length = {max_length}" if cut else None,
    }


def _dropped(reason: str) -> dict[str, Any]:
    return {"input_ids": [], "supervised": [], "outcome": "dropped", "reason": reason}


# --- what became of the rows ----------------------------------------------------------------------


@dataclass
class _Counts:
    """Sums over the rows seen; the names are those of `PreparedData`."""

    num_examples: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_truncated: int = 0
    num_bad: int = 0
    longest: int = 0
    max_token_id: int = 0

    def add(self, usable: pa.Table) -> None:
        lengths = pc.list_value_length(usable["input_ids"])
        tokens = pc.list_flatten(usable["input_ids"])
        self.num_examples += usable.num_rows
        self.num_tokens += len(tokens)
        self.num_supervised += pc.sum(pc.list_flatten(usable["supervised"])).as_py()
        self.num_truncated += pc.sum(pc.equal(usable["outcome"], "truncated")).as_py()
        self.longest = max(self.longest, pc.max(lengths).as_py())
        self.max_token_id = max(self.max_token_id, pc.max(tokens).as_py())


def _append(usable: pa.Table, writer: TokenStoreWriter) -> None:
    writer.append(
        keys=np.stack([usable["file"].to_numpy(), usable["line"].to_numpy()], axis=1),
        lengths=pc.list_value_length(usable["input_ids"]).to_numpy(),
        tokens=pc.list_flatten(usable["input_ids"]).to_numpy(),
        supervised=pc.list_flatten(usable["supervised"]).to_numpy(),
    )


class _Report:
    """A line for each row that was dropped or cut, in the order of the input.

    Rows arrive in any order: their lines wait in a file of their own. Memory: 24 bytes such a row.
    """

    def __init__(self, files: list[str], waiting: IO[bytes]) -> None:
        self._files, self._waiting = files, waiting
        self._keys = array("q")  # of each line: the row's file, its line in it, place in waiting

    def add(self, rows: pa.Table) -> None:
        """Take what is said of rows.

        Raises:
            UserError: a file as a whole cannot be read.
        """
        columns = rows.select(["file", "line", "outcome", "reason"])
        for row in columns.filter(pc.not_equal(columns["outcome"], "used")).to_pylist():
            file = self._files[row["file"]]
            if row["line"] == 0:
                raise UserError(f"data.train: {file} {row['reason']}")
            entry = {"file": file, "line": row["line"], "what": row["outcome"]}
            line = json.dumps(entry | {"reason": row["reason"]}, ensure_ascii=False)
            self._keys.extend((row["file"], row["line"], self._waiting.tell()))
            self._waiting.write(f"{line}\n".encode(errors="backslashreplace"))

    def write(self, path: Path) -> dict[str, list[str]]:
        """Write the report; returns its first lines in short, dropped and truncated rows apart."""
        first: dict[str, list[str]] = {"dropped": [], "truncated": []}
        files, lines, places = np.frombuffer(self._keys, np.int64).reshape(-1, 3).T
        with path.open("wb") as handle:
            for place in places[np.lexsort((lines, files))]:
                self._waiting.seek(place)
                line = self._waiting.readline()
                handle.write(line)
                row = json.loads(line)
                if len(first[row["what"]]) < _SHOWN_ROWS:
                    first[row["what"]].append(f"{row['file']}:{row['line']}: {row['reason']}")
        return first


def _check(counts: _Counts, settings: DataSettings, dropped: list[str], report: Path) -> None:
    if not counts.num_examples and not counts.num_bad:
        raise UserError("data.train: the files hold no row")
    if counts.num_examples and counts.num_bad <= settings.max_bad_rows:
        return
    problem = f"{counts.num_bad} bad rows, and data.max_bad_rows allows {settings.max_bad_rows}"
    if not counts.num_examples:
        problem = f"none of the {counts.num_bad} rows read is usable"
    num_more = counts.num_bad - len(dropped)
    more = f"; and {num_more} more, listed in {report}" if num_more else ""
    raise UserError(f"data.train: {problem}: {'; '.join(dropped)}{more}")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]} ..."
