"""Starts an engine in a child process, which has an interpreter lock of its own."""

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mars_serve.config.settings import ModelSettings
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.client import EngineClient
from mars_serve.engine.ipc.pulse import Pulse
from mars_serve.replica.engine_template import (
    EngineProcess,
    fork_engine,
    load_ahead,
    place_on,
    python_environment,
    template_name,
)
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


def start_engine(
    settings: ModelSettings, num_threads: int, *, host: str = LOOPBACK, node: str | None = None
) -> EngineClient:
    """Start a process with a model's engine, and wait until the engine is warmed up.

    From then on a thread watches the engine, and ends it if a step hangs. The process ends when
    this one does, however that happens.

    Args:
        settings: the model's settings.
        num_threads: CPU threads of the engine, unless the settings name a number.
        host: address of the interface on which requests are accepted from other processes.
        node: name of the place whose equal engines share a template process, from which each is
            forked; None for an engine that is loaded by itself, as those on GPUs always are.

    Raises:
        UserError: the model cannot be loaded.
        EngineDied: the process ended before it was ready.
    """
    start = EngineStart(settings, num_threads, host)
    if node is not None and not settings.num_gpus:  # a fork cannot use its parent's GPU
        try:
            name = template_name(settings, num_threads, place_on(node))
            return _connected(start, partial(fork_engine, name))
        except OSError as error:
            _log.warning("the engine is loaded by itself, since it cannot be forked: %s", error)
    return _connected(start, _spawn)


def load_engine_ahead(settings: ModelSettings, num_threads: int, place: str) -> None:
    """Have an engine loaded, from which those of a model's replicas at a place are forked.

    Args:
        settings: the model's settings, as the replicas will get them; it runs on CPUs.
        num_threads: CPU threads of the engine, unless the settings name a number.
        place: value of `PLACE_VARIABLE` in the replicas.

    Raises:
        UserError: the model cannot be found.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(ours).send(EngineStart(settings, num_threads, LOOPBACK))
        try:
            load_ahead(template_name(settings, num_threads, place), theirs.fileno())
        except OSError as error:
            _log.warning("the engine of %s is loaded by its replica: %s", settings.name, error)


def _connected(start: EngineStart, launch: Callable[[list[int]], EngineProcess]) -> EngineClient:
    """Launch an engine's process, wait until the engine is ready, and watch it.

    ``launch`` takes the descriptors of its channel, in which ``start`` waits, and its pulse.
    """
    ours, theirs = socket.socketpair()
    channel, memory = Channel(ours), Pulse.create()
    pulse = Pulse(memory)
    channel.send(start)
    try:
        with theirs:
            worker = launch([theirs.fileno(), memory])
    finally:
        os.close(memory)
    engine = EngineClient(channel, worker)
    assert engine.step_times is not None
    reader = PulseReader(pulse, engine.step_times.at, start.settings.engine.step_timeout_s)
    watch(reader, engine, worker.kill)
    return engine


def _spawn(handed: list[int]) -> EngineProcess:
    child = subprocess.Popen(  # noqa: S603 - runs this interpreter with fixed arguments
        [sys.executable, "-m", "mars_serve.replica.engine_main", *map(str, handed)],
        env=python_environment(),
        pass_fds=handed,
        stdin=subprocess.DEVNULL,
    )
    return EngineProcess(os.pidfd_open(child.pid), child)
