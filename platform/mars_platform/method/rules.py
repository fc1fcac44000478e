"""The MARS method as pure functions: blocks, visibility, confidence and the acceptance rule.

Knows tensors and nothing else: no model, no cache, no data format. The source of the rules is
the MARS paper (arXiv 2604.07023), with section numbers beside them, unless said otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mars_platform.method.mode import Confidence


class Slots(NamedTuple):
    """Slots of a packed training row; the four tensors broadcast against each other."""

    document: Tensor
    """int, which sequence a slot belongs to; padding has a number of its own."""
    position: Tensor
    """int, position ids, the same for a clean token and its noisy copy."""
    block: Tensor
    """int, number of the block that holds the position."""
    noisy: Tensor
    """bool, whether a slot belongs to the noisy stream."""


def sees(query: Slots, key: Slots) -> Tensor:
    """Whether a query of a packed training row may see a key (section 3.2 of the paper).

    Clean tokens see clean tokens causally. Noisy tokens see the noisy tokens of their own block
    causally and the clean tokens of strictly earlier blocks. Nothing crosses a document.

    Returns:
        bool, of the shape that the two broadcast to; every slot sees itself.
    """
    same_stream = query.noisy == key.noisy
    causal = key.position <= query.position
    within_stream = same_stream & causal & (~query.noisy | (query.block == key.block))
    noisy_to_clean = query.noisy & ~key.noisy & (key.block < query.block)
    return (query.document == key.document) & (within_stream | noisy_to_clean)


def visibility(document: Tensor, position: Tensor, block: Tensor, noisy: Tensor) -> Tensor:
    """Which keys each query of packed rows may see, by the rule of :func:`sees`.

    Args:
        document: int [rows, slots].
        position: int [rows, slots].
        block: int [rows, slots].
        noisy: bool [rows, slots].

    Returns:
        bool [rows, slots (query), slots (key)], true where the query may see the key.
    """
    columns = (document, position, block, noisy)
    query = Slots(*(column[:, :, None] for column in columns))
    key = Slots(*(column[:, None, :] for column in columns))
    return sees(query, key)


def confidence(
    logits: Tensor, tokens: Tensor, measure: Confidence = Confidence.PROBABILITY
) -> Tensor:
    """How sure the model is of each token, at temperature 1 and from the raw logits.

    All measures are over the whole vocabulary, tokens that are never emitted included. Higher is
    surer in each, so that a higher threshold is always the more careful one.

    - ``PROBABILITY``: probability of the token (section 3.3).
    - ``MARGIN``: that probability less the highest one of any other token; 0 where another token
      is likelier. This project's own, not the paper's.
    - ``ENTROPY``: ``1 - H / ln V`` with the entropy H in nats over V tokens, whichever token is
      asked for. This project's own, not the paper's.

    Args:
        logits: float [..., vocabulary], as the model returned them; at least two tokens.
        tokens: int64 [...], the tokens that would be emitted.
        measure: what to compute.

    Returns:
        float32 [...], in [0, 1]; NaN where the logits hold a NaN or +inf, or are all -inf.
    """
    return confidence_of(log_probabilities(logits), tokens, measure)


def log_probabilities(logits: Tensor) -> Tensor:
    """Logarithms of the probabilities at temperature 1: float32 [..., vocabulary]."""
    return logits.log_softmax(-1, dtype=torch.float32)


def confidence_of(log_probabilities: Tensor, tokens: Tensor, measure: Confidence) -> Tensor:
    """The measures of :func:`confidence` where the log-probabilities are at hand.

    Args:
        log_probabilities: float32 [..., vocabulary].
        tokens: int64 [...].
        measure: what to compute.

    Returns:
        float32 [...].
    """
    if measure is Confidence.ENTROPY:
        finite = log_probabilities.clamp(min=torch.finfo(torch.float32).min)  # 0 * -inf is NaN
        negative_entropy: Tensor = torch.linalg.vecdot(log_probabilities.exp(), finite)
        return (1 + negative_entropy / math.log(log_probabilities.shape[-1])).clamp(0, 1)
    chosen = tokens.unsqueeze(-1)
    sure = log_probabilities.gather(-1, chosen).squeeze(-1).exp()
    if measure is Confidence.MARGIN:
        others = log_probabilities.scatter(-1, chosen, -torch.inf).amax(-1)
        return (sure - others.exp()).clamp(min=0)
    return sure


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
