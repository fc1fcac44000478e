"""Times the steps of an engine at its start while other programs take its cores for a part of it.

    python -m bench.kernels.busy_start qwen2-100m --dtype bfloat16

An engine chooses masks by how much longer larger steps take, so times that are all too long do no
harm. If those of small steps alone are, masks seem free; if those of large ones are, too dear.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated, Literal, NamedTuple

import torch
import typer
from bench.beds.report import markdown

from mars_serve.bench.decode.models import BenchModel, untrained_model
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.engine import Engine
from mars_serve.engine.settings import EngineSettings

QUIET = (0.0, 0.0)
SPANS = (QUIET, (0.0, 0.2), (0.2, 0.75), (0.2, 0.96), (0.1, 1.0), (0.5, math.inf), (0.0, math.inf))
"""Parts of a start during which the cores are shared, as shares of its usual number of steps,
beyond which those are run that have been disturbed."""
_NUM_PROGRAMS = 3
_SETTLE_S = 0.3  # until new programs run
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Program that spins until the benchmark has ended, however that comes about."""


class Disturbance:
    """Programs that spin on this process's cores during a part of something with progress."""

    def __init__(self, begin: float, end: float):
        self._begin, self._end = begin, end
        self._programs: list[subprocess.Popen[bytes]] = []

    def on_progress(self, done: int, total: int) -> None:
        """Begin or end the disturbance where ``done`` of ``total`` says so."""
        is_due = self._begin <= done / total < self._end
        if is_due and not self._programs:
            command = [sys.executable, "-c", _SPIN]
            self._programs = [subprocess.Popen(command) for _ in range(_NUM_PROGRAMS)]  # noqa: S603
            time.sleep(_SETTLE_S)
        elif not is_due:
            self.close()

    def close(self) -> None:
        """End the programs."""
        for program in self._programs:
            program.kill()
            program.wait()
        self._programs = []


def start(model: BenchModel, batch: int, begin: float, end: float) -> tuple[StepTimes, float]:
    """Return the step times that an engine measures at its start, and the seconds it takes."""
    settings = EngineSettings(max_num_seqs=batch)
    engine = Engine(model.checkpoint, settings, model=model.create(), device=model.device)
    with closing(Disturbance(begin, end)) as disturbance:
        disturbance.on_progress(0, 1)
        begin_s = time.perf_counter()
        times = engine.warm_up(disturbance.on_progress)
        return times, time.perf_counter() - begin_s


def against(quiet: StepTimes, found: StepTimes, batch: int) -> list[float]:
    """Return how the price of masks is misjudged, for each size of steps that has masks.

    1 is right; at .5, a step with masks seems to take half as much as it does, in comparison with
    the step of a full batch without any.
    """
    counts = [count for count in quiet.positions if count >= batch]
    counts.append(2 * counts[-1])  # larger steps than are timed, as in mode exact
    slower = [found.at(each, 0) / quiet.at(each, 0) for each in counts]
    return [each / slower[0] for each in slower[1:]]


class Start(NamedTuple):
    """Result of a start."""

    seconds: float
    shares: list[float]
    """How its step times misjudge the price of masks; see `against`."""


def _rounds(model: BenchModel, batch: int, rounds: int) -> Iterator[list[Start]]:
    """Yield for each round a start with each disturbance, compared with a quiet start before."""
    for _ in range(rounds):
        quiet, _ = start(model, batch, *QUIET)
        found = [start(model, batch, *span) for span in SPANS]
        yield [Start(seconds, against(quiet, times, batch)) for times, seconds in found]


def _named(begin: float, end: float) -> str:
    if (begin, end) == QUIET:
        return "nothing"
    return f"{begin:.0%} to {end:.0%}" if end < math.inf else f"{begin:.0%} to the end"


def main(
    model: Annotated[str, typer.Argument(help="Size of the random weights, or a config.json.")],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of weights, keys and values.")
    ] = "float32",
    batch: Annotated[int, typer.Option(min=1, help="Most concurrent requests.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Starts with each disturbance.")] = 3,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads; they and other programs share as many cores.")
    ] = 1,
) -> None:
    """Start an engine in turn quietly and disturbed; print medians of all rounds."""
    os.sched_setaffinity(0, range(threads))
    torch.set_num_threads(threads)
    shape = untrained_model(model, getattr(torch, dtype), "cpu", seed=0)
    rows = []
    for span, starts in zip(SPANS, zip(*_rounds(shape, batch, rounds), strict=True), strict=True):
        shares = [each.shares for each in starts]
        rows.append(
            [
                _named(*span),
                f"{statistics.median(each.seconds for each in starts):.1f}",
                f"{statistics.median(map(min, shares)):.2f}",
                f"{statistics.median(map(max, shares)):.2f}",
            ]
        )
    typer.echo(markdown(["busy during", "start, s", "masks' steps, least", "largest"], rows))


if __name__ == "__main__":
    typer.run(main)
