"""Shows progress on standard error: live bars on a terminal, plain lines elsewhere.

Every command that takes more than two seconds shows it here, so that all look alike and standard
output stays free for results. ``NO_COLOR`` is respected.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from mars_platform.cli.report import say

_LINE_INTERVAL_S = 10.0
_PATIENCE_S = 2.0
"""Seconds after which the first line is printed off a terminal."""
_RATE_WINDOW_S = 30.0
"""Seconds over which a rate is averaged."""


class ProgressRate:
    """The rate of a task over the last half minute, and the time that it leaves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen = deque[tuple[float, int]]()

    def words(self, done: int, total: int, to_come: float = 0.0) -> str:
        """Note how many parts are done, and return rate and time left in words; empty at first.

        ``to_come`` is the work that follows this task, as a number of its parts.
        """
        now_s = self._clock()
        self._seen.append((now_s, done))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - _RATE_WINDOW_S:
            self._seen.popleft()
        first_s, first_done = self._seen[0]
        if done <= first_done or now_s <= first_s:
            return ""
        rate = (done - first_done) / (now_s - first_s)
        left = f", {duration((total - done) / rate)} left" if done < total else ""
        in_all = f", {duration((total - done + to_come) / rate)} in all" if to_come else ""
        return f"{rate_words(rate)}{left}{in_all}"


def rate_words(rate: float) -> str:
    """Return a rate with about three digits, by the minute if it is slow."""
    if rate >= 0.5:
        return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"
    return f"{rate * 60:.3g}/min"


def duration(seconds: float) -> str:
    """Return a time as minutes and seconds, or hours and minutes: ``0:05``, ``3 h 20``."""
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600} h {whole % 3600 // 60:02d}"


class ProgressDisplay:
    """Display of the progress of tasks, made by `progress_display`."""

    def __init__(self, console: Console, bar: Progress | None) -> None:
        self._console = console
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}
        self._paces: dict[str, ProgressRate] = {}
        self._last_line: dict[str, tuple[float, int]] = {}
        self._began_s = time.monotonic()

    def update(
        self, title: str, done: int, total: int, detail: str = "", *, to_come: float = 0.0
    ) -> None:
        """Show that ``done`` of ``total`` parts of a task are done; the first call starts it.

        ``detail`` is what else is known, above all the quality so far. ``to_come`` is the work that
        follows this task, as a number of its parts; the time that it takes is told as well.
        """
        pace = self._paces.setdefault(title, ProgressRate()).words(done, total, to_come)
        if self._bar is None:
            self._print_line(title, done, total, ", ".join(filter(None, [detail, pace])))
            return
        if title not in self._tasks:
            self._tasks[title] = self._bar.add_task(title, total=total, pace=pace, detail=detail)
        self._bar.update(self._tasks[title], completed=done, total=total, pace=pace, detail=detail)

    def _print_line(self, title: str, done: int, total: int, detail: str) -> None:
        now_s = time.monotonic()
        first_line_s = self._began_s + _PATIENCE_S - _LINE_INTERVAL_S
        last_s, last_done = self._last_line.get(title, (first_line_s, -1))
        due = now_s - last_s >= _LINE_INTERVAL_S or done == total
        if due and done != last_done:
            self._last_line[title] = (now_s, done)
            say(self._console, f"{title}: {done:,}/{total:,} {detail}".rstrip())


@contextmanager
def progress_display(console: Console | None = None) -> Iterator[ProgressDisplay]:
    """Show live bars, by default on standard error, for the length of the block.

    Off a terminal, a line is printed for each task after two seconds, every ten seconds, and at its
    end.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield ProgressDisplay(console, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[pace]}"),
        TextColumn("{task.fields[detail]}", style="dim"),
    )
    with Progress(*columns, console=console) as bar:
        yield ProgressDisplay(console, bar)


@contextmanager
def working(title: str, console: Console | None = None) -> Iterator[None]:
    """Show for the length of the block what is being done, if it has no parts to count.

    ``title`` names the work, such as ``loading the model``; ``console`` is by default standard
    error. On a terminal, the time so far is shown; elsewhere, a line is printed after two seconds.
    """
    console = console or Console(stderr=True)
    if console.is_terminal:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            bar.add_task(title, total=None)
            yield
        return
    timer = threading.Timer(_PATIENCE_S, say, [console, f"{title} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
