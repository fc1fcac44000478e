"""The engine process that `mars_serve.replica.engine_process` starts.

The process runs ``python -m mars_serve.replica.engine_main FD PULSE``. ``FD`` is the file
descriptor of its end of a socket pair, through which an `EngineStart` arrives first, and ``PULSE``
that of the memory of its `Pulse`. An engine that is forked from
`mars_serve.replica.engine_template` runs what stands here, too.
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from mars_autoscale.model.step_times import StepTimes
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_platform.checkpoint.number_type import is_bfloat16_slow
from mars_platform.cluster.scheduling import preempt_others
from mars_platform.errors import UserError
from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc.auditor import Auditor
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.messages import NotLoaded
from mars_serve.engine.ipc.pulse import Pulse
from mars_serve.engine.ipc.worker import EngineWorker
from mars_serve.engine.kernels.native import native_for
from mars_serve.observability.log_lines import write_to_stderr
from mars_serve.observability.request_telemetry import RequestTelemetry
from mars_serve.replica.basis import autoscaling_basis
from mars_serve.replica.engine_process import EngineStart
from mars_serve.replica.loading import load_engine, within_memory

_SWITCH_S = 0.0005
"""Seconds after which the stepping thread lets the thread that takes orders run. Python's default
of 5 ms is as long as several steps of a small model."""
_SMALL = 30_000_000
"""Parameters below which a served model is as fast with one CPU thread less, or faster."""

_PROGRESS_S = 5.0
"""Least seconds between two lines on how far the warm-up is."""

_log = logging.getLogger("mars_serve.engine")


class LoadedEngine(NamedTuple):
    """An engine that is warmed up, and what was measured meanwhile."""

    engine: Engine
    times: StepTimes
    basis: AutoscalingBasis | None


def main() -> None:
    """Load an engine and run it until the other end of the channel is closed."""
    prepare_process()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    (start,) = channel.receive()
    assert isinstance(start, EngineStart)
    run_engine(start, channel, int(sys.argv[2]), load)


def prepare_process() -> None:
    """Set up what a process with an engine needs, and all processes that are forked from it."""
    write_to_stderr(logging.root)
    logging.root.setLevel(logging.INFO)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles a terminal's Ctrl-C
    sys.setswitchinterval(_SWITCH_S)
    preempt_others()


def load(start: EngineStart) -> LoadedEngine:
    """Load an engine and warm it up."""
    # Without a setting, a core is left to what starts beside it: threads that share one wait for
    # each other by turns, for seconds. Steps get a number by the size of the model.
    torch.set_num_threads(start.settings.num_threads or max(1, start.num_threads - 1))
    engine = load_engine(start.settings)
    torch.set_num_threads(threads_for(start, engine.num_parameters))
    _warn_of_slow_bfloat16(engine)
    with within_memory(start.settings):  # the first steps, and those of the largest sizes
        times = engine.warm_up(_progress_log())
    return LoadedEngine(engine, times, autoscaling_basis(start.settings, engine, times))


def run_engine(
    start: EngineStart,
    channel: Channel,
    pulse: int,
    load: Callable[[EngineStart], LoadedEngine],
) -> None:
    """Run an engine until the other end of its channel is closed.

    Args:
        start: the first message that came through the channel.
        channel: leads to the engine's starter.
        pulse: file descriptor of the memory of the engine's pulse.
        load: returns the engine; a `UserError` is told to the other end.
    """
    try:
        loaded = load(start)
    except UserError as error:
        channel.send(NotLoaded(str(error)))
        return
    engine = loaded.engine
    torch.set_num_threads(threads_for(start, engine.num_parameters))
    engine.grammars.isolate()  # clients write them
    leave = partial(os._exit, 0)  # does not wait for a step that still runs
    EngineWorker(
        engine,
        channel,
        RequestTelemetry(),
        on_closed=leave,
        basis=loaded.basis,
        times=loaded.times,
        pulse=Pulse(pulse),
        host=start.host,
        auditor=Auditor(engine, start.settings.audit.share),
    ).run()


def threads_for(start: EngineStart, num_parameters: int) -> int:
    """Return the number of CPU threads that the settings name, or one for a model of this size.

    A small model's steps are about as short as what HTTP computes for their tokens, and all threads
    of a step wait for the one whose core HTTP takes. So that core is left to HTTP.
    """
    if start.settings.num_threads is not None:
        return start.settings.num_threads
    return max(1, start.num_threads - (num_parameters < _SMALL))


def _warn_of_slow_bfloat16(engine: Engine) -> None:
    # Functions of C++ widen the numbers of bfloat16 and are as fast with them.
    is_native = native_for(engine.device, engine.dtype) and not engine.settings.batch_invariant
    is_bfloat16 = engine.dtype == torch.bfloat16 and engine.device.type == "cpu"
    if is_bfloat16 and not is_native and is_bfloat16_slow():
        _log.warning(
            "the weights are bfloat16, for which this processor has no instructions: float32 "
            "(dtype: float32) is many times as fast, and takes twice the memory; bfloat16 is as "
            "fast where g++ is installed, without engine.batch_invariant"
        )


def _progress_log() -> Callable[[int, int], None]:
    last_s = time.monotonic()

    def note(done: int, total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _PROGRESS_S:
            last_s = time.monotonic()
            _log.info("step times are measured: %d of %d steps", done, total)

    return note


if __name__ == "__main__":
    main()
