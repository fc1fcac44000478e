"""The operator that proposes a token at each read of a step, with its confidence.

On a GPU it passes over the logits once: each program handles a block of the vocabulary, and a
second, short launch puts the blocks together. The twin in plain torch is the kernel's oracle.
"""

import torch
from torch import Tensor

from mars_platform.method.mode import Confidence
from mars_platform.method.rules import confidence_of, log_probabilities


def propose(logits: Tensor, is_banned: Tensor, measures: Tensor, temperatures: Tensor) -> Tensor:
    """Return the likeliest token that may be emitted at each read, and its confidence.

    Of equal logits the first wins, and a NaN counts as the highest. Confidences are those of
    `mars_platform.method.rules.confidence`, in which banned tokens keep their share.

    Args:
        logits: float [reads, vocabulary], contiguous, any float type.
        is_banned: bool [vocabulary].
        measures: int64 [reads], index of the measure in ``tuple(Confidence)``.
        temperatures: float64 [reads], divisors of the logits for confidences.

    Returns:
        int32 [reads, 2], token and the bits of its float32 confidence.
    """
    proposals: Tensor = torch.ops.marsray.propose.default(logits, is_banned, measures, temperatures)
    return proposals


def propose_twin(
    logits: Tensor, is_banned: Tensor, measures: Tensor, temperatures: Tensor
) -> Tensor:
    """See `propose`."""
    tokens = logits.masked_fill(is_banned, -torch.inf).max(-1).indices
    log_probs = log_probabilities(logits / temperatures.float()[:, None])
    by_measure = torch.stack([confidence_of(log_probs, tokens, each) for each in Confidence])
    confidences = by_measure.gather(0, measures[None])[0]
    return torch.stack([tokens.int(), confidences.view(torch.int32)], dim=1)


def _shape(logits: Tensor, _banned: Tensor, _measures: Tensor, _temperatures: Tensor) -> Tensor:
    return logits.new_empty(len(logits), 2, dtype=torch.int32)


torch.library.define(
    "marsray::propose",
    "(Tensor logits, Tensor is_banned, Tensor measures, Tensor temperatures) -> Tensor",
)
torch.library.impl("marsray::propose", "CPU", propose_twin)
torch.library.register_fake("marsray::propose", _shape)
