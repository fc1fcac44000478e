"""The layout of a step for states and convolutions, in integers that all layers share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mars_serve.engine.batch import BatchRow, StepBatch

_NARROW = 16
"""Most positions of a row that is padded to a common width with other such rows."""
_MOST_WEIGHTS = 2**25
"""Most weights between two positions that one call computes, unless one row has more."""


Snapshots = tuple[Tensor, Tensor, Tensor]
"""States that a call writes to further slots, int64 [snapshots] each: rows of the call, the last
position in each state or how many entries of the log are, and the slots."""


@dataclass(frozen=True)
class Piece:
    """Positions of some rows that are computed in one call, padded to a rectangle."""

    rows: Tensor | None
    """int64 [rows], rows of the step; None if they are all rows in order."""
    positions: Tensor
    """int64 [rows, width], positions of the step."""
    visible: Tensor
    """bool [rows, width, width]; see `mars_serve.engine.states.tree.Tree`."""
    ends: Tensor
    """int64 [rows], place of each row's last committed token in the piece."""
    snapshots: Snapshots | None


@dataclass(frozen=True)
class StepPlan:
    """The layout of one step."""

    read: Tensor
    """int64 [rows], slots."""
    num_right: Tensor | None
    """int64 [rows], entries of each slot's log that count; None if none does."""
    write: Tensor
    """int64 [rows], slots."""
    snapshots: Snapshots | None
    """Snapshots are here if the state that they take ends within a log."""
    pieces: Sequence[Piece]
    order: Tensor
    """int64 [positions], index of each position in the concatenated outputs of the pieces."""
    drafts: Tensor
    """int64 [rows, log entries], position of each draft."""
    sources: Tensor
    """int64 [kernel, positions], where the inputs of each position's convolution are, its own
    first, among those of the step and, behind them, those of the read slots."""
    kept: Tensor
    """int64 [rows, window], where the inputs are that each written slot keeps."""
    kept_snapshots: tuple[Tensor, Tensor] | None
    """The slot of each snapshot, int64 [snapshots], and as `kept`, int64 [snapshots, kernel - 1].
    """


class Planner:
    """Lays out steps for the states and convolutions of one model."""

    def __init__(
        self, *, kernel: int, num_entries: int, chunk: int, num_weights: int, device: torch.device
    ) -> None:
        """Lay steps out for tensors on a device.

        ``kernel`` is the most positions in a sum of the convolutions, ``chunk`` the most committed
        tokens of a row in one piece, and ``num_weights`` are those between two positions in one
        layer.
        """
        self.kernel, self.num_entries = kernel, num_entries
        self._chunk, self._num_weights, self._device = chunk, num_weights, device

    @property
    def window(self) -> int:
        """Inputs of a convolution that a slot keeps: those before the drafts, and the drafts'."""
        return self.kernel - 1 + self.num_entries

    def plan(self, batch: StepBatch) -> StepPlan:
        """Lay out a step whose rows all say where their states are."""
        num_positions = len(batch.ids)
        rows = [
            _Row(row, self.kernel - 1, num_positions + index * self.window)
            for index, row in enumerate(batch.rows)
        ]
        order = np.zeros(num_positions, dtype=np.int64)
        sources = np.zeros((self.kernel, num_positions), dtype=np.int64)
        for row in rows:
            sources[:, row.start : row.start + row.length] = row.sources(self.kernel)
        states = [row.state for row in rows]
        taken = [(slot, row.before(count)) for row in rows for count, slot in row.state.snapshots]
        logged = [
            (index, count, slot)
            for index, state in enumerate(states)
            for count, slot in state.snapshots
            if count <= state.num_right
        ]
        pieces = list(self._pieces(rows, order))
        has_right = any(state.num_right for state in states)
        return StepPlan(
            read=self._tensor([state.read for state in states]),
            num_right=self._tensor([state.num_right for state in states]) if has_right else None,
            write=self._tensor([state.write for state in states]),
            snapshots=self._tensors(logged),
            pieces=pieces,
            order=self._tensor(order),
            drafts=self._tensor([row.drafts(self.num_entries) for row in rows]),
            sources=self._tensor(sources),
            kept=self._tensor([row.kept(self.window) for row in rows]),
            kept_snapshots=self._tensors(taken),
        )

    def _pieces(self, rows: list[_Row], order: NDArray[np.int64]) -> Iterator[Piece]:
        """Yield the pieces of a step, those with the first tokens first, and note the order."""
        groups = defaultdict[tuple[int, int], list[_Part]](list)
        for index, row in enumerate(rows):
            last = (row.num_tokens - 1) // self._chunk * self._chunk
            for begin in range(0, last, self._chunk):
                groups[0, begin].append(_Part(row, index, begin, self._chunk))
            length = row.length - last
            kind = 0 if length <= _NARROW else (length - 1).bit_length()
            groups[1, kind].append(_Part(row, index, last, length))
        offset = 0
        for _, parts in sorted(groups.items()):
            width = max(part.length for part in parts)
            most = max(1, _MOST_WEIGHTS // (width * width * self._num_weights))
            for first in range(0, len(parts), most):
                some = parts[first : first + most]
                for part in some:
                    begin = part.row.start + part.begin
                    order[begin : begin + part.length] = range(offset, offset + part.length)
                    offset += width
                yield self._piece(some, width, is_all=len(some) == len(rows))

    def _piece(self, parts: list[_Part], width: int, *, is_all: bool) -> Piece:
        place = np.arange(width)
        leading, own = (np.zeros((len(parts), width, 1), dtype=np.int64) for _ in range(2))
        snapshots = []
        for index, (row, _, begin, length) in enumerate(parts):
            seen = slice(begin, begin + length)
            leading[index, :length, 0] = row.leading[seen] - begin
            own[index, :length, 0] = row.own[seen] - begin
            snapshots += [
                (index, end - begin, slot)
                for end, slot in row.snapshots
                if begin <= end < begin + length
            ]
        visible = (place < leading) | ((place >= own) & (place <= place[:, None]))
        starts = [row.start + begin for row, _, begin, _ in parts]
        lengths = [length for *_, length in parts]
        return Piece(
            rows=None if is_all else self._tensor([part.number for part in parts]),
            positions=self._tensor(
                np.array(starts)[:, None] + np.minimum(place, np.array(lengths)[:, None] - 1)
            ),
            visible=torch.from_numpy(visible).to(self._device),
            ends=self._tensor(
                [min(row.num_tokens - begin, length) - 1 for row, _, begin, length in parts]
            ),
            snapshots=self._tensors(snapshots),
        )

    def _tensors(self, found: Sequence[tuple[ArrayLike, ...]]) -> Any:
        return tuple(map(self._tensor, zip(*found, strict=True))) or None

    def _tensor(self, numbers: ArrayLike) -> Tensor:
        return torch.from_numpy(np.asarray(numbers, dtype=np.int64)).to(self._device)


class _Row:
    """A row of a step, and where the inputs of its convolutions are.

    The places of its inputs begin with those of its slot before the row, which the row's follow.
    """

    def __init__(self, row: BatchRow, num_before: int, slot: int) -> None:
        assert row.state is not None, "rows of models with states say where these are"
        self.state, self.start, self.length = row.state, row.start, row.length
        self.num_tokens = row.num_tokens - row.num_drafts
        """Committed tokens of the row."""
        self.leading, self.own = (np.array(each) for each in row.visible())
        self.snapshots = [
            (count - row.state.num_right - 1, slot)
            for count, slot in row.state.snapshots
            if count > row.state.num_right
        ]
        """The last token of each snapshot behind tokens of the row, and its slot."""
        self._written, self._slot, self._before = row.num_tokens, slot, num_before
        self._begin = num_before + row.state.num_right

    def sources(self, kernel: int) -> NDArray[np.int64]:
        """Return where the inputs of the convolution at each position are: [kernel, length]."""
        back, place = np.arange(kernel)[:, None], np.arange(self.length)
        depth = place - self.own
        parent = self.leading + depth - (place < self._written) - back
        return self._inputs(self._begin + np.where(back <= depth, place - back, parent))

    def kept(self, window: int) -> NDArray[np.int64]:
        """Return where the inputs are that the written slot keeps; the last ones do not count."""
        places = self.state.num_right + self.num_tokens + np.arange(window)
        return self._inputs(np.minimum(places, self._begin + self._written - 1))

    def before(self, count: int) -> NDArray[np.int64]:
        """Return where the inputs before a count of right drafts and tokens are."""
        return self._inputs(count + np.arange(self._before))

    def drafts(self, num_entries: int) -> NDArray[np.int64]:
        places = self.num_tokens + np.arange(num_entries)
        return self.start + np.minimum(places, self._written - 1)

    def _inputs(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        own = self.start + places - self._begin
        return np.where(places < self._begin, self._slot + places, own)


class _Part(NamedTuple):
    row: _Row
    number: int
    begin: int
    length: int
