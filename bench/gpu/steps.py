"""Runs the steps of a part one by one, each with limits of time, and keeps their results in a file.

Imports the standard library alone: what is missing on a machine is said before anything else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PLANNED, RUNNING, DONE, FAILED, LEFT_OUT = "planned", "running", "done", "failed", "left out"
RESTART = 3
"""Exit status of a process whose device is unusable after a failed step; another one goes on."""
_GRACE_S = 10.0

Result = dict[str, Any]


class OutOfTime(BaseException):
    """Ends a step at its limit; no handler of errors in between may take it for one."""


@dataclass
class Setup:
    """The device, the sizes and the objects that all steps of a group share."""

    device: str
    """``cuda`` or ``cpu``."""
    is_tiny: bool
    """Whether sizes are as small as a test takes them."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Objects that one step of a group makes for later ones."""


@dataclass(frozen=True)
class Step:
    """One measurement or check, independent of the others of its group."""

    name: str
    run: Callable[[Setup], Result]
    limit_s: float = 120.0
    """Seconds after which it is ended."""
    needs_s: float = 5.0
    """Seconds without which it is not begun."""


class Results:
    """The results of a part's steps in a JSON file, written anew after each of them.

    Only results of the same sources and machine are kept from an earlier run.
    """

    def __init__(self, path: Path, identity: Result) -> None:
        self._path = path
        self._content: Result = {"identity": identity, "steps": {}}
        earlier = read_results(path)
        if earlier.get("identity") == identity:
            self._content["steps"] = earlier["steps"]

    @property
    def steps(self) -> dict[str, Result]:
        """Return the state and the result of each step, by the step's name."""
        steps: dict[str, Result] = self._content["steps"]
        return steps

    def is_settled(self, name: str, since_s: float) -> bool:
        """Whether a step is done, or has failed or been left out since a time."""
        step = self.steps.get(name, {})
        if step.get("state") == DONE:
            return True
        return step.get("state") in (FAILED, LEFT_OUT) and step["ended_s"] >= since_s

    def enter(self, name: str, **facts: Any) -> None:
        """Replace what is known of a step, and write the file."""
        self.steps[name] = facts
        write_whole(self._path, json.dumps(self._content, indent=1) + "\n")

    def end(self, name: str, state: str, **facts: Any) -> None:
        """Enter the end of a step."""
        self.enter(name, state=state, ended_s=time.time(), **facts)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def run_steps(
    steps: Sequence[Step],
    setup: Setup,
    results: Results,
    *,
    since_s: float,
    deadline_s: float,
    ends_late_steps: bool,
) -> int:
    """Run the steps that are not settled, and return an exit status.

    Args:
        steps: in the order of their worth.
        setup: passed to each step.
        results: where results go.
        since_s: time at which the whole run began: what failed since is not tried again.
        deadline_s: time at which all must have ended.
        ends_late_steps: whether steps are ended at their limit, which takes a process's one timer.
    """
    waiting = [step for step in steps if not results.is_settled(step.name, since_s)]
    for step in waiting:
        results.enter(step.name, state=PLANNED)
    for step in waiting:
        left_s = deadline_s - time.time()
        if left_s < step.needs_s:
            results.end(step.name, LEFT_OUT, reason=f"{left_s:.0f} s were left")
            continue
        limit_s = min(step.limit_s, left_s)
        began_s = time.time()
        results.enter(step.name, state=RUNNING, began_s=began_s, limit_s=limit_s)
        print(f"{step.name}: at most {limit_s:.0f} s", file=sys.stderr, flush=True)
        try:
            with _at_most(limit_s if ends_late_steps else None):
                found = step.run(setup)
            results.end(step.name, DONE, seconds=time.time() - began_s, result=found)
        except (Exception, OutOfTime) as error:
            text = "".join(traceback.format_exception(error))
            results.end(step.name, FAILED, seconds=time.time() - began_s, error=text)
            print(text, file=sys.stderr, flush=True)
        if results.steps[step.name]["state"] == FAILED:
            setup.shared.clear()  # the step may have left it in any state
            if not _device_works(setup):
                return RESTART
    return 0


@contextmanager
def _at_most(seconds: float | None) -> Iterator[None]:
    """Raise `OutOfTime` in the block after some seconds."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"the step took more than {seconds:.0f} s")

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _device_works(setup: Setup) -> bool:
    """Whether a device still computes after a failed step, whose memory is freed."""
    if setup.device != "cuda":
        return True
    import gc

    import torch

    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


# The parent's side


def watch(
    start: Callable[[], Any], results: Callable[[], Results], group: str, deadline_s: float
) -> None:
    """Run a group in processes of its own until all its steps are settled.

    A process that dies or hangs costs the step that it ran; another one goes on with the rest.

    Args:
        start: starts a process, as a `subprocess.Popen`.
        results: reads the results anew.
        group: name for messages.
        deadline_s: time at which all must have ended.
    """
    while time.time() < deadline_s:
        process = start()
        reason = _wait(process, results, deadline_s)
        if reason is None and process.returncode == 0:
            return
        store = results()
        running = [name for name, step in store.steps.items() if step["state"] == RUNNING]
        reason = reason or f"the process ended with status {process.returncode}"
        for name in running:
            store.end(name, FAILED, error=f"{reason}\n")
        if process.returncode != RESTART and not running:
            store.end(f"{group}: process", FAILED, error=f"{reason} before a step began\n")
            break
    store = results()
    for name in [name for name, step in store.steps.items() if step["state"] == PLANNED]:
        store.end(name, LEFT_OUT, reason="the time of the part was over")


def _wait(process: Any, results: Callable[[], Results], deadline_s: float) -> str | None:
    """Wait for a process; return why it was killed, or None if it ended by itself."""
    while process.poll() is None:
        time.sleep(0.2)
        reason, now_s = None, time.time()
        if now_s > deadline_s + _GRACE_S:
            reason = "the time of the part was over"
        for step in results().steps.values():
            if step["state"] == RUNNING and now_s > step["began_s"] + step["limit_s"] + _GRACE_S:
                reason = f"the step hung for more than {step['limit_s']:.0f} s"
        if reason is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return reason
    return None


def read_results(path: Path) -> Result:
    """Return the content of a results file; a missing or damaged one is as good as empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and {"identity", "steps"} <= set(content) else {}
