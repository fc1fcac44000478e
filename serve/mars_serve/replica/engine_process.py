"""Starts an engine in a process of its own, so that it shares no interpreter lock with what speaks
HTTP.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mars_serve.config.settings import ModelSettings
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.loop import EngineLoop

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStart:
    """The first message to the process."""

    settings: ModelSettings
    num_threads: int
    """Of torch, on CPU."""


class _Process:
    """`mars_serve.engine.ipc.loop.Worker` of a child process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def join(self, timeout: float) -> None:
        """Wait until it has ended; one that does not in time is killed."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_engine(settings: ModelSettings, num_threads: int) -> EngineLoop:
    """Start a process with a model's engine and wait until that is warm, in a rehearsal until the
    cold start is over, too.

    The process ends with this one, however that ends.

    Args:
        settings: the model's.
        num_threads: of torch, on CPU.

    Raises:
        UserError: the model cannot be loaded.
        EngineDied: the process ended before it was ready.
    """
    started_s = time.monotonic()
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, and arguments of our own
            [sys.executable, "-m", "mars_serve.replica.engine_main", str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    channel = Channel(ours)
    with suppress(ChannelClosed):  # a process that has ended already is told of below
        channel.send(EngineStart(settings, num_threads))
    loop = EngineLoop(channel, _Process(process))
    if settings.rehearsal is not None:
        wait_out(settings.rehearsal.cold_start_s, started_s)
    return loop


def wait_out(
    cold_start_s: float,
    started_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a cold start has taken its time; one that has already is no error.

    Args:
        cold_start_s: seconds that it takes.
        started_s: when it began, by ``clock``.
        clock: in seconds.
        sleep: waits for so many seconds.
    """
    left_s = started_s + cold_start_s - clock()
    if left_s <= 0:
        return
    _log.warning(
        "rehearsal: ready, but held back for %.1f s, until %g s have gone into a cold start",
        left_s,
        cold_start_s,
    )
    while left_s > 0:
        sleep(left_s)
        left_s = started_s + cold_start_s - clock()
