"""The entry point of a Ray Train worker, which connects a stage's trainer to Ray."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import ray
import ray.train
import torch
from ray.actor import ActorHandle

from mars_platform.errors import UserError
from mars_train.recipe import Scaling
from mars_train.stage.job import Notice, StageJob
from mars_train.stage.parallel import Workers
from mars_train.stage.progress import Figures, Progress, StageResult, TerminalMessage
from mars_train.stage.trainer import StageTrainer
from mars_train.storage.directories import fetch_shared

_POST_INTERVAL_S = 0.5
_NOTICE_INTERVAL_S = 2.0


def run_worker(job: StageJob, board: ActorHandle[Any]) -> StageResult:
    """Train a stage; Ray Train calls this on every worker.

    A user's mistake is returned rather than raised, because Ray Train would restart the workers.
    """
    scaling = job.recipe.scaling
    set_threads(scaling)
    workers = Workers(scaling.strategy, use_gpu=scaling.use_gpu, precision=job.recipe.precision)
    reporter = _RayReporter(workers, board)
    try:
        job = replace(job, start=fetch_shared(job.start), data=fetch_shared(job.data))
        trainer = StageTrainer(job, workers, reporter)
        finished = trainer.run()
    except UserError as error:
        return StageResult("refused", reason=str(error))
    return StageResult("finished" if finished else "stopped", trainer.step)


def set_threads(scaling: Scaling) -> None:
    """Give CPU kernels their share of the cores; Ray's default is one thread per worker."""
    share = max(1, (os.cpu_count() or 1) // scaling.most_workers)
    torch.set_num_threads(scaling.threads_per_worker or share)


class _RayReporter:
    """Reports to Ray Train and, on rank 0, to the driver's notice board."""

    def __init__(self, workers: Workers, board: ActorHandle[Any]) -> None:
        self._workers, self._board = workers, board
        self._last_post = self._last_notice = time.monotonic()
        self._saved_for_preemption = False
        self._unposted: list[Figures] = []

    def progress(self, progress: Progress) -> None:
        self._unposted.append(progress.figures)
        now, done = time.monotonic(), progress.step == progress.total_steps
        if done or now - self._last_post >= _POST_INTERVAL_S:
            self._last_post = now
            if self._workers.rank == 0:
                self._board.post.remote(progress)
            self._post_figures()

    def say(self, text: str, *, warning: bool = False) -> None:
        if self._workers.rank == 0:
            ray.get(self._board.say.remote(TerminalMessage(text, warning)))

    def notice_due(self) -> bool:
        due = time.monotonic() - self._last_notice >= _NOTICE_INTERVAL_S
        return self._workers.rank == 0 and due

    def notice(self) -> Notice:
        self._last_notice = time.monotonic()
        preempted = ray.train.get_preemption_info() is not None
        save = preempted and not self._saved_for_preemption
        self._saved_for_preemption = preempted
        stop = self._workers.rank == 0 and ray.get(self._board.stop_requested.remote())
        if save:
            self.say("a node is about to be taken away: saving a checkpoint", warning=True)
        return Notice(save=save, stop=any(self._workers.gather(stop)))

    def report(self, metrics: dict[str, Any]) -> None:
        scores = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if scores:
            self._unposted.append(Figures(metrics["step"], scores))
            self._post_figures()
        ray.train.report(metrics)

    def _post_figures(self) -> None:
        if self._workers.rank == 0:
            self._board.add_figures.remote(self._unposted)
        self._unposted = []
