"""Packed rows as trees: the clean stream of a text is the trunk, and its noisy blocks are branches.

A noisy slot goes on behind what it sees, as in `mars_platform.method.rules.sees`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mars_platform.method.rules import RowSlots, sees
from mars_platform.mixing import tree
from mars_platform.mixing.recurrent import ConvolveCall, ScanCall
from mars_platform.mixing.tree import Chunks
from mars_train.method.layout import PADDING_DOCUMENT

_CHUNK, _CHANNEL_CHUNK = 64, 16
"""Clean tokens of a chunk; fewer where each channel has decays, and so weights of all pairs."""


class RowTrees:
    """Runs the states and convolutions of a model over packed rows, as `Recurrence` says.

    The slots of a text stand side by side, as `mars_train.method.layout.lay_out` has them. Indices
    are made when a layer first asks for them; padding stays apart from everything.
    """

    def __init__(self, slots: RowSlots) -> None:
        row = torch.arange(len(slots.position), device=slots.position.device)[:, None]
        row = row.expand_as(slots.position).flatten()
        self._slots = RowSlots(*(column.flatten() for column in slots))
        document, position, block, noisy = self._slots
        self._num, self._index = len(row), torch.arange(len(row), device=row.device)
        begins = _differs(row) | _differs(document)  # a text
        self._text = begins.cumsum(0) - 1
        begins_stream = begins | _differs(noisy) | (noisy & _differs(block))
        first, first_of_text = (
            torch.where(each, self._index, 0).cummax(0).values for each in (begins_stream, begins)
        )
        # Position of the last clean token that a slot sees; -1 for a block that begins its text.
        self._clean = torch.where(noisy, position[first] - 1, position)
        leaves = torch.where(noisy & (self._clean >= 0), first_of_text + self._clean, self._num)
        parents = torch.where(begins_stream, leaves, self._index - 1)
        self._parents = F.pad(parents, (0, 1), value=self._num)
        self._made: dict[int, Chunks] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scan(self, call: ScanCall) -> Tensor:
        """See `Recurrence`."""
        size = _CHUNK if call.decay.shape[-1] == 1 else _CHANNEL_CHUNK
        if size not in self._made:
            self._made[size] = self._chunks(size)
        return tree.scan(call, self._made[size])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def convolve(self, call: ConvolveCall) -> Tensor:
        """See `Recurrence`."""
        return tree.convolve(call, self._parents)

    def _chunks(self, size: int) -> Chunks:
        """Cut all texts into chunks of ``size`` clean tokens."""
        used = (self._slots.document != PADDING_DOCUMENT).nonzero().squeeze(1)
        number, text = self._clean[used].clamp(min=0) // size, self._text[used]
        lengths = torch.zeros_like(self._index).scatter_reduce(0, text, number + 1, "amax")
        rank = lengths.argsort(descending=True, stable=True).argsort()  # of each text
        keys, chunk = (number * self._num + rank[text]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        order = chunk.argsort(stable=True)
        used, chunk, counts = used[order], chunk[order], chunk.bincount()
        within = torch.arange(len(used), device=used.device) - (counts.cumsum(0) - counts)[chunk]
        shape = len(keys), int(counts.max())
        places = chunk * shape[1] + within
        table = torch.full((shape[0] * shape[1],), self._num, device=used.device)
        table[places] = used
        table = table.view(shape)
        columns = (F.pad(column, (0, 1), value=PADDING_DOCUMENT)[table] for column in self._slots)
        slots = RowSlots(*columns)
        return Chunks(
            table=table,
            seen=sees(
                RowSlots(*(column[:, :, None] for column in slots)),
                RowSlots(*(column[:, None, :] for column in slots)),
            ),
            trunk=size,
            num_texts=(keys // self._num).bincount().tolist(),
            places=torch.full_like(self._index, table.numel()).scatter(0, used, places),
        )


def _differs(column: Tensor) -> Tensor:
    return F.pad(column[1:] != column[:-1], (1, 0), value=True)
