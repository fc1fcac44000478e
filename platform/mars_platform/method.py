"""The MARS method as pure functions: blocks, visibility, confidence and the acceptance rule.

Knows tensors and nothing else: no model, no cache, no data format. The source of every rule is
the MARS paper (arXiv 2604.07023); section numbers stand beside each function.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visibility(document: Tensor, position: Tensor, block: Tensor, noisy: Tensor) -> Tensor:
    """Which keys each query of a packed training row may see (section 3.2 of the paper).

    Clean tokens see clean tokens causally. Noisy tokens see the noisy tokens of their own block
    causally and the clean tokens of strictly earlier blocks. Nothing crosses a document.

    Args:
        document: int [rows, slots], which sequence a slot belongs to; padding has a number of
            its own, so that it sees only padding and no row of the result is empty.
        position: int [rows, slots], position ids, the same for a clean token and its noisy copy.
        block: int [rows, slots], number of the block that holds the position.
        noisy: bool [rows, slots], whether a slot belongs to the noisy stream.

    Returns:
        bool [rows, slots (query), slots (key)], true where the query may see the key.
    """
    query, key = (slice(None), slice(None), None), (slice(None), None, slice(None))
    causal = position[key] <= position[query]
    same_stream = noisy[query] == noisy[key]
    same_block = block[query] == block[key]
    within_stream = same_stream & causal & (~noisy[query] | same_block)
    noisy_to_clean = noisy[query] & ~noisy[key] & (block[key] < block[query])
    return (document[query] == document[key]) & (within_stream | noisy_to_clean)


def confidence(logits: Tensor, tokens: Tensor) -> Tensor:
    """Probability of each token at temperature 1 from the raw logits (section 3.3).

    Args:
        logits: float [..., vocabulary], as the model returned them.
        tokens: int [...], the tokens that would be emitted.

    Returns:
        float32 [...], in [0, 1].
    """
    scores = logits.float()
    chosen = scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (chosen - scores.logsumexp(-1)).exp()


def num_accepted(confidences: Tensor, thresholds: Tensor, num_proposed: Tensor) -> Tensor:
    """How many proposals of each row are accepted (section 3.3).

        n = 1 + length of the leading run of depths 1, 2, ... with confidence >= threshold

    Depth 0 is the exact AR prediction: it is always accepted and its own confidence never stops
    the run.

    Args:
        confidences: float [rows, depths], depth 0 first; entries past a row's proposals ignored.
        thresholds: float [rows].
        num_proposed: int [rows], proposals of each row, at least 1.

    Returns:
        int64 [rows], between 1 and ``num_proposed``.
    """
    depth = torch.arange(confidences.shape[1], device=confidences.device)
    passes = (confidences >= thresholds[:, None]) & (depth < num_proposed[:, None])
    passes[:, 0] = True
    return passes.long().cumprod(dim=1).sum(dim=1)
