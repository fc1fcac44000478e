"""Carries progress from the training workers to the terminal of whoever started the run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from rich.console import Console

from mars_platform.progress import progress_display

_POLL_S = 0.5


@dataclass(frozen=True)
class Progress:
    """Where a stage stands."""

    stage: str
    step: int
    total_steps: int
    loss: float
    tokens_per_s: float


class ProgressBoard:
    """Holds the newest progress; the worker of rank 0 writes it, the driver reads it."""

    def __init__(self) -> None:
        self._latest: Progress | None = None

    def post(self, progress: Progress) -> None:
        """Replace what is shown."""
        self._latest = progress

    def read(self) -> Progress | None:
        """The newest progress, or None before the first step."""
        return self._latest


@contextmanager
def shown_progress(console: Console) -> Iterator[ActorHandle[Any]]:
    """A board whose content is shown on the console for the length of the block."""
    board = ray.remote(num_cpus=0)(ProgressBoard).remote()
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(board, console, stop), name="progress")
    thread.start()
    try:
        yield board
    finally:
        stop.set()
        thread.join()
        ray.kill(board)


def _follow(board: ActorHandle[Any], console: Console, stop: threading.Event) -> None:
    with console.status("starting the workers"):
        while ray.get(board.read.remote()) is None and not stop.wait(_POLL_S):
            pass
    with progress_display(console) as display:
        while not stop.wait(_POLL_S):
            _show(ray.get(board.read.remote()), display)
        _show(ray.get(board.read.remote()), display)


def _show(progress: Progress | None, display: Any) -> None:
    if progress is not None:
        detail = f"loss {progress.loss:.4f}  {progress.tokens_per_s:,.0f} tokens/s"
        title = f"stage {progress.stage}"
        display.update(title, progress.step, progress.total_steps, detail)
