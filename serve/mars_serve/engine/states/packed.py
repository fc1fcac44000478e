"""States of a step whose layout is one array of integers, as a captured graph wants it."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mars_platform.mixing.recurrent import ConvolveCall, ScanCall
from mars_serve.engine.batch import StepBatch
from mars_serve.engine.kernels.recurrence import ROW_FIELDS, SNAPSHOT_FIELDS, convolve, scan
from mars_serve.engine.states.slots import States

Numbers = NDArray[np.int64]


class PackedStates:
    """Runs the slots of `States` by the operators in `kernels.recurrence`."""

    def __init__(self, states: States) -> None:
        """Run states in any layout of rows, on a CPU by the operators' twins."""
        self._states, planner = states, states.planner
        self._before, self._window = planner.kernel - 1, planner.window
        self._row_fields = ROW_FIELDS + planner.num_entries + 1

    def sizes(self, num_positions: int, num_rows: int) -> list[int]:
        """Return the integers of each part of a step of at most so many positions and rows.

        A step writes each slot once, so there are no more snapshots than slots.
        """
        num_slots = self._states.num_slots
        return [
            num_rows * self._row_fields,
            num_slots * SNAPSHOT_FIELDS,
            num_positions * (1 + self._before),
            num_rows * self._window,
            num_slots * self._before,
        ]

    def pack(self, batch: StepBatch, num_positions: int, num_rows: int, numbers: Numbers) -> None:
        """Write a step's layout for `unpack`.

        ``numbers``, int64 [sum of `sizes`], is overwritten.
        """
        numbers.fill(0)
        ends = accumulate(self.sizes(num_positions, num_rows), initial=0)
        parts = (numbers[begin:end] for begin, end in pairwise(ends))
        rows, snapshots, sources, kept, kept_snapshots = parts
        rows, snapshots = rows.reshape(num_rows, -1), snapshots.reshape(-1, SNAPSHOT_FIELDS)
        taken = _fill_rows(batch, rows, snapshots)
        count, rows = snapshots[:taken, 0], rows[: len(batch.rows)].T
        starts, num_tokens, num_drafts, read, num_right, _, first, end = rows[:ROW_FIELDS]
        # Where the input before each row's first one is, behind the right drafts of its slot.
        before = num_positions + read * self._window + self._before + num_right

        def inputs(row: Numbers, place: Numbers) -> Numbers:
            """Return sources by row and place, each [n, width]; places below 0 are in slots."""
            bases: Numbers = np.where(place < 0, before[row, None], starts[row, None])
            return bases + place

        row, last = np.arange(len(batch.rows)), num_tokens + num_drafts - 1
        place = num_tokens[:, None] - self._before + np.arange(self._window)
        kept.reshape(num_rows, -1)[: len(row)] = inputs(row, np.minimum(place, last[:, None]))
        taking = np.repeat(row, end - first)
        place = (count - num_right[taking] - self._before)[:, None] + np.arange(self._before)
        kept_snapshots[: place.size] = inputs(taking, place).ravel()
        row = np.repeat(row, [each.length for each in batch.rows])
        place = (np.arange(batch.num_positions) - starts[row])[:, None]
        leading, own = batch.visible[..., None]
        back, depth = np.arange(1 + self._before), place - own
        parent = leading + depth - (place <= last[row, None]) - back
        found = inputs(row, np.where(back <= depth, place - back, parent))
        sources[: found.size] = found.ravel()

    def unpack(self, numbers: Tensor, num_positions: int, num_rows: int) -> PackedStep:
        """Return what the layers of a step call, by its integers on the device."""
        rows, snapshots, sources, kept, kept_snapshots = torch.split(
            numbers, self.sizes(num_positions, num_rows)
        )
        num_slots = self._states.num_slots
        return PackedStep(
            self._states,
            rows.view(num_rows, self._row_fields),
            snapshots.view(num_slots, SNAPSHOT_FIELDS),
            sources.view(num_positions, 1 + self._before),
            kept.view(num_rows, self._window),
            kept_snapshots.view(num_slots, self._before),
        )


class PackedStep:
    """Runs the states of one step; see `Recurrence`."""

    def __init__(
        self,
        states: States,
        rows: Tensor,
        snapshots: Tensor,
        sources: Tensor,
        kept: Tensor,
        kept_snapshots: Tensor,
    ) -> None:
        """Begin with the first layers; see `kernels.recurrence.scan` and `convolve`."""
        self._scans, self._inputs = iter(states.scans), iter(states.inputs)
        self._rows, self._snapshots = rows, snapshots
        self._sources, self._kept, self._kept_snapshots = sources, kept, kept_snapshots

    def scan(self, call: ScanCall) -> Tensor:
        """See `Recurrence.scan`; the one row of the call holds all positions of the step."""
        query, key, value, decay = (part[0].contiguous() for part in call[:4])
        rate = None if call.rate is None else call.rate[0].contiguous()
        slots = next(self._scans)
        return scan(query, key, value, decay, rate, *slots, self._rows, self._snapshots)[None]

    def convolve(self, call: ConvolveCall) -> Tensor:
        """See `Recurrence.convolve`; the one row of the call holds all positions of the step."""
        slots = next(self._inputs)
        return convolve(
            *(call.inputs[0].to(slots.dtype).contiguous(), call.weight.contiguous(), slots),
            *(self._sources, self._kept, self._rows, self._snapshots, self._kept_snapshots),
        )[None]


def _fill_rows(batch: StepBatch, rows: Numbers, snapshots: Numbers) -> int:
    """Write the integers of rows and snapshots, see `kernels.recurrence`, and count the latter."""
    taken = 0
    for fields, row in zip(rows, batch.rows, strict=False):
        state, num_masks = row.state, len(row.masks)
        assert state is not None, "rows of models with states say where these are"
        first, taken = taken, taken + len(state.snapshots)
        fields[:ROW_FIELDS] = (
            *(row.start, row.num_tokens - row.num_drafts, row.num_drafts),
            *(state.read, state.num_right, state.write, first, taken),
        )
        fields[ROW_FIELDS : ROW_FIELDS + num_masks] = row.masks
        snapshots[first:taken] = np.array(state.snapshots).reshape(-1, SNAPSHOT_FIELDS)
    return taken
