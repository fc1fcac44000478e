"""States run along the paths of a tree of positions, which lie side by side.

A position's ancestors come before it. With cum(i), the sum of the decays on the path to position i,
w(i, j) = exp(cum(i) - cum(j)) for its ancestors j and itself, and 0 otherwise, and the state S
before the tree, what position i learns is

    u(i) = rate(i) * (value(i) - sum over ancestors of w(i, j) (key(i) . key(j)) u(j)
                               - (exp(cum(i)) key(i)) S),

one triangular system for all positions, or its value if states add. Its output is
``(exp(cum(i)) query(i)) S + sum of w(i, j) (query(i) . key(j)) u(j)``.
Sources: gated delta networks (arXiv 2412.06464), trees of state space models (arXiv 2505.14969).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mars_platform.mixing.recurrent import ScanCall
from mars_platform.mixing.tree import products, solve


@dataclass(frozen=True)
class Tree:
    """The results of running states along trees, one tree in each of several rows."""

    state: Tensor
    """[rows, heads, key_dim, value_dim], before the tree."""
    visible: Tensor
    """bool [rows, positions, positions], ancestors of each position and itself."""
    reached: Tensor
    """[rows, heads, positions, 1 or key_dim], cum of each position."""
    key: Tensor
    """[rows, heads, positions, key_dim]."""
    learned: Tensor
    """[rows, heads, positions, value_dim], u of each position."""
    output: Tensor
    """[rows, heads, positions, value_dim]."""

    def states_at(self, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return states behind positions, int64 [n]: [n, heads, key_dim, value_dim].

        ``rows``, int64 [n], are those of the positions; by default there is one in each row.
        """
        parts = self.state, self.visible, self.reached, self.key, self.learned
        state, visible, cum, key, learned = (picked(part, rows) for part in parts)
        each = torch.arange(len(positions), device=positions.device)
        end = cum[each, :, positions, None]
        gaps = (end - cum).masked_fill(~visible[each, positions][:, None, :, None], -torch.inf)
        return _advanced(state, end, key * gaps.exp(), learned)


def run_tree(call: ScanCall, visible: Tensor, state: Tensor) -> Tree:
    """Run states along trees, one in each row of ``call``, [rows, positions, ...]; see `Tree`."""
    query, key, value, decay = (each.transpose(1, 2) for each in call[:4])
    seen = visible[:, None]
    cum = seen.to(decay.dtype) @ decay
    near, learned = cum.exp(), value
    if call.rate is None:
        (reads,) = products([query], key, cum, seen)
        output = (near * query) @ state
    else:
        reads, writes = products([query, key], key, cum, seen)
        both = torch.cat([near * key, near * query], dim=2) @ state  # which is read once
        known, output = both.chunk(2, dim=2)
        learned = solve(writes, value - known, call.rate.transpose(1, 2)[..., None])
    output = output + reads @ learned
    return Tree(state, visible, cum, key, learned, output)


def picked(numbers: Tensor, rows: Tensor | None) -> Tensor:
    """Return some rows of a tensor, or all for None."""
    return numbers if rows is None else numbers.index_select(0, rows)


def absorb(state: Tensor, key: Tensor, learned: Tensor, decay: Tensor, counts: Tensor) -> Tensor:
    """Return states advanced by leading entries of logs: [rows, heads, key_dim, value_dim].

    ``key`` and ``learned`` are [rows, entries, heads, dim], ``decay`` [rows, entries, heads, 1 or
    key_dim]; ``counts``, int64 [rows], are the entries that count.
    """
    places = torch.arange(key.shape[1], device=counts.device)
    unused = (places >= counts[:, None])[:, :, None, None]
    key, learned, decay = (
        each.masked_fill(unused, 0.0).transpose(1, 2) for each in (key, learned, decay)
    )
    cum = decay.cumsum(2)
    end = cum[:, :, -1:]
    return _advanced(state, end, key * (end - cum).exp(), learned)


def _advanced(state: Tensor, decay: Tensor, key: Tensor, learned: Tensor) -> Tensor:
    """Return ``exp(decay) state + key^T learned``, without a copy of the state in between."""
    after = state * decay.exp().mT
    each = after.view(-1, *after.shape[2:])
    each.baddbmm_(key.flatten(0, 1).mT, learned.flatten(0, 1))
    return after
