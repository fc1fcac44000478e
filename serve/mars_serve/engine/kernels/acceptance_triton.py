"""Triton kernels of the operator in `mars_serve.engine.kernels.acceptance`, which run on GPUs.

The module is imported only where there is a GPU or an interpreter, as Triton comes with the CUDA
builds of torch only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


def propose(logits: Tensor, is_banned: Tensor, measures: Tensor, temperatures: Tensor) -> Tensor:
    """See `mars_serve.engine.kernels.acceptance.propose`."""
    num_reads, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, _BLOCK)
    numbers = torch.empty(4, num_reads, num_blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(num_reads, num_blocks, dtype=torch.int32, device=logits.device)
    proposals = torch.empty(num_reads, 2, dtype=torch.int32, device=logits.device)
    summarize_kernel[(num_blocks, num_reads)](
        logits,
        is_banned,
        temperatures,
        numbers,
        tokens,
        vocabulary,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=True,
    )
    combine_kernel[(num_reads,)](
        numbers,
        tokens,
        measures,
        temperatures,
        proposals,
        num_blocks,
        BLOCK=triton.next_power_of_2(num_blocks),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return proposals


@triton.jit
def summarize_kernel(
    logits: tl.tensor,
    is_banned: tl.tensor,
    temperatures: tl.tensor,
    numbers: tl.tensor,
    tokens: tl.tensor,
    vocabulary: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Summarise a block of one read's logits in each program.

    It stores the highest logit that is not banned, with its token; the highest logit of all other
    tokens; and, relative to the highest of all, the sum of the scaled logits' exponentials and the
    sum of each times its exponential.
    """
    block, read = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    raw = tl.load(logits + read * vocabulary + columns, mask=inside, other=float("-inf"))
    raw = raw.to(tl.float32)
    banned = tl.load(is_banned + columns, mask=inside, other=1).to(tl.int1)
    ordered = tl.where(raw != raw, float("inf"), raw)
    candidates = tl.where(banned, float("-inf"), ordered)
    best = tl.max(candidates, axis=0)
    token = tl.min(tl.where(candidates == best, columns, 2147483647), axis=0)
    other = tl.max(tl.where(columns == token, float("-inf"), ordered), axis=0)
    temperature = tl.load(temperatures + read).to(tl.float32)
    peak = tl.maximum(best, other) / temperature
    # Relative to a peak of -inf everything would be a NaN; such a block holds nothing.
    shifted = raw / temperature - tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(shifted)
    total = tl.sum(weights, axis=0)
    weighted = tl.sum(tl.where(shifted == float("-inf"), 0.0, weights * shifted), axis=0)
    num_blocks, num_reads = tl.num_programs(0), tl.num_programs(1)
    at = read * num_blocks + block
    stride = num_reads * num_blocks
    tl.store(tokens + at, token)
    tl.store(numbers + at, best)
    tl.store(numbers + stride + at, other)
    tl.store(numbers + 2 * stride + at, total)
    tl.store(numbers + 3 * stride + at, weighted)


@triton.jit
def combine_kernel(
    numbers: tl.tensor,
    tokens: tl.tensor,
    measures: tl.tensor,
    temperatures: tl.tensor,
    proposals: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Put the blocks of one read together in each program."""
    read = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_blocks
    at = read * num_blocks + columns
    stride = tl.num_programs(0) * num_blocks
    token = tl.load(tokens + at, mask=inside, other=2147483647)
    best = tl.load(numbers + at, mask=inside, other=float("-inf"))
    other = tl.load(numbers + stride + at, mask=inside, other=float("-inf"))
    total = tl.load(numbers + 2 * stride + at, mask=inside, other=0.0)
    weighted = tl.load(numbers + 3 * stride + at, mask=inside, other=0.0)
    top = tl.max(best, axis=0)
    chosen = tl.min(tl.where(best == top, token, 2147483647), axis=0)
    rest = tl.max(tl.where(token == chosen, other, tl.maximum(best, other)), axis=0)
    temperature = tl.load(temperatures + read).to(tl.float32)
    peak = tl.maximum(top, rest) / temperature
    # An empty block adds nothing; one whose sum is a NaN makes the whole read one.
    shift = tl.where(total == 0.0, 0.0, tl.maximum(best, other) / temperature - peak)
    factor = tl.exp(shift)
    sums = tl.sum(total * factor, axis=0)
    energies = tl.sum(factor * (weighted + shift * total), axis=0)
    log_sum = peak + tl.log(sums)
    probability = tl.exp(top / temperature - log_sum)
    second = tl.exp(rest / temperature - log_sum)
    margin = probability - second
    margin = tl.where(margin < 0.0, 0.0, margin)
    entropy = tl.exp(energies / sums - tl.log(sums))
    entropy = tl.where(entropy > 1.0, 1.0, entropy)
    measure = tl.load(measures + read)
    sure = tl.where(measure == 0, probability, tl.where(measure == 1, margin, entropy))
    tl.store(proposals + read * 2, chosen)
    tl.store(proposals + read * 2 + 1, sure.to(tl.int32, bitcast=True))


torch.library.impl("marsray::propose", "CUDA", propose)
