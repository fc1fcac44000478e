"""The integers that describe a step to the device, which they reach in one transfer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_serve.engine.batch import StepBatch
from mars_serve.engine.execution.proposals import Reads

Part = TypeVar("Part", NDArray[np.int64], Tensor)


class StepInput(NamedTuple, Generic[Part]):
    """Parts of a step's integers, on the host or on the device."""

    ids: Part
    """[positions], token ids."""
    position_ids: Part
    """[positions]."""
    reads: Part
    """[reads], positions whose logits are read."""
    measures: Part
    """[reads], see `Reads`."""
    temperatures: Part
    """[reads], bits of the float64 numbers, see `Reads`; 1 where it has none."""
    scored: Part
    """[scored], positions of prompt tokens whose next token's log-probability is reported."""
    next_tokens: Part
    """[scored], these next tokens."""
    attention: Part
    """Attention metadata, as its backend packs it."""
    states: Part
    """The layout of recurrent layers, see `PackedStates`."""
    slots: Part
    """[positions], see `StepBatch`; empty in a step in which no LoRA adapter acts."""


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the parts of a step's integers."""

    num_positions: int
    num_reads: int
    num_scored: int
    num_attention: int
    num_states: int = 0
    num_slots: int = 0
    """Number of positions if LoRA adapters act in the step, else 0."""

    @property
    def total(self) -> int:
        """Number of all integers."""
        return sum(self.parts)

    @property
    def parts(self) -> list[int]:
        """Integers of each part, in the order of `StepInput`."""
        positions, reads, scored = self.num_positions, self.num_reads, self.num_scored
        mixing = [self.num_attention, self.num_states]
        return [positions, positions, reads, reads, reads, scored, scored, *mixing, self.num_slots]

    def on_host(self, numbers: Tensor) -> StepInput[NDArray[np.int64]]:
        """Return the parts as arrays that share the memory of int64 [total] on the host."""
        array, ends = numbers.numpy(), accumulate(self.parts, initial=0)
        return StepInput(*(array[begin:end] for begin, end in pairwise(ends)))

    def on_device(self, numbers: Tensor) -> StepInput[Tensor]:
        """Return the parts as views of int64 [total]."""
        return StepInput(*torch.split(numbers, self.parts))


def fill(
    parts: StepInput[NDArray[np.int64]],
    batch: StepBatch,
    reads: Reads | None,
    next_tokens: Sequence[int],
) -> None:
    """Write a step's integers but those of attention and states; padded reads read position 0.

    ``parts`` are at least as long as needed; ``next_tokens`` are those behind scored positions.
    """
    parts.ids[:], parts.position_ids[:] = batch.ids, batch.position_ids
    parts.scored[:], parts.next_tokens[:] = batch.scored, next_tokens
    parts.slots[:] = -1 if batch.slots is None else batch.slots
    positions = batch.reads
    num_reads = len(positions)
    assert num_reads <= len(parts.reads), "the step fits its shape"
    parts.reads[:num_reads], parts.reads[num_reads:] = positions, 0
    parts.measures[:], parts.temperatures[:] = 0, np.float64(1.0).view(np.int64)
    if reads is not None:
        parts.measures[:num_reads] = reads.measures.numpy()
        if reads.temperatures is not None:
            parts.temperatures[:num_reads] = reads.temperatures.numpy().view(np.int64)
