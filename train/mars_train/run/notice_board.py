"""Carries news from the training workers to the terminal, and the request to stop back to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from mars_platform.cli.progress import ProgressDisplay, progress_display, working
from mars_platform.cli.report import say
from mars_train.stage.progress import Figures, Progress, TerminalMessage

_POLL_S = 0.5


class NoticeBoard:
    """Actor between the worker of rank 0, which posts, and the driver, which reads."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._messages: list[TerminalMessage] = []
        self._figures: list[Figures] = []
        self._stop = False

    def post(self, progress: Progress) -> None:
        """Replace the progress that is shown."""
        self._progress = progress

    def add_figures(self, figures: list[Figures]) -> None:
        """Add figures of steps."""
        self._figures += figures

    def say(self, message: TerminalMessage) -> None:
        """Add a message."""
        self._messages.append(message)

    def read(self) -> tuple[Progress | None, list[TerminalMessage], list[Figures]]:
        """Return the newest progress, None before the first step, and what was not read yet."""
        messages, self._messages = self._messages, []
        figures, self._figures = self._figures, []
        return self._progress, messages, figures

    def request_stop(self) -> None:
        """Ask the workers to save a checkpoint and end."""
        self._stop = True

    def stop_requested(self) -> bool:
        """Return whether the workers are asked to stop."""
        return self._stop


@contextmanager
def shown_progress(
    console: Console,
    stop_wanted: Callable[[], bool],
    to_come: float,
    send: Callable[[list[Figures]], None],
) -> Iterator[ActorHandle[Any]]:
    """Create a notice board and show its content on the console during the block.

    ``stop_wanted`` is called twice a second; once it returns True, the workers are asked to stop.
    ``to_come`` is the work of the stages that follow, as a multiple of this one's. ``send`` gets
    the figures of all steps.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # Without affinity Ray may place an actor of no CPU on a node that leaves during the run.
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(NoticeBoard).remote()
    ended = threading.Event()
    reader = _BoardReader(board, console, stop_wanted, to_come, send, ended)
    thread = threading.Thread(target=reader.run, name="progress")
    thread.start()
    try:
        yield board
    finally:
        ended.set()
        thread.join()
        ray.kill(board)


@dataclass
class _BoardReader:
    """Reads the board in a thread and shows its content."""

    board: ActorHandle[Any]
    console: Console
    stop_wanted: Callable[[], bool]
    to_come: float
    send: Callable[[list[Figures]], None]
    ended: threading.Event
    _stopping: bool = False

    def run(self) -> None:
        with working("starting the workers", self.console):
            while self._update(None) is None and not self.ended.wait(_POLL_S):
                pass
        with progress_display(self.console) as display:
            while not self.ended.wait(_POLL_S):
                self._update(display)
            self._update(display)

    def _update(self, display: ProgressDisplay | None) -> Progress | None:
        if self.stop_wanted() and not self._stopping:
            self._stopping = True
            text = "stopping: the workers save a checkpoint first; a second Ctrl-C does not wait"
            say(self.console, text)
            ray.get(self.board.request_stop.remote())
        progress: Progress | None
        progress, messages, figures = ray.get(self.board.read.remote())
        self.send(figures)
        for message in messages:
            say_news(self.console, message)
        if progress is not None and display is not None:
            detail = f"loss {progress.loss:.4f}  {progress.tokens_per_s:,.0f} tokens/s"
            title, total = f"stage {progress.stage}", progress.total_steps
            display.update(title, progress.step, total, detail, to_come=self.to_come * total)
        return progress


def say_news(console: Console, message: TerminalMessage) -> None:
    """Print a message, or a warning."""
    text = f"warning: {message.text}" if message.warning else message.text
    say(console, text, style="yellow" if message.warning else "")
