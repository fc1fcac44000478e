"""The MARS method as pure functions on tensors: visibility, confidence and the acceptance rule.

The rules are those of the MARS paper (arXiv 2604.07023); section numbers refer to it.
`mars_platform.method.reference` decodes with them step by step. Imports no Ray or HTTP library.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mars_platform.method.mode import Confidence


class RowSlots(NamedTuple):
    """Slots of a packed training row, each one clean or noisy token; the tensors broadcast."""

    document: Tensor
    """int, number of the sequence that a slot belongs to; padding has a number of its own."""
    position: Tensor
    """int, position id; a clean token and its noisy copy have the same."""
    block: Tensor
    """int, number of the block that holds the position: ``(position + offset) // B``."""
    noisy: Tensor
    """bool, whether a slot belongs to the noisy stream, in which response tokens are masks."""


def oldest_visible(position: Tensor, window: int | None, chunk: int | None) -> Tensor | None:
    """Return the oldest position that a layer lets each position see; None if it sees all.

    A layer with a ``window`` sees as many last tokens, itself included; one with a ``chunk`` sees
    those of its own chunk. Masks count by their position, as tokens do.
    """
    if window is not None:
        return position - (window - 1)
    return None if chunk is None else position - position % chunk


def sees(query: RowSlots, key: RowSlots, oldest: Tensor | None = None) -> Tensor:
    """Return whether a query of a packed training row may see a key (section 3.2).

    With position ids p and blocks b, and only within one document::

        clean query, clean key    p_key <= p_query
        noisy query, noisy key    p_key <= p_query  and  b_key == b_query
        noisy query, clean key    b_key < b_query
        clean query, noisy key    never

    A key before ``oldest``, the position of the oldest one that a query's layer lets it see, is
    never seen; None for no such limit.

    Returns:
        bool, of the shape that query and key broadcast to; every slot sees itself.
    """
    same_stream = query.noisy == key.noisy
    causal = key.position <= query.position
    within_stream = same_stream & causal & (~query.noisy | (query.block == key.block))
    noisy_to_clean = query.noisy & ~key.noisy & (key.block < query.block)
    seen = (query.document == key.document) & (within_stream | noisy_to_clean)
    return seen if oldest is None else seen & (key.position >= oldest)


def visibility(document: Tensor, position: Tensor, block: Tensor, noisy: Tensor) -> Tensor:
    """Return the attention mask of packed training rows, by the rule of `sees`.

    All arguments are [rows, slots], integers but for ``noisy``, which is bool. The result is bool
    [rows, slots (query), slots (key)], true where the query may see the key.
    """
    columns = (document, position, block, noisy)
    query = RowSlots(*(column[:, :, None] for column in columns))
    key = RowSlots(*(column[:, None, :] for column in columns))
    return sees(query, key)


def confidence(
    logits: Tensor, tokens: Tensor, measure: Confidence = Confidence.PROBABILITY
) -> Tensor:
    """Return how sure the model is of each token, from the raw logits at temperature 1.

    With ``p = softmax(logits)`` over the whole vocabulary of V tokens, tokens that are never
    emitted included, the confidence of token x is::

        PROBABILITY    p[x]                                        (section 3.3)
        MARGIN         max(0, p[x] - max of p[y] over y != x)      (this project's)
        ENTROPY        exp(-H(p)),  H(p) = -sum of p ln p          (this project's)

    Entropy does not depend on x; n equally likely tokens give 1 / n, however large V is. In every
    measure higher is surer, so that a higher threshold is always the more careful one.

    Args:
        logits: float [..., vocabulary], as the model returned them; at least two tokens.
        tokens: int64 [...], the tokens that would be emitted.
        measure: the measure to compute.

    Returns:
        float32 [...], in [0, 1]; NaN where the logits hold a NaN or +inf, or are all -inf.
    """
    return confidence_of(log_probabilities(logits), tokens, measure)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return log-probabilities at temperature 1: float32 [..., vocabulary]."""
    return logits.log_softmax(-1, dtype=torch.float32)


def confidence_of(log_probabilities: Tensor, tokens: Tensor, measure: Confidence) -> Tensor:
    """Return the same as `confidence`, from ``log_probabilities``, float32 [..., vocabulary]."""
    if measure is Confidence.ENTROPY:
        finite = log_probabilities.clamp(min=torch.finfo(torch.float32).min)  # 0 * -inf is NaN
        negative_entropy: Tensor = torch.linalg.vecdot(log_probabilities.exp(), finite)
        return negative_entropy.exp().clamp(max=1)  # rounding could exceed 1
    chosen = tokens.unsqueeze(-1)
    probability = log_probabilities.gather(-1, chosen).squeeze(-1).exp()
    if measure is Confidence.MARGIN:
        others = log_probabilities.scatter(-1, chosen, -torch.inf).amax(-1)
        return (probability - others.exp()).clamp(min=0)
    return probability


def num_accepted(confidences: Tensor, thresholds: Tensor, num_proposed: Tensor) -> Tensor:
    """Return how many proposals of each row are accepted (section 3.3).

        n = 1 + length of the leading run of depths 1, 2, ... with confidence >= τ

    Depth 0 is the exact AR prediction: it is always accepted, and its own confidence never stops
    the run.

    Args:
        confidences: float [rows, depths], depth 0 first; entries past a row's proposals are
            ignored.
        thresholds: float [rows], τ of each row.
        num_proposed: int [rows], number of proposals of each row, at least 1.

    Returns:
        int64 [rows], between 1 and ``num_proposed``.
    """
    depth = torch.arange(confidences.shape[1], device=confidences.device)
    is_sure = (confidences >= thresholds[:, None]) & (depth < num_proposed[:, None])
    is_sure[:, 0] = True
    return is_sure.long().cumprod(dim=1).sum(dim=1)
