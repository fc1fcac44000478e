"""Carries news between the training workers and the terminal of whoever started the run."""

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

from mars_platform.cli.progress import ProgressDisplay, progress_display

_POLL_S = 0.5


@dataclass(frozen=True)
class Progress:
    """Where a stage stands."""

    stage: str
    step: int
    total_steps: int
    loss: float
    tokens_per_s: float


@dataclass(frozen=True)
class Message:
    """Something to tell the user."""

    text: str
    warning: bool


class NoticeBoard:
    """Between the worker of rank 0, which posts, and the driver, which reads and asks to stop."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._messages: list[Message] = []
        self._stop = False

    def post(self, progress: Progress) -> None:
        """Replace the progress that is shown."""
        self._progress = progress

    def say(self, message: Message) -> None:
        """Add a message."""
        self._messages.append(message)

    def read(self) -> tuple[Progress | None, list[Message]]:
        """The newest progress, None before the first step, and the messages since the last read."""
        messages, self._messages = self._messages, []
        return self._progress, messages

    def request_stop(self) -> None:
        """Ask the workers to save a checkpoint and end."""
        self._stop = True

    def stop_requested(self) -> bool:
        """Whether they are asked to."""
        return self._stop


@contextmanager
def shown_progress(
    console: Console, stop_wanted: Callable[[], bool] = lambda: False
) -> Iterator[ActorHandle[Any]]:
    """A board whose content is shown on the console for the length of the block.

    Args:
        console: where to show it.
        stop_wanted: asked twice a second; once it says so, the workers are asked to stop.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # Ray puts what needs no CPU on any node, which may go while the run goes on.
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(NoticeBoard).remote()
    ended = threading.Event()
    follower = _Follower(board, console, stop_wanted, ended)
    thread = threading.Thread(target=follower.run, name="progress")
    thread.start()
    try:
        yield board
    finally:
        ended.set()
        thread.join()
        ray.kill(board)


@dataclass
class _Follower:
    """The thread that shows the board."""

    board: ActorHandle[Any]
    console: Console
    stop_wanted: Callable[[], bool]
    ended: threading.Event
    _stopping: bool = False

    def run(self) -> None:
        with self.console.status("starting the workers"):
            while self._turn(None) is None and not self.ended.wait(_POLL_S):
                pass
        with progress_display(self.console) as display:
            while not self.ended.wait(_POLL_S):
                self._turn(display)
            self._turn(display)

    def _turn(self, display: ProgressDisplay | None) -> Progress | None:
        if self.stop_wanted() and not self._stopping:
            self._stopping = True
            self.console.print("stopping: the workers save a checkpoint first", highlight=False)
            ray.get(self.board.request_stop.remote())
        progress: Progress | None
        progress, messages = ray.get(self.board.read.remote())
        for message in messages:
            text = f"warning: {message.text}" if message.warning else message.text
            self.console.print(
                text,
                style="yellow" if message.warning else "",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        if progress is not None and display is not None:
            detail = f"loss {progress.loss:.4f}  {progress.tokens_per_s:,.0f} tokens/s"
            title = f"stage {progress.stage}"
            display.update(title, progress.step, progress.total_steps, detail)
        return progress
