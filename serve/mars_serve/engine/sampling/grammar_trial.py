"""Tries grammars in processes that can be ended, since llguidance cannot be interrupted.

Some grammars of a few kilobytes compile for hours (for example pairs of ``patternProperties``), and
its limits do not cover them. So a process of its own holds the tokenizer and forks once for each
grammar; the fork has a budget of time and memory, and the kernel ends it beyond that. A crash of
the library ends the fork, too, and not the engine.

The process runs as ``python -m mars_serve.engine.sampling.grammar_trial FD``. ``FD`` is its end of
a socket pair, through which tokenizer and limits arrive first, and then one connected socket for
each grammar. Its imports are few, as it starts with the engine's first grammar. Imports no Ray,
torch or HTTP library.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_WAIT_S = 60.0
"""Most seconds to wait for a trial, which may get little of a busy machine; the process hangs if it
takes longer."""
_MAX_ATTEMPTS = 2
_END_S = 0.2
"""Seconds from the close of a process's sockets to its end."""
NICENESS = 10
"""Niceness of what compiles grammars, which then gets a tenth of a processor beside a step."""
_LENGTH = struct.Struct("!Q")
_FITS = b"\0"
"""Answer of a trial that found nothing wrong; other answers are reasons."""


class TrialFailed(ValueError):
    """A grammar cannot be used; the message says why."""


@dataclass(frozen=True)
class GrammarLimits:
    """Most that one grammar may cost, in part in llguidance's units: see its ``LLParserLimits``."""

    max_length: int = 65_536
    """Characters of the grammar's text."""
    num_cached: int = 32
    """Compiled grammars in the cache, up to 34 MB each, and as many refused ones."""
    step_s: float = 0.25
    """CPU seconds in one step."""
    compile_s: float = 2.0
    """CPU seconds to compile it and to find its first tokens, in a trial."""
    compile_bytes: int = 2**30
    """Memory of a trial beside the tokenizer."""
    compile_fuel: int = 300_000
    """Fuel for the grammar's regular expressions, about 300 ms at worst."""
    step_fuel: int = 200_000
    """Lexer fuel for one set of allowed tokens, about 14 ms."""
    step_items: int = 10_000
    """Parser items for one set of allowed tokens: up to 70 ms for the most ambiguous grammars."""
    row_items: int = 1_000
    """Parser items behind one byte. The time of an ambiguous grammar grows with their cube."""
    num_states: int = 20_000
    """Lexer states of up to 2 kB each, which all requests with the grammar share; usual ones have
    fewer than 1 000, loose regular expressions up to 10 000."""
    num_symbols: int = 500_000
    """Symbols of the grammar's rules, once repetitions are expanded."""

    def for_parser(self) -> LLParserLimits:
        """Return llguidance's limits; its errors then omit its state, which holds outputs."""
        return LLParserLimits(
            max_items_in_row=self.row_items,
            initial_lexer_fuel=self.compile_fuel,
            step_lexer_fuel=self.step_fuel,
            step_max_items=self.step_items,
            max_lexer_states=self.num_states,
            max_grammar_size=self.num_symbols,
            verbose_errors=False,
        )

    @staticmethod
    def stack(source: str) -> int:
        """Return the bytes of stack that compiling a grammar needs.

        It recurses along chains of rules or references, which took up to 512 bytes for each
        character (measured); a stack that is too small ends the process.
        """
        return max(16 * 2**20, 2048 * len(source))


@dataclass(frozen=True)
class SerializedTokenizer:
    """A tokenizer in the form in which another process can load it."""

    text: str
    """All of it as JSON."""
    vocabulary: int
    """Number of logits or, if that is larger, of the tokens."""
    end_ids: Sequence[int]

    def load(self) -> LLTokenizer:
        """Return it in llguidance's form; takes about a second for 150 000 tokens.

        Raises:
            ValueError: llguidance does not support it.
        """
        return LLTokenizer(self.text, n_vocab=self.vocabulary, eos_token=list(self.end_ids))


class GrammarTrial:
    """The process in which an engine's grammars are tried; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def run(self, source: str, tokenizer: SerializedTokenizer, limits: GrammarLimits) -> None:
        """Try a grammar, given in llguidance's form; several threads may do so at once.

        Raises:
            TrialFailed: it has an error, needs too much time or memory, or makes llguidance crash.
            RuntimeError: the process does not answer, and neither does a new one.
        """
        for _ in range(_MAX_ATTEMPTS):
            with self._lock:
                process = self._process = self._running(tokenizer, limits)
            try:
                answer = process.try_out(source)
            except OSError:  # the process hangs or has ended, for which no grammar is to blame
                process.end()
                continue
            if answer == _FITS:
                return
            raise TrialFailed(answer.decode() or _too_heavy(limits))
        raise RuntimeError("the process in which grammars are tried does not answer")

    def close(self) -> None:
        """End the process, if it has been started; trials that still run end on their own."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None

    def _running(self, tokenizer: SerializedTokenizer, limits: GrammarLimits) -> _Process:
        if self._process is not None and self._process.is_alive:
            return self._process
        if self._process is not None:
            self._process.end()
        return _Process(tokenizer, limits)


class _Process:
    """A process that tries grammars, as seen by the one that started it."""

    def __init__(self, tokenizer: SerializedTokenizer, limits: GrammarLimits) -> None:
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(_WAIT_S)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 -- this module
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        start = json.dumps([asdict(tokenizer), asdict(limits)]).encode()
        self._start = _LENGTH.pack(len(start)) + start
        """Bytes that are still to be sent before the first grammar."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, though it may hang."""
        return self._process.poll() is None

    def try_out(self, source: str) -> bytes:
        """Return a trial's answer, which is empty if the trial was ended."""
        ours, theirs = socket.socketpair()
        ours.settimeout(_WAIT_S)
        with ours:
            with theirs, self._lock:
                self._orders.sendall(self._start)
                self._start = b""
                socket.send_fds(self._orders, [b"."], [theirs.fileno()])
            answer = b""
            with suppress(ConnectionError):  # a trial that is ended while it reads or works
                ours.sendall(source.encode())
                ours.shutdown(socket.SHUT_WR)
                answer = _read_all(ours)
        if not answer and self._is_ending():
            raise ConnectionError
        return answer

    def _is_ending(self) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return not self.is_alive

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._orders.close()


def _too_heavy(limits: GrammarLimits) -> str:
    return (
        f"compiling it takes more than {limits.compile_s:g} s or "
        f"{limits.compile_bytes // 2**20} MiB, or fails altogether"
    )


# The functions below run in the process.


def main() -> None:
    """Fork for each grammar until the other end of the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles a terminal's Ctrl-C
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    os.nice(NICENESS)
    orders = socket.socket(fileno=int(sys.argv[1]))
    (length,) = _LENGTH.unpack(_read_exactly(orders, _LENGTH.size))
    start = json.loads(_read_exactly(orders, length))
    tokenizer, limits = SerializedTokenizer(**start[0]).load(), GrammarLimits(**start[1])
    while True:
        _, fds, _, _ = socket.recv_fds(orders, 1, 1)
        if not fds:
            return
        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                orders.close()
                _answer(connection, tokenizer, limits)
                os._exit(0)


def _answer(connection: socket.socket, tokenizer: LLTokenizer, limits: GrammarLimits) -> None:
    source = _read_all(connection).decode()

    def work() -> None:
        connection.sendall(_problem(source, tokenizer, limits).encode() or _FITS)

    threading.stack_size(limits.stack(source))
    _limit(limits, limits.stack(source))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _limit(limits: GrammarLimits, stack: int) -> None:
    """Have the kernel end this process once it has taken more than a trial may."""
    begun = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = begun + stack + limits.compile_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.compile_s)


def _problem(source: str, tokenizer: LLTokenizer, limits: GrammarLimits) -> str:
    """Compile a grammar and find its first tokens; return the error, or nothing."""
    parser = LLMatcher(tokenizer, source, log_level=0, limits=limits.for_parser())
    if not parser.is_error():
        parser.compute_bitmask()
    return parser.get_error()


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(min(2**20, length - len(data)))
        if not part:
            raise SystemExit  # the engine has ended
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
