"""Stores tokenised rows in files that every worker maps into memory, and orders them by step.

A store holds rows in canonical order: by input file, then by line. The rows of a step are a pure
function of (seed, epoch, step). So a run can be resumed, also by another number of workers. Imports
no Ray or torch.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from mars_platform.checkpoint.files import settle
from mars_platform.config import Settings, describe_validation_error
from mars_platform.errors import UserError, one_line

HEADER_FILE, INDEX_FILE = "store.json", "index.npy"
TOKENS_FILE, SUPERVISED_FILE = "tokens.bin", "supervised.bin"
_REMEDY = "prepare the data again"
_UINT64 = 2**64


class StoreHeader(Settings):
    """Content of ``store.json``."""

    format_version: Literal[1] = 1
    """Version of the store's layout."""
    num_rows: int = Field(ge=1)
    """Number of rows."""
    num_tokens: int = Field(ge=1)
    """Tokens of all rows."""
    fingerprint: str
    """SHA-256 over lengths, tokens and supervision in canonical order."""


class TokenStore:
    """Rows of tokens on disk, mapped into memory; opening a store reads only its header.

    ``store[i]`` is row i in canonical order: its input ids, int64 [length], and whether each is
    supervised, bool [length].

    Raises:
        UserError: a file is missing, damaged, cut short or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _read_header(path / HEADER_FILE)
        self.fingerprint = header.fingerprint
        self.num_tokens = header.num_tokens
        self._tokens = _map(path / TOKENS_FILE, np.dtype("<i4"), header.num_tokens)
        self._supervised = _map(path / SUPERVISED_FILE, np.dtype(np.uint8), header.num_tokens)
        self._index = _map_index(path / INDEX_FILE, header.num_rows)  # [rows, (start, length)]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        start, length = self._index[row]
        part = slice(start, start + length)
        return self._tokens[part].astype(np.int64), self._supervised[part].astype(bool)


class TokenStoreWriter:
    """Writes rows in the order of arrival; ``finish`` indexes them in canonical order.

    The store appears under ``path`` when ``finish`` is done, or not at all. It takes under 100
    bytes of memory per row.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise UserError(f"{path} is there already; remove it, or name another directory")
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        shutil.rmtree(self._partial, ignore_errors=True)  # left by a killed process
        self._partial.mkdir(parents=True)
        self._open = ExitStack()
        self._tokens = self._open.enter_context((self._partial / TOKENS_FILE).open("wb"))
        self._supervised = self._open.enter_context((self._partial / SUPERVISED_FILE).open("wb"))
        self._keys: list[NDArray[np.int64]] = []  # each [rows, (file, line)]
        self._lengths: list[NDArray[np.int32]] = []

    def __enter__(self) -> TokenStoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._open.close()  # fails if the disk has no room for the last bytes
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def append(
        self,
        keys: NDArray[np.int64],
        lengths: NDArray[np.int32],
        tokens: NDArray[np.int32],
        supervised: NDArray[np.bool_],
    ) -> None:
        """Add rows.

        ``keys`` are [rows, 2], number of the input file and line in it, and ``lengths`` [rows];
        ``tokens`` and ``supervised``, [tokens], are those of all rows one after the other.
        """
        assert len(keys) == len(lengths)
        assert lengths.sum() == len(tokens) == len(supervised)
        self._keys.append(keys)
        self._lengths.append(lengths)
        self._tokens.write(tokens.astype("<i4").tobytes())
        self._supervised.write(supervised.astype(np.uint8).tobytes())

    def finish(self) -> TokenStore:
        """Index the appended rows, at least one, and move the store to its path."""
        keys, lengths = np.concatenate(self._keys), np.concatenate(self._lengths)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        index = np.stack([starts[order], lengths[order]], axis=1)
        self._open.close()
        np.save(self._partial / INDEX_FILE, index)
        num_tokens = int(lengths.sum())
        tokens = _map(self._partial / TOKENS_FILE, np.dtype("<i4"), num_tokens)
        supervised = _map(self._partial / SUPERVISED_FILE, np.dtype(np.uint8), num_tokens)
        fingerprint = _fingerprint(index, tokens, supervised)
        header = StoreHeader(num_rows=len(index), num_tokens=num_tokens, fingerprint=fingerprint)
        (self._partial / HEADER_FILE).write_text(header.model_dump_json(indent=2) + "\n")
        settle(self._partial, self._path)
        return TokenStore(self._path)


def _read_header(file: Path) -> StoreHeader:
    try:
        return StoreHeader.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); {_REMEDY}") from error
    except ValidationError as error:
        problem = describe_validation_error(error, StoreHeader)
        raise UserError(f"{file}: {problem}; {_REMEDY}") from error


def _map(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); {_REMEDY}") from error
    if size != count * dtype.itemsize:
        expected = count * dtype.itemsize
        raise UserError(f"{file}: {size} bytes where {expected} belong; {_REMEDY}")
    return np.memmap(file, dtype, mode="r", shape=(count,))


def _map_index(file: Path, num_rows: int) -> NDArray[np.int64]:
    try:
        index: NDArray[np.int64] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)}); {_REMEDY}") from error
    if index.shape != (num_rows, 2) or index.dtype != np.int64:
        raise UserError(f"{file}: does not hold {num_rows} rows; {_REMEDY}")
    return index


def _fingerprint(
    index: NDArray[np.int64], tokens: NDArray[np.int32], supervised: NDArray[np.uint8]
) -> str:
    """Hash the content in canonical order, which need not be the order in the files."""
    starts, lengths = index[:, 0], index[:, 1]
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + lengths[:-1])  # between neighbours on disk
    begins = starts[np.concatenate([[0], breaks + 1])]
    ends = (starts + lengths)[np.concatenate([breaks, [-1]])]
    digest = hashlib.sha256(lengths.astype("<i8").tobytes())
    for payload in (tokens, supervised):
        for begin, end in zip(begins, ends, strict=True):
            digest.update(payload[begin:end].data)
    return digest.hexdigest()


# --- order ----------------------------------------------------------------------------------------

# Purpose of a hash, so that the values drawn for one (seed, epoch) are independent.
_ORDER, _OFFSET, _SIZE, _TEMPERATURE = 1, 2, 3, 4


@lru_cache(maxsize=1)
def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the rows of an epoch in the order of training: a permutation, int64 [num_rows].

    The array is read-only, because the steps of an epoch share it.

    Rows are sorted by a hash, because NumPy's generators may change between versions
    (https://numpy.org/doc/stable/reference/random/compatibility.html), and a run may be resumed
    with another version.
    """
    rows = np.arange(num_rows, dtype=np.int64)
    order = np.argsort(_hash(_ORDER, seed, epoch, rows), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def block_sizes(
    rows: NDArray[np.int64], seed: int, epoch: int, sizes: Sequence[int]
) -> NDArray[np.int64]:
    """Return the block size of each row in an epoch, drawn from ``sizes``: int64 [rows]."""
    drawn = _hash(_SIZE, seed, epoch, rows) % np.uint64(len(sizes))
    return np.array(sizes, np.int64)[drawn.astype(np.int64)]


def temperatures(
    rows: NDArray[np.int64], seed: int, choices: Sequence[float]
) -> NDArray[np.float64]:
    """Return the temperature of each row's response, drawn from ``choices``: float64 [rows]."""
    drawn = _hash(_TEMPERATURE, seed, 0, rows) % np.uint64(len(choices))
    return np.array(choices, np.float64)[drawn.astype(np.int64)]


def block_offsets(
    rows: NDArray[np.int64], seed: int, epoch: int, block_size: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the offset of each row's block borders in an epoch: int64 [rows] below ``block_size``.

    ``block_size`` is the size of all rows' blocks, or of each row's, int64 [rows].
    """
    limits = np.asarray(block_size).astype(np.uint64)
    return (_hash(_OFFSET, seed, epoch, rows) % limits).astype(np.int64)


def share(rows: NDArray[np.int64], rank: int, num_workers: int) -> NDArray[np.int64]:
    """Return one worker's contiguous part of a batch; parts differ by at most one row."""
    assert 0 <= rank < num_workers
    return rows[rank * len(rows) // num_workers : (rank + 1) * len(rows) // num_workers]


def step_rows(
    num_rows: int, batch_size: int, seed: int, step: int
) -> tuple[int, NDArray[np.int64]]:
    """Return the epoch of an optimizer step and its rows over all workers, int64 [batch_size].

    Steps and epochs count from 0. An epoch's last, incomplete batch is dropped. ``batch_size`` is
    at most ``num_rows``.
    """
    assert 1 <= batch_size <= num_rows
    epoch, batch = divmod(step, num_rows // batch_size)
    order = epoch_order(num_rows, seed, epoch)
    return epoch, order[batch * batch_size : (batch + 1) * batch_size]


def _hash(purpose: int, seed: int, epoch: int, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a pseudo-random uint64 for each row, [rows]."""
    state = np.zeros(1, np.uint64)
    for word in (purpose, seed, epoch):
        state = _splitmix64(state + np.uint64(word % _UINT64))
    return _splitmix64(state + rows.astype(np.uint64))


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one output of the SplitMix64 generator (Steele, Lea, Flood 2014), modulo 2^64."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
