"""The engine process that `mars_serve.replica.engine_process` starts.

It runs as ``python -m mars_serve.replica.engine_main FD PULSE``. ``FD`` is the file descriptor of
its end of a socket pair, through which an `EngineStart` arrives first, and ``PULSE`` that of the
memory of its `Pulse`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from functools import partial

import torch

from mars_platform.errors import UserError
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.messages import NotLoaded
from mars_serve.engine.ipc.pulse import Pulse
from mars_serve.engine.ipc.worker import EngineWorker
from mars_serve.replica.basis import autoscaling_basis
from mars_serve.replica.engine_process import EngineStart
from mars_serve.replica.loading import load_engine

_SWITCH_S = 0.0005
"""Seconds after which the stepping thread lets the thread that takes orders run. Python's default
of 5 ms is as long as several steps of a small model."""

_log = logging.getLogger("mars_serve.engine")


def main() -> None:
    """Run the engine until the other end of the channel is closed."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles a terminal's Ctrl-C
    sys.setswitchinterval(_SWITCH_S)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    (start,) = channel.receive()
    assert isinstance(start, EngineStart)
    torch.set_num_threads(start.num_threads)
    try:
        engine = load_engine(start.settings)
    except UserError as error:
        channel.send(NotLoaded(str(error)))
        return
    engine.grammars.isolate()  # clients write them
    times = engine.warm_up(_log_progress)
    basis = autoscaling_basis(start.settings, engine, times)
    leave = partial(os._exit, 0)  # does not wait for a step that still runs
    pulse = Pulse(int(sys.argv[2]))
    EngineWorker(engine, channel, on_closed=leave, basis=basis, times=times, pulse=pulse).run()


def _log_progress(done: int, total: int) -> None:
    if done == total or done % 8 == 0:
        _log.info("warm-up: %d of %d step sizes timed", done, total)


if __name__ == "__main__":
    main()
