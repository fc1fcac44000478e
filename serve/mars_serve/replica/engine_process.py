"""Starts an engine in a child process, which has an interpreter lock of its own."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

from mars_serve.config.settings import ModelSettings
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.client import EngineClient
from mars_serve.engine.ipc.pulse import Pulse
from mars_serve.replica.watchdog import PulseReader, watch

LOOPBACK = "127.0.0.1"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStart:
    """The first message to the engine process."""

    settings: ModelSettings
    num_threads: int
    """CPU threads of the engine, unless the settings name a number."""
    host: str
    """Address of the interface on which requests are accepted."""


class _Process:
    """A child process as a `mars_serve.engine.ipc.client.Worker`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    def join(self, timeout: float) -> None:
        """Wait until the process has ended, and kill it after ``timeout`` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_engine(
    settings: ModelSettings, num_threads: int, *, host: str = LOOPBACK
) -> EngineClient:
    """Start a process with a model's engine, and wait until the engine is warmed up.

    From then on a thread watches the engine, and ends it if a step hangs. The process ends when
    this one does, however that happens.

    Args:
        settings: the model's settings.
        num_threads: CPU threads of the engine, unless the settings name a number.
        host: address of the interface on which requests are accepted from other processes.

    Raises:
        UserError: the model cannot be loaded.
        EngineDied: the process ended before it was ready.
    """
    ours, theirs = socket.socketpair()
    memory = Pulse.create()
    pulse = Pulse(memory)
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - runs this interpreter with fixed arguments
            [
                sys.executable,
                "-m",
                "mars_serve.replica.engine_main",
                str(theirs.fileno()),
                str(memory),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno(), memory],
            stdin=subprocess.DEVNULL,
        )
    os.close(memory)
    channel = Channel(ours)
    with suppress(ChannelClosed):  # EngineClient reports a process that has ended
        channel.send(EngineStart(settings, num_threads, host))
    worker = _Process(process)
    engine = EngineClient(channel, worker)
    assert engine.step_times is not None
    reader = PulseReader(pulse, engine.step_times.at, settings.engine.step_timeout_s)
    watch(reader, engine, worker.kill)
    return engine
