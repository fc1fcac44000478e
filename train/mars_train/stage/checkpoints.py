"""Checkpoints of a stage in training: all workers save them together, the newest one is loaded."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from mars_platform.checkpoint.manifest import Damaged
from mars_platform.errors import UserError
from mars_train.stage.history import HISTORY_FILE, TrainingHistory, read_history
from mars_train.stage.job import HostConnection, StageJob
from mars_train.stage.parallel import Workers
from mars_train.stage.stored_state import CHECKPOINT_PREFIX, STATE_FILE, refuse_other_run
from mars_train.storage.directories import SaveFailed, Storage
from mars_train.storage.shards import load_shards, save_shards


@dataclass
class TrainingState:
    """Everything that changes from step to step."""

    model: PreTrainedModel
    optimizer: AdamW
    """Optimizer, with its moments already allocated for every parameter that is trained."""
    schedule: LambdaLR
    history: TrainingHistory

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return len(self.history.steps)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is trained, by name and in the same order on every worker.

        These are weights and optimizer moments. Frozen weights are those that the stage begins
        with.
        """
        found = {}
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            found[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{key}.{name}"] = value
        return found


class Checkpoints:
    """The checkpoints of one stage; all workers call every method together."""

    def __init__(
        self, job: StageJob, fingerprint: str, workers: Workers, reporter: HostConnection
    ) -> None:
        self._job, self._fingerprint = job, fingerprint
        self._workers, self._reporter = workers, reporter
        self._storage = Storage(job.storage)

    def save(self, state: TrainingState, *, must_succeed: bool) -> None:
        """Store a checkpoint; if that fails, warn and keep the previous one.

        Raises:
            UserError: saving failed and ``must_succeed`` is set.
        """
        name = f"{CHECKPOINT_PREFIX}{state.step:08d}"
        if name in self._workers.gather(self._storage.names())[0]:
            return
        tensors = state.tensors()

        def write(directory: Path) -> None:
            save_shards(directory, tensors, self._workers.rank, self._workers.num_workers)
            if self._workers.rank == 0:
                self._write_state(state, directory)

        try:
            self._storage.save(name, write, self._workers)
        except SaveFailed as error:
            if must_succeed:
                raise UserError(f"checkpoints.storage: {error}; make room and run again") from error
            self._reporter.say(f"checkpoint skipped: {error}", warning=True)
            return
        if self._workers.rank == 0:
            for old in self._names()[: -self._job.recipe.checkpoints.keep]:
                self._storage.remove(old)
        record = asdict(state.history.steps[-1])
        location = self._storage.path(name)
        self._reporter.report({"step": state.step, **record, "checkpoint": location})

    def load_newest(self, state: TrainingState) -> None:
        """Load the newest intact checkpoint, if there is one, and set damaged ones aside.

        Raises:
            UserError: the checkpoints belong to another run.
        """
        name = self._workers.gather(self._newest_intact() if self._workers.rank == 0 else None)[0]
        if name is None:
            return
        directory = self._storage.fetch(name)
        content = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        location = self._storage.path(name)
        refuse_other_run(self._job.recipe, content, location, fingerprint=self._fingerprint)
        load_shards(directory, state.tensors())
        state.schedule.load_state_dict(content["schedule"])
        rates = state.schedule.get_last_lr()
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state.history = read_history(directory / HISTORY_FILE)
        before, now = content.get("num_workers"), self._workers.num_workers
        change = f", with {now} workers after {before}; the order of the rows is the same"
        text = f"stage {self._job.stage.name}: resumed from {location}"
        self._reporter.say(text + (change if before not in (None, now) else ""))
        self._workers.gather(None)  # some may have fetched for long

    def _names(self) -> list[str]:
        return [name for name in self._storage.names() if name.startswith(CHECKPOINT_PREFIX)]

    def _write_state(self, state: TrainingState, directory: Path) -> None:
        content = {
            "stage": self._job.stage.name,
            "step": state.step,  # with the seed this also gives the data position and random state
            "num_workers": self._workers.num_workers,  # may change, as the step's rows do not
            "data_fingerprint": self._fingerprint,
            "schedule": state.schedule.state_dict(),
            "recipe": self._job.recipe.model_dump(mode="json"),
        }
        text = json.dumps(content, indent=1)
        (directory / STATE_FILE).write_text(text + "\n", encoding="utf-8")
        state.history.write(directory / HISTORY_FILE)

    def _newest_intact(self) -> str | None:
        self._storage.remove_partial()
        for name in reversed(self._names()):
            try:
                self._storage.verify(name)
            except Damaged as error:
                path = self._storage.path(name)
                self._reporter.say(
                    f"checkpoint {path} is damaged and not used: {error}", warning=True
                )
                self._storage.set_aside(name)
            else:
                return name
        return None
