"""Shows progress as live bars on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_INTERVAL_S = 10.0


class ProgressDisplay:
    """Display of the progress of tasks, made by `progress_display`."""

    def __init__(self, console: Console, bar: Progress | None) -> None:
        self._console = console
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, tuple[float, int]] = {}

    def update(self, title: str, done: int, total: int, detail: str = "") -> None:
        """Show that ``done`` of ``total`` parts of a task are done; the first call starts it."""
        if self._bar is None:
            self._print_line(title, done, total, detail)
            return
        if title not in self._tasks:
            self._tasks[title] = self._bar.add_task(title, total=total, detail=detail)
        self._bar.update(self._tasks[title], completed=done, total=total, detail=detail)

    def _print_line(self, title: str, done: int, total: int, detail: str) -> None:
        last_time, last_done = self._last_line.get(title, (0.0, -1))
        due = time.monotonic() - last_time >= _LINE_INTERVAL_S or done == total
        if due and done != last_done:
            self._last_line[title] = (time.monotonic(), done)
            self._console.print(f"{title}: {done}/{total} {detail}".rstrip(), highlight=False)


@contextmanager
def progress_display(console: Console) -> Iterator[ProgressDisplay]:
    """Show live bars for the length of the block, or a line every ten seconds off a terminal."""
    if not console.is_terminal:
        yield ProgressDisplay(console, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
    )
    with Progress(*columns, console=console) as bar:
        yield ProgressDisplay(console, bar)
