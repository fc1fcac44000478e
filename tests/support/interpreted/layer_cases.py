"""Compares the Triton kernels of a layer with their twins.

`main` prints how many cases ran and the largest difference in each type.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from mars_serve.engine.kernels import adapter, adapter_triton, layer, layer_triton

TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3}
KEPT = 7.0
"""Number in pages that nothing writes to."""


class Differences:
    """Counts comparisons, and remembers the largest difference of each type."""

    def __init__(self) -> None:
        self.num_cases = 0
        self.largest: dict[str, float] = defaultdict(float)

    def compare(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        self.num_cases += 1
        for one, other in zip(found, expected, strict=True):
            tolerance = TOLERANCES[other.dtype]
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
            name, difference = str(other.dtype), (one - other).abs().max().item()
            self.largest[name] = max(self.largest[name], difference)


def compare_norms(differences: Differences) -> None:
    for dtype, (positions, size), has_added in itertools.product(
        TOLERANCES, [(1, 32), (3, 48), (5, 896), (2, 1000)], [True, False]
    ):
        residual, added = (torch.randn(positions, size).to(dtype) for _ in range(2))
        weight, results = torch.randn(size).to(dtype), []
        for function in (layer_triton.add_rms_norm, layer.add_rms_norm_twin):
            total = residual.clone()
            normed = function(total, added if has_added else None, weight, 1e-6)
            results.append((total, normed))
        differences.compare(*results)


def compare_rotations(differences: Differences) -> None:
    cases = itertools.product([8, 64, 80, 96, 128], [(2, 1), (4, 4), (6, 2)], [True, False])
    for index, (head_dim, (heads, kv_heads), has_norm) in enumerate(cases):
        dtype = list(TOLERANCES)[(index + index // 2) % 2]
        positions = 5
        merged = torch.randn(positions, (heads + 2 * kv_heads) * head_dim).to(dtype)
        angles = torch.rand(positions, head_dim // 2).repeat(1, 2) * 6
        slots = torch.tensor([9, 0, 11, 4, 11])[:positions]  # the last page takes several
        weights = [torch.randn(head_dim).to(dtype) if has_norm else None for _ in range(2)]
        results = []
        for function in (layer_triton.rotate_and_write, layer.rotate_and_write_twin):
            own = merged.clone()
            pages = [torch.full((4, 3, kv_heads, head_dim), KEPT, dtype=dtype) for _ in range(2)]
            function(own, angles.cos(), angles.sin(), slots, *pages, *weights, 1e-6)
            read = [part.flatten(0, 1)[:11] for part in pages]
            assert all((part[[1, 2, 3, 5, 6, 7, 8, 10]] == KEPT).all() for part in read)
            results.append((own, *read))
        differences.compare(*results)


def compare_activations(differences: Differences) -> None:
    for dtype, positions, size in itertools.product(TOLERANCES, [1, 4], [16, 1024, 1500]):
        merged = torch.randn(positions, 2 * size).to(dtype) * 4
        found = layer_triton.silu_mul(merged)
        differences.compare([found], [layer.silu_mul_twin(merged)])


def compare_adapters(differences: Differences) -> None:
    """Products of ranks above and below a block's; rows without a mask keep their bits."""
    cases = itertools.product([(1, 16), (5, 130), (37, 300)], [1, 16, 100], ["none", "some", "all"])
    for index, ((positions, columns), rank, gate) in enumerate(cases):
        dtype = list(TOLERANCES)[index % 2]
        outputs, inputs = torch.randn(positions, columns), torch.randn(positions, 24)
        outputs[:, 3] = -0.0  # adding zero would change its sign
        down, up = torch.randn(rank, 24) / 24, torch.randn(columns, rank) / rank**0.5
        is_mask = torch.tensor(
            [gate == "all" or (gate == "some" and i % 20 == 4) for i in range(positions)]
        )
        outputs, inputs, down, up = (each.to(dtype) for each in (outputs, inputs, down, up))
        results = []
        for function in (adapter_triton.add_low_rank, adapter.add_low_rank_twin):
            own = outputs.clone()
            function(own, inputs, down, up, is_mask, 2.0)
            assert torch.equal(own[~is_mask], outputs[~is_mask])
            assert torch.equal(own[~is_mask].signbit(), outputs[~is_mask].signbit())
            results.append([own])
        differences.compare(*results)


def main() -> None:
    torch.manual_seed(0)
    differences = Differences()
    compare_norms(differences)
    compare_rotations(differences)
    compare_activations(differences)
    compare_adapters(differences)
    sys.stdout.write(json.dumps([differences.num_cases, differences.largest]) + "\n")
