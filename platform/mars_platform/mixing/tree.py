"""Recurrences and short convolutions along the paths of trees of positions.

A position sees its ancestors. With A(i) those of i, c_i the sum of the decays along the path to i,
itself included, and w_ij = exp(c_i - c_j)::

    u_i = r_i (v_i - sum of w_ij (k_i . k_j) u_j over j in A(i))      or v_i, if there are no rates
    o_i = sum of w_ij (q_i . k_j) u_j over j in A(i) and i itself

A text is a trunk with branches. Its trunk is cut into chunks, and a branch belongs to the chunk in
which it leaves the trunk, so that what a position sees is the state before its chunk and some of
the chunk's own positions. Imports no Ray or HTTP library.
Source: chunks of the gated delta rule (arXiv 2412.06464, section 3.3), here of trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mars_platform.mixing.recurrent import ConvolveCall, ScanCall


@dataclass(frozen=True)
class Chunks:
    """Positions of several texts by chunk: all first chunks, then all second ones, and so on.

    Texts with more chunks stand before those with fewer.
    """

    table: Tensor
    """int64 [chunks, places], position at each place, those of the trunk first; the number of
    positions stands for none."""
    seen: Tensor
    """bool [chunks, places, places], whether the second is an ancestor of the first or the same.
    Ancestors stand before their descendants."""
    trunk: int
    """Places of the trunk in each chunk that another follows."""
    num_texts: Sequence[int]
    """Texts that have a first chunk, a second one, and so on."""
    places: Tensor
    """int64 [positions], place of each in the flattened table; its size for none."""


def scan(call: ScanCall, chunks: Chunks) -> Tensor:
    """Run a recurrence: [rows, positions, heads, value_dim], zeros at positions in no chunk.

    Nothing is rounded to narrow types, whatever the autocast.
    """
    with torch.autocast(call.value.device.type, enabled=False):
        outputs = _chunked(_placed(call, chunks.table), chunks)  # [chunks, heads, places, ...]
        flat = F.pad(outputs.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 1))
        return flat.index_select(0, chunks.places).view_as(call.value)


def convolve(call: ConvolveCall, parents: Tensor) -> Tensor:
    """Run a convolution over each position and its nearest ancestors: [rows, positions, channels].

    ``parents``, int64 [positions + 1], are the parent of each position; the number of positions
    stands for none, and is its own parent.
    """
    inputs = call.inputs.flatten(0, 1)
    own, *others = call.weight.flip(1).unbind(1)
    outputs, padded, places = inputs * own, F.pad(inputs, (0, 0, 0, 1)), parents[:-1]
    for weight in others:
        outputs = torch.addcmul(outputs, padded.index_select(0, places), weight)
        places = parents[places]
    return outputs.view(call.inputs.shape)


def _placed(call: ScanCall, table: Tensor) -> list[Tensor]:
    """Return query, key, value, decay and rate as [chunks, heads, places, ...], zeros for none."""
    rate = call.query[..., :0] if call.rate is None else call.rate[..., None]
    columns = [call.query, call.key, call.value, call.decay, rate]
    flat = F.pad(torch.cat(columns, dim=-1).flatten(0, 1), (0, 0, 0, 0, 0, 1))
    placed = flat.index_select(0, table.flatten()).view(*table.shape, *flat.shape[1:])
    sizes = [column.shape[-1] for column in columns]
    return list(torch.split(placed.transpose(1, 2).contiguous(), sizes, dim=-1))


def _chunked(placed: Sequence[Tensor], chunks: Chunks) -> Tensor:
    """Return the outputs, [chunks, heads, places, value_dim]."""
    query, key, value, decay, rate = placed
    seen, trunk = chunks.seen[:, None], slice(chunks.trunk)
    # Since the chunk's beginning.
    total = torch.einsum("cij,chjk->chik", chunks.seen.to(decay.dtype), decay)
    reads, *writes = products([query, key] if rate.shape[-1] else [query], key, total, seen)
    whole = decay[:, :, trunk].sum(dim=2, keepdim=True)
    left = (key[:, :, trunk] * (whole - total[:, :, trunk]).exp()).mT
    kept = torch.diag_embed(whole.exp().expand(-1, -1, -1, key.shape[-1]).squeeze(2))
    if not writes:
        states = _states(kept, left @ value[:, :, trunk], chunks.num_texts)
        return reads @ value + (query * total.exp()) @ states
    # The trunk learns by the state before its chunk, which only all earlier chunks together give.
    asked, branches = key * total.exp(), slice(chunks.trunk, None)
    sides = torch.cat([value, asked], dim=-1)[:, :, trunk]
    solved = solve(writes[0][:, :, trunk, trunk], sides, rate[:, :, trunk])
    fresh, erased = torch.split(solved, [value.shape[-1], key.shape[-1]], dim=-1)
    states = _states(kept - left @ erased, left @ fresh, chunks.num_texts)
    learned = fresh - erased @ states
    sides = value[:, :, branches] - asked[:, :, branches] @ states
    sides = sides - writes[0][:, :, branches, trunk] @ learned
    others = solve(writes[0][:, :, branches, branches], sides, rate[:, :, branches])
    return reads @ torch.cat([learned, others], dim=2) + (query * total.exp()) @ states


def solve(writes: Tensor, sides: Tensor, rate: Tensor) -> Tensor:
    """Return the u of ``u_i + r_i * (sum of writes_ij u_j over earlier j) = r_i * sides_i``."""
    system, sides = rate * writes, rate * sides
    solved: Tensor = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    return solved


def products(vectors: Sequence[Tensor], key: Tensor, total: Tensor, seen: Tensor) -> list[Tensor]:
    """Return w_ij (x_i . k_j) for each kind of vectors x, [trees, heads, places, places].

    Args:
        vectors: [trees, heads, places, key_dim] each.
        key: the k, of the same shape.
        total: the c, [trees, heads, places, 1 or key_dim].
        seen: bool [trees, 1, places, places], whether the second is the first or an ancestor of it.
    """
    between = total.unsqueeze(3) - total.unsqueeze(2)
    weight = between.masked_fill(~seen[..., None], -torch.inf).exp()
    if weight.shape[-1] == 1:
        return [(each @ key.mT) * weight.squeeze(-1) for each in vectors]
    keys = key.unsqueeze(2) * weight
    return list((keys @ torch.stack(list(vectors), dim=-2).mT).unbind(-1))


def _states(kept: Tensor, added: Tensor, num_texts: Sequence[int]) -> Tensor:
    """Return the state before each chunk, [chunks, heads, key_dim, value_dim].

    A chunk makes ``kept @ state + added`` of it.
    """
    state = torch.zeros_like(added[: num_texts[0]])
    states, begin = [state], 0
    for num, following in pairwise(num_texts):
        part = slice(begin, begin + following)
        flat = (each.flatten(0, 1) for each in (added[part], kept[part], state[:following]))
        state = torch.baddbmm(*flat).view_as(added[part])
        states.append(state)
        begin += num
    return torch.cat(states)
