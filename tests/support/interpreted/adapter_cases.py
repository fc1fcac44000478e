"""Compares the Triton kernel of an adapter with its twin.

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

from mars_serve.engine.kernels import adapter, adapter_triton

TOLERANCES = {torch.float32: 3e-6, torch.float16: 2e-3}


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


def compare_adapters(differences: Differences) -> None:
    """Products of ranks above and below a block's; rows without a mask keep their bits."""
    cases = itertools.product([(1, 16), (5, 130), (37, 300)], [1, 16, 100], ["none", "some", "all"])
    for index, ((positions, columns), rank, gate) in enumerate(cases):
        dtype = list(TOLERANCES)[index % 2]
        outputs, inputs = torch.randn(positions, columns), torch.randn(positions, 24)
        outputs[:, 3] = -0.0  # adding zero would change its sign
        down, up = torch.randn(3, rank, 24) / 24, torch.randn(3, rank, columns) / rank**0.5
        chosen = [gate == "all" or (gate == "some" and i % 20 == 4) for i in range(positions)]
        slots = torch.tensor([2 - i % 3 if each else -1 for i, each in enumerate(chosen)])
        outputs, inputs, down, up = (each.to(dtype) for each in (outputs, inputs, down, up))
        results = []
        for function in (adapter_triton.add_low_rank, adapter.add_low_rank_twin):
            own = outputs.clone()
            function(own, inputs, down, up, slots)
            others = slots == -1
            assert torch.equal(own[others], outputs[others])
            assert torch.equal(own[others].signbit(), outputs[others].signbit())
            results.append([own])
        differences.compare(*results)


def main() -> None:
    torch.manual_seed(0)
    differences = Differences()
    compare_adapters(differences)
    sys.stdout.write(json.dumps([differences.num_cases, differences.largest]) + "\n")
