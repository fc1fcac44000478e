"""Makes one worker's micro-batches of a stage: chooses conversations, lays them out and packs them.

The result is a pure function of the recipe, the step and the worker's rank.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mars_train.data.token_store import (
    TokenStore,
    block_offsets,
    block_sizes,
    share,
    step_rows,
)
from mars_train.method.layout import Batch, Layout, collate, lay_out, pack
from mars_train.recipe import TrainedStage


def num_steps(stage: TrainedStage, num_examples: int) -> int:
    """Return the optimizer steps of a stage; an epoch's incomplete last batch is dropped."""
    steps = num_examples // stage.batch_size * stage.epochs
    return min(steps, stage.max_steps or steps)


@dataclass(frozen=True)
class StageBatches:
    """The micro-batches of one worker."""

    data: TokenStore
    stage: TrainedStage
    seed: int
    rank: int
    num_workers: int
    block_sizes: tuple[int, ...]
    """Sizes of blocks that each conversation's is drawn from; empty for the clean stream alone."""
    mask_token_id: int
    pad_token_id: int
    multiple_of: int
    """Slots of a row are a multiple of this."""
    clean_loss: bool = True
    """Whether the clean stream is trained as well where masks are."""
    responses: TokenStore | None = None
    """Conversations with responses that the model wrote itself, which take the noisy loss from
    ``data``; a row stands for the row of the same number there. None if there are none."""

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
        block_size = max(self.block_sizes, default=None)
        layout = lay_out(input_ids[:2], unsupervised, block_size, self.mask_token_id)
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
        if not self.block_sizes:
            return self._collate(self._clean_layouts(rows))
        if self.responses is None:
            own = self._masked_layouts(self.data, rows, epoch, clean_loss=self.clean_loss)
            return self._collate(own)
        # The numbers of the rows are those of `data`, so sizes and offsets follow from these. A
        # store of fewer responses is gone through again and again.
        written = self._masked_layouts(self.responses, rows, epoch, clean_loss=False)
        return self._collate((self._clean_layouts(rows) if self.clean_loss else []) + written)

    def _clean_layouts(self, rows: NDArray[np.int64]) -> list[Layout]:
        return [lay_out(*self.data[int(row)], None, self.mask_token_id) for row in rows]

    def _masked_layouts(
        self, data: TokenStore, rows: NDArray[np.int64], epoch: int, *, clean_loss: bool
    ) -> list[Layout]:
        sizes = block_sizes(rows, self.seed, epoch, self.block_sizes)
        offsets = block_offsets(rows, self.seed, epoch, sizes)
        return [
            lay_out(
                *data[int(row) % len(data)],
                int(size),
                self.mask_token_id,
                block_offset=int(offset),
                clean_loss=clean_loss,
            )
            for row, size, offset in zip(rows, sizes, offsets, strict=True)
        ]

    def _collate(self, layouts: list[Layout]) -> Batch:
        rows = pack(layouts, self.stage.row_slots, multiple_of=self.multiple_of)
        return collate(rows, self.pad_token_id, multiple_of=self.multiple_of)
