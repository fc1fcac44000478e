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

from mars_platform.cluster.scheduling import preempt_others
from mars_platform.errors import UserError
from mars_serve.engine.adaptive.thread_choice import ThreadChoice
from mars_serve.engine.ipc.auditor import Auditor
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.messages import NotLoaded
from mars_serve.engine.ipc.pulse import Pulse
from mars_serve.engine.ipc.worker import EngineWorker
from mars_serve.observability.request_telemetry import RequestTelemetry
from mars_serve.replica.basis import autoscaling_basis
from mars_serve.replica.engine_process import EngineStart
from mars_serve.replica.loading import check_of, load_checker, load_engine, within_memory
from mars_serve.replica.number_type_advice import advise_number_type
from mars_serve.replica.step_time_cache import warm_up
from mars_serve.replica.threads import set_threads

_SWITCH_S = 0.0005
"""Seconds after which the stepping thread lets the thread that takes orders run. Python's default
of 5 ms is as long as several steps of a small model."""


def main() -> None:
    """Run the engine until the other end of the channel is closed."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles a terminal's Ctrl-C
    sys.setswitchinterval(_SWITCH_S)
    preempt_others()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    (start,) = channel.receive()
    assert isinstance(start, EngineStart)
    torch.set_num_threads(start.threads.num)
    audit = start.settings.audit
    try:
        checker = load_checker(audit.checker)
        engine = load_engine(start.settings)
        num_threads = set_threads(engine, start.threads)
        advise_number_type(engine)
        engine.grammars.isolate()  # clients write them
        with within_memory(start.settings):  # the first steps, and those of the largest sizes
            times = warm_up(start.settings, engine)
    except UserError as error:
        channel.send(NotLoaded(str(error)))
        return
    basis = autoscaling_basis(start.settings, engine, times)
    # Compiled code holds the number, and rounding may depend on it.
    is_fixed = engine.settings.compile or engine.settings.batch_invariant
    if num_threads > start.threads.num and not is_fixed:
        engine.thread_choice = ThreadChoice(times, start.threads.num, num_threads)
    leave = partial(os._exit, 0)  # does not wait for a step that still runs
    pulse = Pulse(int(sys.argv[2]))
    EngineWorker(
        engine,
        channel,
        RequestTelemetry(),
        on_closed=leave,
        basis=basis,
        times=times,
        pulse=pulse,
        host=start.host,
        auditor=Auditor(engine, audit.share, checker and check_of(checker, engine.checkpoint)),
    ).run()


if __name__ == "__main__":
    main()
