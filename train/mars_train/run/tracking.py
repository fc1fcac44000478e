"""Sends the losses and scores of a run to experiment trackers, through those of accelerate.

Trackers run in the driver's process, with the user's environment, and in one thread, so that a slow
server delays neither training nor the request to stop. A resumed run goes on in the same runs of
the trackers, and what was sent once is not sent again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

from accelerate import PartialState
from accelerate import tracking as trackers
from pydantic import Field
from rich.console import Console

from mars_platform.checkpoint.files import replacing
from mars_platform.cli.report import say
from mars_platform.config import Settings, build_settings, read_json
from mars_platform.data.sources import without_passwords
from mars_platform.errors import UserError, one_line
from mars_train.recipe import Recipe, TrackingSettings
from mars_train.run.run_directory import RunDirectory
from mars_train.stage.progress import Figures

_STATE_FILE, _LOGS = "tracking.json", "tracking"
_END_S = 30.0
"""Longest time in seconds that the end of a command waits for its trackers."""

Send = Callable[[Sequence[Figures]], None]
"""Takes the figures of a run's steps, which are counted over all stages."""


class TrackingState(Settings):
    """Content of ``tracking.json``: what the trackers know of a run."""

    run_id: str
    """Name of the run at trackers that take one from their users."""
    mlflow_run_id: str | None = None
    """Name that MLflow gave the run; null before it began."""
    sent: dict[str, int] = Field(default_factory=dict)
    """The newest step with each figure that was sent."""


@contextmanager
def tracked(directory: RunDirectory, console: Console) -> Iterator[Send]:
    """Start the trackers of a run's recipe, and end them after the block.

    Raises:
        UserError: a tracker cannot be started.
    """
    settings = directory.recipe.tracking
    if settings is None:
        yield lambda _: None
        return
    started, waiting = Future[_Run](), SimpleQueue[Sequence[Figures] | None]()

    def work() -> None:
        try:
            started.set_result(_Run.start(directory, settings, console))
        except BaseException as error:
            started.set_exception(error)
            return
        while (figures := waiting.get()) is not None:
            started.result().send(figures)
        started.result().finish()

    # MLflow's runs need one thread, and an executor's would hold up the end of the process
    thread = Thread(target=work, name="tracking", daemon=True)
    thread.start()
    started.result()
    try:
        yield waiting.put
    finally:
        waiting.put(None)
        thread.join(_END_S)
        if thread.is_alive():
            text = f"warning: trackers did not end within {_END_S:g} s; the last figures may lack"
            say(console, text, style="yellow")


@dataclass
class _Run:
    """A run at its trackers; one that fails is left out for the rest of the command."""

    directory: RunDirectory
    console: Console
    state: TrackingState
    running: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, directory: RunDirectory, settings: TrackingSettings, console: Console) -> _Run:
        file = directory.path / _STATE_FILE
        is_new = not file.exists()
        PartialState(cpu=True)  # trackers ask it whether this is the main process
        content: dict[str, Any] = {"run_id": uuid.uuid4().hex[:8]}
        if not is_new:
            content = read_json(file, "remove it, and trackers get a new run")
        state = build_settings(content, TrackingState, source=str(file))
        run = cls(directory, console, state)
        for name in settings.to:
            run._start_one(name, settings, is_new=is_new)
        run._keep_state()
        return run

    def _start_one(self, name: str, settings: TrackingSettings, *, is_new: bool) -> None:
        title = settings.run or self.directory.path.name
        try:
            tracker = self._tracker(name, settings, title)
            tracker.start()
            if is_new and name != "tensorboard":  # it has no place for text
                tracker.store_init_configuration(_flat(self.directory.recipe))
        except Exception as error:  # trackers raise errors of many types
            raise UserError(
                f"tracking.to: {name} cannot be started ({one_line(error)}); set it up, or leave "
                "it out (wandb needs no account with WANDB_MODE=offline)"
            ) from error
        if name == "mlflow":
            found = {"mlflow_run_id": tracker.tracker.info.run_id}
            self.state = self.state.model_copy(update=found)
        self.running[name] = tracker

    def _tracker(self, name: str, settings: TrackingSettings, title: str) -> Any:
        logs, project, tags = self.directory.path / _LOGS, settings.project, list(settings.tags)
        if name == "tensorboard":
            # the file of a command that ended in the same second would be overwritten
            own = {"filename_suffix": f".{uuid.uuid4().hex[:8]}", "flush_secs": 5}
            return trackers.TensorBoardTracker(title, logs, **own)
        if name == "wandb":
            logs.mkdir(exist_ok=True)
            same_run = {"id": self.state.run_id, "resume": "allow"}
            return trackers.WandBTracker(project, name=title, dir=str(logs), tags=tags, **same_run)
        if name == "mlflow":
            return trackers.MLflowTracker(
                experiment_name=project,
                run_name=title,
                run_id=self.state.mlflow_run_id,
                tags=dict.fromkeys(tags, ""),
            )
        unique = f"{title}-{self.state.run_id}"
        return trackers.TrackioTracker(project, name=unique, resume="allow")

    def send(self, figures: Sequence[Figures]) -> None:
        """Send what was not sent before to all trackers."""
        sent = dict(self.state.sent)
        for each in figures:
            new = {key: v for key, v in each.values.items() if each.step > sent.get(key, -1)}
            sent |= dict.fromkeys(new, each.step)
            for name in list(self.running) if new else ():
                self._attempt(name, "log", new, each.step)
        self.state = self.state.model_copy(update={"sent": sent})
        try:
            self._keep_state()
        except OSError as error:  # a resumed run would send figures twice
            for name in list(self.running):
                self._leave_out(name, error)

    def finish(self) -> None:
        for name in list(self.running):
            self._attempt(name, "finish")

    def _attempt(self, name: str, act: str, *arguments: Any) -> None:
        try:
            getattr(self.running[name], act)(*arguments)
        except Exception as error:  # trackers raise errors of many types
            self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        text = f"warning: {name} gets no more figures: {one_line(error)}; training goes on"
        say(self.console, text, style="yellow")
        with suppress(Exception):  # it may be beyond ending, too
            self.running.pop(name).finish()

    def _keep_state(self) -> None:
        with replacing(self.directory.path / _STATE_FILE) as partial:
            partial.write_text(self.state.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _flat(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """Return the recipe's settings by dotted name, without passwords; lists are shown as JSON."""
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, each in value.items():
                add(f"{prefix}.{key}" if prefix else key, each)
        elif value is not None:
            plain = value if isinstance(value, str | int | float) else json.dumps(value)
            found[prefix] = without_passwords(plain) if isinstance(plain, str) else plain

    content = recipe.model_dump(mode="json")
    add("", {**content, "stages": {stage["name"]: stage for stage in content["stages"]}})
    return found
