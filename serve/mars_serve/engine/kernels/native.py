"""A decoder's products with few rows, and what it computes between them, in C++ on a CPU.

A step of torch's operators spends more time between them than in them at small batches, and torch
has none that reads keys and values from pages. So `native.cpp` is compiled for this machine's
processor when an engine is made, in seconds, and kept in ``$XDG_CACHE_HOME/marsray``, or else
``~/.cache/marsray``, if nobody else may write there. Without a C++ compiler (``$CXX``, or else
``g++``) engines run torch's operators. What ``clang++`` compiles is slower with many rows.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_serve.engine.decoding_options import Limits

_log = logging.getLogger(__name__)

LANES = 16
"""Numbers that the functions compute with at once; pages are padded to a multiple of it."""
_MOST_BLOCK = 64
"""Most outputs of a linear layer that lie side by side when they are packed."""
_NAMES = {torch.bfloat16: "NUMBER_BFLOAT16", torch.float32: "NUMBER_FLOAT32"}
_SOURCE = Path(__file__).with_name("native.cpp")
_HEADER = Path(__file__).with_name("threads.h")
# Sums keep their order and NaN stays NaN, whatever the compiler.
_COMPILE = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"]
_LIBRARY = ["-fPIC", "-pthread", "-shared"]
_COMPILE_S = 60.0
_PROCESSOR = Path("/proc/cpuinfo")
_LOCK = threading.Lock()  # a thread may compile while another loads weights

_POINTER, _COUNT, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class AttentionArguments(ctypes.Structure):
    """Arguments of ``marsray_attend``; `native.cpp` says what each field is."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value", "output")),
        *((name, _POINTER) for name in ("key_pages", "value_pages", "page_table", "slots")),
        *((name, _POINTER) for name in ("rows", "oldest", "seen", "masks", "tiles", "sinks")),
        *((f"{part}_stride", _COUNT) for part in ("query", "query_head", "key", "key_head")),
        *((f"{part}_stride", _COUNT) for part in ("value", "value_head")),
        *((name, _COUNT) for name in ("num_positions", "num_tiles", "table_width")),
        *((name, _COUNT) for name in ("heads", "kv_heads", "key_dim", "value_dim")),
        *((name, _COUNT) for name in ("page_size", "page_width", "value_width")),
        *((name, _COUNT) for name in ("writes_pages", "num_threads")),
        *((name, _FLOAT) for name in ("scaling", "softcap")),
    )


class _Walk(ctypes.Structure):
    """Arguments of ``marsray_walk``; `native.cpp` says what each field is."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "banned", "divisors", "gates", "previous")),
        *((name, _POINTER) for name in ("following", "proposals")),
        *((name, _COUNT) for name in ("num_banned", "size", "rank", "most")),
    )


class Chain(NamedTuple):
    """Consecutive reads whose tokens are chosen one behind the other."""

    read: int
    num_reads: int
    token: int
    """Token before the first read's own, by which a draft head acts; -1 where none acts."""
    seed: int
    """Seed of the noise."""
    position: int
    """Absolute position of the first token to choose."""
    limits: Limits
    """Numbers of the sampling."""


_WHOLES = ("read", "num_reads", "token", "gates", "seed", "position", "top_k")
_CHAIN = np.dtype(
    [
        *((name, "i8") for name in _WHOLES),
        *((name, "f4") for name in ("temperature", "top_p", "least")),
    ],
    align=True,
)


class Native:
    """The functions for numbers of one type, on contiguous tensors unless strides are named."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take a compiled library."""
        self._attend, self._norm = library.marsray_attend, library.marsray_norm
        self._rotate, self._gate = library.marsray_rotate, library.marsray_gate
        self._attend.argtypes = [ctypes.POINTER(AttentionArguments)]
        self._norm.argtypes = [*[_POINTER] * 5, _COUNT, _COUNT, _FLOAT, _INT]
        self._rotate.argtypes = [*[_POINTER] * 5, *[_COUNT] * 5, _FLOAT, _FLOAT, _INT]
        self._gate.argtypes = [_POINTER, _POINTER, _COUNT, _COUNT, _INT]
        self._pack, self._multiply = library.marsray_pack, library.marsray_multiply
        self._pack.argtypes = [_POINTER, _POINTER, _COUNT, _COUNT, _INT]
        self._multiply.argtypes = [*[_POINTER] * 4, *[_COUNT] * 3, _INT]
        self._propose = library.marsray_propose
        self._propose.argtypes = [*[_POINTER] * 4, *[_COUNT] * 3, _INT]
        self._walk = library.marsray_walk
        self._walk.argtypes = [ctypes.POINTER(_Walk), _POINTER, _COUNT, _INT]
        for function in (self._norm, self._rotate, self._gate, self._pack):
            function.restype = None
        for function in (self._attend, self._multiply, self._propose, self._walk):
            function.restype = _check_memory

    def attend(self, arguments: AttentionArguments) -> None:
        """Attend in one layer, whose tensors the caller holds."""
        arguments.num_threads = torch.get_num_threads()
        self._attend(ctypes.byref(arguments))

    def pack(self, weight: Tensor) -> Tensor:
        """Pack a linear layer's weight, [out_features, in_features], for `multiply`."""
        out_features, in_features = weight.shape
        packed = weight.new_empty(-(-out_features // _MOST_BLOCK) * _MOST_BLOCK, in_features)
        pointers = weight.data_ptr(), packed.data_ptr()
        self._pack(*pointers, out_features, in_features, torch.get_num_threads())
        return packed

    def multiply(
        self, inputs: Tensor, packed: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        """Map [..., in_features], an even number, to [..., out_features], as a linear layer does.

        ``packed`` is what `pack` returned, and ``bias`` float32 [out_features].
        """
        *shape, in_features = inputs.shape
        outputs = inputs.new_empty(*shape, out_features)
        self._multiply(
            inputs.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            outputs.data_ptr(),
            inputs.numel() // in_features,
            in_features,
            out_features,
            torch.get_num_threads(),
        )
        return outputs

    def propose(self, logits: Tensor, banned: Tensor, divisors: NDArray[np.float32]) -> Tensor:
        """Return the table of `mars_serve.engine.execution.proposals.propose`: int32 [reads, 2].

        ``divisors``, [reads], are those of the logits for confidences, the probabilities; 0 where
        they do not matter.
        """
        rows, size = logits.shape
        assert len(divisors) == rows, "each read has a divisor"
        table = torch.empty(rows, 2, dtype=torch.int32)
        pointers = logits.data_ptr(), banned.data_ptr(), divisors.ctypes.data, table.data_ptr()
        self._propose(*pointers, len(banned), rows, size, torch.get_num_threads())
        return table

    def walk(
        self,
        logits: Tensor,
        banned: Tensor,
        divisors: NDArray[np.float32],
        chains: Sequence[Chain],
        head: tuple[Tensor, Tensor, Tensor] | None,
        most: int,
        table: Tensor,
    ) -> None:
        """Choose the tokens of chains anew in a ``table`` of `propose`.

        A draft head has its gates there, float32 [reads of all chains, rank], and its weights by
        the token before and by the next one, float32 [vocabulary, rank]; ``rank`` is a multiple of
        `LANES`. It acts on the ``most`` likeliest tokens.
        """
        pointers = logits.data_ptr(), banned.data_ptr(), divisors.ctypes.data
        weights = [None] * 3 if head is None else [each.data_ptr() for each in head]
        rank = 0 if head is None else head[0].shape[1]
        sizes = len(banned), logits.shape[1], rank, most
        walk = _Walk(*pointers, *weights, table.data_ptr(), *sizes)
        ends = accumulate((chain.num_reads for chain in chains), initial=0)
        numbers = [
            (*chain[:3], row, *chain[3:5], *chain.limits)
            for chain, row in zip(chains, ends, strict=False)
        ]
        array = np.array(numbers, _CHAIN)
        self._walk(ctypes.byref(walk), array.ctypes.data, len(chains), torch.get_num_threads())

    def norm(self, inputs: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide rows, [..., size], by their root mean square, times a float32 weight [size]."""
        outputs = torch.empty_like(inputs)
        self._run_norm(inputs, None, weight, None, outputs, epsilon)
        return outputs

    def add_norm(
        self, inputs: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of two tensors of rows, and it normed as by `norm`."""
        sums, outputs = torch.empty_like(inputs), torch.empty_like(inputs)
        self._run_norm(inputs, added, weight, sums, outputs, epsilon)
        return sums, outputs

    def _run_norm(
        self,
        inputs: Tensor,
        added: Tensor | None,
        weight: Tensor,
        sums: Tensor | None,
        outputs: Tensor,
        epsilon: float,
    ) -> None:
        size = inputs.shape[-1]
        self._norm(
            inputs.data_ptr(),
            None if added is None else added.data_ptr(),
            weight.data_ptr(),
            None if sums is None else sums.data_ptr(),
            outputs.data_ptr(),
            inputs.numel() // size,
            size,
            epsilon,
            torch.get_num_threads(),
        )

    def rotate(
        self,
        inputs: Tensor,
        rotation: tuple[Tensor, Tensor],
        heads: Sequence[int],
        query_norm: tuple[Tensor, float] | None = None,
        key_norm: tuple[Tensor, float] | None = None,
    ) -> None:
        """Norm and rotate the two halves of the leading heads of rows, in place.

        ``inputs`` are [positions, row], of which the first ``heads`` are queries, the next ones
        keys; ``rotation`` has cosines and sines, [..., positions, head_dim]. A norm is a float32
        weight, [head_dim], and an epsilon.
        """
        cosines, sines = rotation
        query_weight, query_epsilon = query_norm or (None, 0.0)
        key_weight, key_epsilon = key_norm or (None, 0.0)
        self._rotate(
            inputs.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            None if query_weight is None else query_weight.data_ptr(),
            None if key_weight is None else key_weight.data_ptr(),
            *(len(inputs), inputs.stride(0), *heads, cosines.shape[-1]),
            *(query_epsilon, key_epsilon, torch.get_num_threads()),
        )

    def gate(self, inputs: Tensor) -> Tensor:
        """Return SiLU of the first half of rows, [..., 2 * size], times the second half."""
        size = inputs.shape[-1] // 2
        outputs = inputs.new_empty(*inputs.shape[:-1], size)
        count = outputs.numel() // size
        pointers = inputs.data_ptr(), outputs.data_ptr()
        self._gate(*pointers, count, size, torch.get_num_threads())
        return outputs


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("there is no memory left for a function of C++")


def native_for(device: torch.device, dtype: torch.dtype) -> Native | None:
    """Return the functions for numbers of a type on a device, or None if there are none."""
    found = _find(device, dtype)
    return None if isinstance(found, str) else found


def why_not_native(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why there are no functions for numbers of a type on a device; None if there are."""
    found = _find(device, dtype)
    return found if isinstance(found, str) else None


def _find(device: torch.device, dtype: torch.dtype) -> Native | str:
    if device.type != "cpu":
        return f"the device is {device.type}, not a CPU"
    if dtype not in _NAMES:
        return f"the weights are {dtype}, and the C++ functions take bfloat16 and float32"
    command = (os.environ.get("CXX") or "g++").split()
    if not command or not shutil.which(command[0]):
        return "no C++ compiler was found (g++, or what CXX names)"
    with _LOCK:
        return _load((*command, *_COMPILE, f"-D{_NAMES[dtype]}"), _kept_in())


@cache
def _load(command: Sequence[str], kept: Path | None) -> Native | str:
    """Load the functions, and compile them first unless a directory has them."""
    try:
        sources = _SOURCE.read_text(), _HEADER.read_text()
        parts = *sources, command, _run([*command, "--version"]), _processor()
        name = f"native-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.so"
        if kept is not None:
            with suppress(OSError):  # it is missing or damaged
                return Native(ctypes.CDLL(str(kept / name)))
        with tempfile.TemporaryDirectory(prefix="marsray-", dir=kept) as scratch:
            path = _compile(command, Path(scratch))
            native = Native(ctypes.CDLL(str(path)))  # nothing is kept that cannot be loaded
            if kept is not None:
                _remove_old(kept)
                path.replace(kept / name)
            return native
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or str(error)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    _log.warning("the C++ functions could not be compiled: %s", reason[-2000:])
    return f"the C++ functions could not be compiled: {reason.splitlines()[0][:200]}"


def _compile(command: Sequence[str], scratch: Path) -> Path:
    library = scratch / "native.so"
    _run([*command, *_LIBRARY, str(_SOURCE), "-o", str(library)])
    library.chmod(0o700)  # a umask of 0 would let others write to it
    with library.open("rb") as file:
        os.fsync(file.fileno())  # so no half of it is found after a power failure
    return library


def _remove_old(kept: Path) -> None:
    """Remove libraries older than the source, which those that have them loaded do not miss."""
    changed_s = max(_SOURCE.stat().st_mtime, _HEADER.stat().st_mtime)
    for library in kept.glob("native-*.so"):
        with suppress(OSError):  # another process removes them, too
            if library.stat().st_mtime < changed_s:
                library.unlink()


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(  # noqa: S603 -- the user chooses the compiler
        command, check=True, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S
    )
    return done.stdout


def _processor() -> str:
    """Return what this machine's processor is, since a library is compiled for it alone; an empty
    text if that is not known.
    """
    with suppress(OSError):  # Linux has this file, unless a container hides it
        lines = _PROCESSOR.read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


def _kept_in() -> Path | None:
    """Return the directory of compiled libraries, or None if nothing can be kept in it.

    Nobody else may write to it, because what lies in it is run.
    """
    if not _processor():  # another machine may have the same directory
        return None
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        directory = Path(root).expanduser() / "marsray"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except (OSError, RuntimeError):  # there is no home directory, or none to write to
        return None
    is_own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return directory if is_own and os.access(directory, os.W_OK) else None
