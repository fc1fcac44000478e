"""States and inputs of convolutions, in slots that requests hold between steps.

A slot has, for each recurrent layer, the state behind some tokens of a text, and a log of the
drafts behind these: what each of them has learned. The next step knows how many of them turned out
right, and absorbs these. So drafts are never taken back, and a step that failed is run again as it
was: it reads one slot and writes others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mars_platform.mixing.recurrent import ConvolveCall, ScanCall
from mars_platform.mixing.specs import ConvSpec, ScanSpec
from mars_serve.engine.batch import StepBatch
from mars_serve.engine.states.plan import Planner, StepPlan
from mars_serve.engine.states.tree import absorb, picked, run_tree

_CHUNK = 64
"""Tokens of a prompt between which all weights are computed at once."""
_CHUNK_BY_CHANNEL = 16
"""The same where each channel of the keys has a weight of its own."""


class _Scan(NamedTuple):
    """The slots of one layer's states; float32."""

    states: Tensor
    """[slots, heads, key_dim, value_dim]."""
    keys: Tensor
    """[slots, entries, heads, key_dim], of the log, as the next two."""
    learned: Tensor
    """[slots, entries, heads, value_dim]."""
    decays: Tensor
    """[slots, entries, heads, 1 or key_dim]."""

    def behind(self, slots: Tensor, counts: Tensor) -> Tensor:
        """Return the states behind leading entries of logs: [rows, heads, key_dim, value_dim].

        ``slots`` and ``counts`` of entries are int64 [rows].
        """
        states, keys, learned, decays = (part.index_select(0, slots) for part in self)
        return absorb(states, keys, learned, decays, counts)


class States:
    """The slots of all layers. One behind the last is never written: its states are zeros."""

    def __init__(
        self,
        scans: Sequence[ScanSpec],
        convolutions: Sequence[ConvSpec],
        *,
        num_slots: int,
        num_drafts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Reserve ``num_slots`` slots that may be written, for rows of ``num_drafts`` drafts at
        most.

        ``scans`` and ``convolutions`` are the model's, see `LayerSpecs`; the inputs of the latter
        are kept as ``dtype``.
        """
        by_channel = any(spec.decay_per_channel for spec in scans)
        self.planner = Planner(
            kernel=max((spec.kernel for spec in convolutions), default=1),
            num_entries=num_drafts,
            chunk=_CHUNK_BY_CHANNEL if by_channel else _CHUNK,
            num_weights=max((spec.heads * _rates(spec) for spec in scans), default=1),
            device=device,
        )
        self.num_slots, window = num_slots, self.planner.window
        self.scans = [
            _Scan(
                *(
                    torch.zeros(num_slots + 1, *size, device=device)
                    for size in (
                        (spec.heads, spec.key_dim, spec.value_dim),
                        (num_drafts, spec.heads, spec.key_dim),
                        (num_drafts, spec.heads, spec.value_dim),
                        (num_drafts, spec.heads, _rates(spec)),
                    )
                )
            )
            for spec in scans
        ]
        self.inputs = [
            torch.zeros(num_slots + 1, window, spec.channels, dtype=dtype, device=device)
            for spec in convolutions
        ]
        """Inputs of each convolution, [slots, window, channels]: the last ones before the drafts,
        and those of the drafts."""

    def prepare(self, batch: StepBatch) -> StepStates:
        """Return what the layers of a step call; see `Recurrence`."""
        return StepStates(self, self.planner.plan(batch))


def slot_bytes(
    scans: Sequence[ScanSpec],
    convolutions: Sequence[ConvSpec],
    *,
    num_drafts: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of a slot; see `States`."""
    numbers = sum(
        spec.heads * (spec.key_dim + num_drafts) * spec.value_dim
        + num_drafts * spec.heads * (spec.key_dim + _rates(spec))
        for spec in scans
    )
    window = max((spec.kernel for spec in convolutions), default=1) - 1 + num_drafts
    inputs = window * sum(spec.channels for spec in convolutions)
    return numbers * torch.float32.itemsize + inputs * dtype.itemsize


def _rates(spec: ScanSpec) -> int:
    return spec.key_dim if spec.decay_per_channel else 1


class StepStates:
    """Runs the states of one step; see `Recurrence`."""

    def __init__(self, states: States, plan: StepPlan) -> None:
        """Begin with the first layers."""
        self._scans, self._inputs, self._plan = iter(states.scans), iter(states.inputs), plan

    def scan(self, call: ScanCall) -> Tensor:
        """See `Recurrence.scan`; the one row of the call holds all positions of the step."""
        slots, plan = next(self._scans), self._plan
        state, outputs, learned = self._absorbed(slots), [], []
        for piece in plan.pieces:
            tree = run_tree(_at(call, piece.positions), piece.visible, picked(state, piece.rows))
            after = tree.states_at(piece.ends)
            state = after if piece.rows is None else state.index_copy(0, piece.rows, after)
            if piece.snapshots is not None:
                rows, places, to = piece.snapshots
                slots.states[to] = tree.states_at(places, rows)
            outputs.append(tree.output.transpose(1, 2).flatten(0, 1))
            learned.append(tree.learned.transpose(1, 2).flatten(0, 1))
        slots.states[plan.write] = state
        slots.keys[plan.write] = call.key[0, plan.drafts]
        slots.decays[plan.write] = call.decay[0, plan.drafts]
        slots.learned[plan.write] = torch.cat(learned)[plan.order[plan.drafts]]
        return torch.cat(outputs).index_select(0, plan.order)[None]

    def _absorbed(self, slots: _Scan) -> Tensor:
        """Return the rows' states before the step, and write those that snapshots want."""
        plan = self._plan
        if plan.num_right is None:
            return slots.states.index_select(0, plan.read)
        if plan.snapshots is not None:
            rows, counts, to = plan.snapshots
            slots.states[to] = slots.behind(plan.read[rows], counts)
        return slots.behind(plan.read, plan.num_right)

    def convolve(self, call: ConvolveCall) -> Tensor:
        """See `Recurrence.convolve`; the one row of the call holds all positions of the step."""
        slots, plan = next(self._inputs), self._plan
        table = torch.cat([call.inputs[0], slots.index_select(0, plan.read).flatten(0, 1)])
        output = torch.zeros(call.inputs.shape[1:], device=table.device)
        for back, tap in enumerate(call.weight.flip(1).unbind(1)):
            output += table.index_select(0, plan.sources[back]) * tap.float()
        slots[plan.write] = table[plan.kept]
        if plan.kept_snapshots is not None:
            to, kept = plan.kept_snapshots
            slots[to, : kept.shape[1]] = table[kept]
        return output.to(table.dtype)[None]


def _at(call: ScanCall, positions: Tensor) -> ScanCall:
    """Return what the layer says over positions, [rows, width], of the call's only row."""
    query, key, value, decay = (part[0, positions] for part in call[:4])
    return ScanCall(
        query, key, value, decay, None if call.rate is None else call.rate[0, positions]
    )
