"""The output directory of a run: its content, its lock, and whether a run in it is resumed.

Imports no Ray or torch.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import yaml

from mars_platform.checkpoint.files import replacing
from mars_platform.config import load_settings
from mars_platform.errors import UserError
from mars_train.data.row_report import REPORT_FILE
from mars_train.recipe import Recipe, TrainedStage
from mars_train.stage.history import HISTORY_FILE, TrainingHistory, read_history

_RECIPE, _LOCK = "recipe.yaml", ".lock"
_LEFT_BY_REFUSALS = {REPORT_FILE, _LOCK}


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run, ``output`` in its recipe.

    It holds the recipe, the token store and its report, and a checkpoint or responses for each
    finished stage. All these are complete or absent.
    """

    recipe: Recipe
    path: Path

    @property
    def model(self) -> Path:
        """Checkpoint of the last stage; it exists once the run is finished."""
        return self.path / "model"

    @property
    def stages(self) -> Path:
        """Directory with one of each finished stage but the last."""
        return self.path / "stages"

    @property
    def new_model(self) -> Path:
        """Checkpoint of a new model, for a recipe that trains from scratch."""
        return self.stages / "start"

    @property
    def data(self) -> Path:
        """Token store; it exists once the data is prepared."""
        return self.path / "data"

    @property
    def report(self) -> Path:
        """List of the training rows that were dropped or cut."""
        return self.path / REPORT_FILE

    @property
    def curves(self) -> Path:
        """Picture of losses and scores."""
        return self.path / "curves.png"

    @property
    def kept_recipe(self) -> Path:
        """Copy of the recipe."""
        return self.path / _RECIPE

    def histories(self) -> dict[str, TrainingHistory]:
        """Return the history of each stage that is trained, by the stage's name and in order."""
        stages = self.recipe.trained_stages
        files = {stage.name: self.trained(stage) / HISTORY_FILE for stage in stages}
        return {name: read_history(file) for name, file in files.items() if file.exists()}

    def trained(self, stage: TrainedStage) -> Path:
        """Return the checkpoint of a stage; it exists once the stage is trained."""
        return self.model if stage == self.recipe.stages[-1] else self.stages / stage.name

    @property
    def is_finished(self) -> bool:
        """Whether the last stage is trained."""
        return self.model.exists()

    def is_resumed(self) -> bool:
        """Return whether the directory holds a run of this recipe, which may be finished.

        Raises:
            UserError: it holds a run of another recipe, or other files, or is a file.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output: {self.path} is a file; name a directory")
        if not self.kept_recipe.exists():
            if (
                self.path.exists()
                and {item.name for item in self.path.iterdir()} - _LEFT_BY_REFUSALS
            ):
                raise UserError(
                    f"output: {self.path} is not empty; name a new directory or remove it"
                )
            return False
        changed = self.recipe.differences(load_settings(self.kept_recipe, Recipe))
        if changed:
            state = "a finished" if self.is_finished else "an unfinished"
            raise UserError(
                f"output: {self.path} holds {state} run of another recipe, which differs in "
                f"{', '.join(changed)}; name a new directory, or take the recipe in "
                f"{self.kept_recipe}"
            )
        return True

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Create and lock the directory during the block."""
        with self._opened_lock() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
            except BlockingIOError as error:
                raise UserError(
                    f"output: another run works in {self.path} at this moment; wait for it, or "
                    "name another directory"
                ) from error
            yield

    def _opened_lock(self) -> IO[str]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return (self.path / _LOCK).open("w")
        except OSError as error:
            raise UserError(
                f"output: {self.path} cannot be written ({error.strerror}); name another directory"
            ) from error

    def keep_recipe(self) -> None:
        """Write the recipe into the directory."""
        text = yaml.safe_dump(self.recipe.model_dump(mode="json"), sort_keys=False)
        with replacing(self.kept_recipe) as partial:
            partial.write_text(text, encoding="utf-8")

    @contextmanager
    def cleared_if_refused(self) -> Iterator[None]:
        """Let a run that is refused in the block, before its data is prepared, be repeated.

        What it has written is removed, but for the report on the data.
        """
        is_prepared = self.data.exists()
        try:
            yield
        except UserError:
            if not is_prepared:
                self._clear()
            raise

    def _clear(self) -> None:
        for item in self.path.iterdir():
            if item.is_dir():
                shutil.rmtree(item)
            elif item.name not in _LEFT_BY_REFUSALS:
                item.unlink()
