"""The operators that run states and convolutions of a step's rows from slots, with their twins.

Integers on the device say what the rows are, so that a captured graph takes any layout of rows. The
twins in plain torch run a row token by token, as the Triton kernels do: slowly, and as their
oracle. Slots are those of `mars_serve.engine.states.slots`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW_FIELDS = 8
"""Integers of a row before those of its groups of masks: its first position; its committed tokens,
0 for padding; its drafts; the slot that it reads; the entries of that slot's log that count; the
slot that it writes; its first snapshot and the one behind its last. The number of masks behind
each number of drafts follows."""
SNAPSHOT_FIELDS = 2
"""Integers of a snapshot: how many entries of the log and tokens of the row it is behind, and its
slot."""


def scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    states: Tensor,
    keys: Tensor,
    learned: Tensor,
    decays: Tensor,
    rows: Tensor,
    snapshots: Tensor,
) -> Tensor:
    """Run one layer's states over a step, from the slots that its rows read to others.

    All numbers are float32, and all tensors contiguous.

    Args:
        query: [positions, heads, key_dim]; see `ScanCall`, as for the next.
        key: [positions, heads, key_dim].
        value: [positions, heads, value_dim].
        decay: [positions, heads, 1 or key_dim].
        rate: [positions, heads]; None for a state to which values are added.
        states: [slots, heads, key_dim, value_dim], written.
        keys: [slots, entries, heads, key_dim], of the log, written as the next two are.
        learned: [slots, entries, heads, value_dim].
        decays: [slots, entries, heads, 1 or key_dim].
        rows: int64 [rows, ROW_FIELDS + entries + 1]; no row reads a slot that is written.
        snapshots: int64 [snapshots, SNAPSHOT_FIELDS].

    Returns:
        [positions, heads, value_dim]; 0 for padding.
    """
    output: Tensor = torch.ops.marsray.scan.default(
        *(query, key, value, decay, rate, states, keys, learned, decays, rows, snapshots)
    )
    return output


def scan_twin(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor | None,
    states: Tensor,
    keys: Tensor,
    learned: Tensor,
    decays: Tensor,
    rows: Tensor,
    snapshots: Tensor,
) -> Tensor:
    """See `scan`."""
    call, output = (query, key, value, decay, rate), torch.zeros_like(value)
    for fields in rows[rows[:, 1] > 0].tolist():
        start, num_tokens, num_drafts, read, num_right, write, first, end, *masks = fields
        taken, state = snapshots[first:end], states[read]
        for count in range(1, num_right + num_tokens + 1):
            if count <= num_right:
                logged = keys[read, count - 1, ..., None] * learned[read, count - 1, :, None]
                state = state * decays[read, count - 1].exp()[..., None] + logged
            else:
                state, _ = _step(call, output, state, start + count - num_right - 1)
            states[taken[taken[:, 0] == count, 1]] = state
        states[write] = state
        draft, mask = start + num_tokens, start + num_tokens + num_drafts
        for outcome, num_masks in enumerate(masks[: num_drafts + 1]):
            if outcome:
                state, learned[write, outcome - 1] = _step(call, output, state, draft)
                keys[write, outcome - 1], decays[write, outcome - 1] = key[draft], decay[draft]
                draft += 1
            branch = state
            for at in range(mask, mask + num_masks):
                branch, _ = _step(call, output, branch, at)
            mask += num_masks
    return output


def _step(
    call: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    output: Tensor,
    state: Tensor,
    at: int,
) -> tuple[Tensor, Tensor]:
    """Write a position's output; return the state behind it, and what it has learned there."""
    query, key, value, decay, rate = call
    state, learned = state * decay[at].exp()[..., None], value[at]
    if rate is not None:
        learned = rate[at, :, None] * (learned - (key[at, :, None] @ state)[:, 0])
    state = state + key[at, ..., None] * learned[:, None]
    output[at] = (query[at, :, None] @ state)[:, 0]
    return state, learned


def convolve(
    inputs: Tensor,
    weight: Tensor,
    slots: Tensor,
    sources: Tensor,
    kept: Tensor,
    rows: Tensor,
    snapshots: Tensor,
    kept_snapshots: Tensor,
) -> Tensor:
    """Convolve in one layer over a step, and keep inputs in slots for the next.

    Sources are indices into the inputs of the step and, behind them, those of all slots. All
    tensors are contiguous.

    Args:
        inputs: [positions, channels].
        weight: [channels, kernel]; the last acts on the position itself.
        slots: [slots, window, channels], of the type of the inputs; written.
        sources: int64 [positions, at least kernel], its own input first, then those before it.
        kept: int64 [rows, window], sources of what each row's slot keeps.
        rows: see `scan`, as for the next.
        snapshots: the slots whose beginnings are written as well.
        kept_snapshots: int64 [snapshots, places], sources of these beginnings.

    Returns:
        float32 [positions, channels].
    """
    output: Tensor = torch.ops.marsray.convolve.default(
        *(inputs, weight, slots, sources, kept, rows, snapshots, kept_snapshots)
    )
    return output


def convolve_twin(
    inputs: Tensor,
    weight: Tensor,
    slots: Tensor,
    sources: Tensor,
    kept: Tensor,
    rows: Tensor,
    snapshots: Tensor,
    kept_snapshots: Tensor,
) -> Tensor:
    """See `convolve`."""
    table = torch.cat([inputs, slots.flatten(0, 1)])
    taps = weight.float().flip(1).T  # [kernel, channels]
    output = (table[sources[:, : len(taps)]].float() * taps).sum(1)
    is_used = rows[:, 1] > 0
    slots[rows[is_used, 5]] = table[kept[is_used]]
    used = int(rows[:, 7].max())
    slots[snapshots[:used, 1], : kept_snapshots.shape[1]] = table[kept_snapshots[:used]]
    return output


def _like_value(_: Tensor, __: Tensor, value: Tensor, *___: object) -> Tensor:
    return torch.empty_like(value)


def _like_inputs(inputs: Tensor, *_: object) -> Tensor:
    return torch.empty_like(inputs, dtype=torch.float32)


torch.library.define(
    "marsray::scan",
    "(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? rate, Tensor(a!) states, "
    "Tensor(b!) keys, Tensor(c!) learned, Tensor(d!) decays, Tensor rows, Tensor snapshots) "
    "-> Tensor",
)
torch.library.impl("marsray::scan", "CPU", scan_twin)
torch.library.register_fake("marsray::scan", _like_value)
torch.library.define(
    "marsray::convolve",
    "(Tensor inputs, Tensor weight, Tensor(a!) slots, Tensor sources, Tensor kept, Tensor rows, "
    "Tensor snapshots, Tensor kept_snapshots) -> Tensor",
)
torch.library.impl("marsray::convolve", "CPU", convolve_twin)
torch.library.register_fake("marsray::convolve", _like_inputs)
