"""Makes one worker's micro-batches of a stage: chooses conversations, lays them out and packs them.

The result is a pure function of the recipe, the step and the worker's rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_train.data.token_store import TokenStore, block_offsets, share, step_rows
from mars_train.method.layout import Batch, Layout, collate, lay_out, pack
from mars_train.recipe import Stage


def num_steps(stage: Stage, num_examples: int) -> int:
    """Return the optimizer steps of a stage; an epoch's incomplete last batch is dropped."""
    steps = num_examples // stage.batch_size * stage.epochs
    return min(steps, stage.max_steps or steps)


@dataclass(frozen=True)
class StageBatches:
    """The micro-batches of one worker."""

    data: TokenStore
    stage: Stage
    seed: int
    rank: int
    num_workers: int
    block_size: int | None
    """B, or None for the clean stream alone."""
    mask_token_id: int
    pad_token_id: int
    multiple_of: int
    """Slots of a row are a multiple of this."""

    def from_step(self, first: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of step ``first``, from 0, and all later ones, a step ahead."""
        total = num_steps(self.stage, len(self.data))
        with ThreadPoolExecutor(1, thread_name_prefix="layout") as executor:
            upcoming: Future[list[Batch]] | None = None
            for step in range(first, total):
                batches = upcoming.result() if upcoming else self._micro_batches(step)
                if step + 1 < total:
                    upcoming = executor.submit(self._micro_batches, step + 1)
                yield batches

    def filler(self) -> Batch:
        """Return a batch without labels, for a worker that has no conversation left."""
        input_ids, supervised = self.data[0]
        unsupervised = np.zeros_like(supervised[:2])
        layout = lay_out(input_ids[:2], unsupervised, self.block_size, self.mask_token_id)
        return self._collate([layout])

    def _micro_batches(self, step: int) -> list[Batch]:
        """Make a step's micro-batches, as many on each worker, because FSDP2 runs in lockstep."""
        epoch, rows = step_rows(len(self.data), self.stage.batch_size, self.seed, step)
        largest_share = -(-self.stage.batch_size // self.num_workers)
        count = -(-largest_share // self.stage.micro_batch_size)
        own = share(rows, self.rank, self.num_workers)
        return [self._batch(part, epoch) for part in np.array_split(own, count)]

    def _batch(self, rows: NDArray[np.int64], epoch: int) -> Batch:
        if not len(rows):
            return self.filler()
        offsets = block_offsets(rows, self.seed, epoch, self.block_size or 1)
        layouts = [
            lay_out(
                *self.data[int(row)],
                self.block_size,
                self.mask_token_id,
                block_offset=int(offset),
            )
            for row, offset in zip(rows, offsets, strict=True)
        ]
        return self._collate(layouts)

    def _collate(self, layouts: list[Layout]) -> Batch:
        rows = pack(layouts, self.stage.row_slots, multiple_of=self.multiple_of)
        return collate(rows, self.pad_token_id, multiple_of=self.multiple_of)
