"""``python -m mars_serve.replica.engine_main FD``: the process that `engine_process` starts.

``FD`` is its end of a socket pair, by which it first gets an `EngineStart`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

import torch

from mars_platform.errors import UserError
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.messages import NotLoaded
from mars_serve.engine.ipc.worker import EngineWorker
from mars_serve.replica.engine_process import EngineStart
from mars_serve.replica.loading import load_engine
from mars_serve.replica.planning import plan_of

_SWITCH_S = 0.0005
"""Longest that an order waits until the thread that steps lets another one run Python code. 5 ms,
Python's own, are several steps of a small model."""

_log = logging.getLogger("mars_serve.engine")


def main() -> None:
    """Serve the channel until its other end is closed."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's to obey
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
    times = engine.warm_up(_log_progress)
    plan = plan_of(start.settings, engine, times)
    EngineWorker(engine, channel, on_closed=_leave, plan=plan).run()


def _leave() -> None:
    """Whatever a step still does, nobody waits for it."""
    os._exit(0)


def _log_progress(done: int, total: int) -> None:
    if done == total or done % 8 == 0:
        _log.info("warm-up: %d of %d step sizes timed", done, total)


if __name__ == "__main__":
    main()
