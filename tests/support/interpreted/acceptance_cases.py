"""Compares the Triton kernels of acceptance with their twin.

`main` prints how many reads were compared and the largest difference of a confidence.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
from torch import Tensor

from mars_platform.method.mode import Confidence
from mars_serve.engine.kernels import acceptance, acceptance_triton

TOLERANCE = 2e-6
NUM_MEASURES = len(Confidence)


class Comparison:
    """Compares proposals, and remembers what it saw."""

    def __init__(self) -> None:
        self.num_reads, self.num_nans, self.largest = 0, 0, 0.0

    def compare(self, logits: Tensor, is_banned: Tensor, temperatures: Tensor) -> None:
        """Compare every read under every measure."""
        measures = torch.arange(NUM_MEASURES).repeat_interleave(len(logits))
        arguments = (
            logits.repeat(NUM_MEASURES, 1),
            is_banned,
            measures,
            temperatures.repeat(NUM_MEASURES),
        )
        before = arguments[0].clone()
        found = acceptance_triton.propose(*arguments)
        assert torch.equal(arguments[0].nan_to_num(), before.nan_to_num()), "logits stay"
        expected = acceptance.propose_twin(*arguments)
        sure, expected_sure = (each[:, 1].view(torch.float32) for each in (found, expected))
        is_sound = ~expected_sure.isnan()
        assert torch.equal(found[is_sound, 0], expected[is_sound, 0])
        assert ((found[:, 0] >= 0) & (found[:, 0] < logits.shape[1])).all()
        torch.testing.assert_close(
            sure, expected_sure, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
        )
        difference = (sure - expected_sure)[is_sound].abs()
        self.num_reads += len(sure)
        self.num_nans += int((~is_sound).sum())
        self.largest = max(self.largest, difference.max().item() if len(difference) else 0.0)


def banned_tokens(vocabulary: int) -> Tensor:
    is_banned = torch.zeros(vocabulary, dtype=torch.bool)
    is_banned[[0, 3, vocabulary - 1]] = True
    return is_banned


def damaged(logits: Tensor) -> Tensor:
    """One read for each way in which logits may be damaged or extreme."""
    reads = logits[:8].clone()
    reads[0, 5] = torch.nan
    reads[1, 3] = torch.nan  # banned
    reads[2, 7] = torch.inf
    reads[3] = -torch.inf
    reads[4, 4:] = -torch.inf  # whole blocks are empty
    reads[5] = 0.0  # every token ties
    reads[6] = -torch.inf
    reads[6, -2] = 1.0  # certain
    reads[7, 3] = 60_000.0  # a banned token has all the share
    return reads


def main() -> None:
    torch.manual_seed(0)
    comparison = Comparison()
    for dtype, vocabulary in itertools.product([torch.float32, torch.float16], [24, 9001]):
        is_banned = banned_tokens(vocabulary)
        logits = (torch.randn(8, vocabulary) * 3).to(dtype)
        ones = torch.ones(len(logits), dtype=torch.float64)
        comparison.compare(logits[:4], is_banned, ones[:4])
        comparison.compare(logits[4:], torch.zeros_like(is_banned), ones[4:] * 0.7)
        comparison.compare(damaged(logits), is_banned, ones * 1.3)
    figures = [comparison.num_reads, comparison.num_nans, comparison.largest]
    sys.stdout.write(json.dumps(figures) + "\n")
