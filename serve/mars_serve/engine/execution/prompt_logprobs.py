"""Log-probabilities of a prompt's own tokens, from the hidden states of a step.

Logits of prompts would take more memory than all else in a step: they are made in parts, of which
only the reported numbers stay. Knows no attention and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from mars_platform.method.rules import log_probabilities
from mars_serve.engine.outputs import TokenLogprob
from mars_serve.engine.sampling.sampler import log_probs_of
from mars_serve.engine.scheduled_row import ScheduledRow

# Logits that exist at once. On a CPU fewer positions would read the output layer more often than
# they compute with it; elsewhere only memory counts.
_MAX_PART_CPU, _MAX_PART = 2**22, 2**24


def positions_at_once(vocabulary: int, device: torch.device) -> int:
    """Positions whose logits may exist at once."""
    most = _MAX_PART_CPU if device.type == "cpu" else _MAX_PART
    return max(1, most // vocabulary)


def next_tokens(works: Sequence[ScheduledRow]) -> list[int]:
    """Of each position that a step scores, in order, the token behind it."""
    return [
        token
        for work in works
        if work.request.scores_prompt
        for token in work.request.tokens[work.scored.start + 1 : work.scored.stop + 1]
    ]


@dataclass(frozen=True)
class PromptScores:
    """What a step's requests want to know of their prompts; it may still be computed."""

    works: Sequence[ScheduledRow]
    """Those that score positions."""
    own: Tensor
    """float32 [scored], log-probability of the token behind each position."""
    top: Tensor
    """int64 [scored, tokens], the likeliest tokens there, likeliest first."""
    values: Tensor
    """float32 [scored, tokens], log-probabilities of those."""

    @classmethod
    def of(
        cls,
        works: Sequence[ScheduledRow],
        hidden: Tensor,
        tokens: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        num_at_once: int,
    ) -> PromptScores:
        """Compute them.

        Args:
            works: of the step.
            hidden: [scored, hidden_size], of the positions that the works score, in order.
            tokens: int64 [scored], what stands behind each.
            logits_of: from hidden states [n, hidden_size] to raw logits [n, vocabulary].
            num_at_once: see `positions_at_once`.
        """
        scoring = [work for work in works if work.request.scores_prompt]
        num_top = max(work.request.options.num_prompt_logprobs or 0 for work in scoring)
        parts = zip(*(torch.split(each, num_at_once) for each in (hidden, tokens)), strict=True)
        found = [
            log_probs_of(log_probabilities(logits_of(states)), following, num_top)
            for states, following in parts
        ]
        own, top, values = (torch.cat(each) for each in zip(*found, strict=True))
        return cls(scoring, own, top, values)

    def by_request(self) -> dict[str, list[TokenLogprob]]:
        """By request id, of the positions that the step scored, in order."""
        lines = zip(self.own.tolist(), self.top.tolist(), self.values.tolist(), strict=True)
        found = {}
        for work in self.works:
            num_top = work.request.options.num_prompt_logprobs
            found[work.request.id] = [
                TokenLogprob(logprob, list(zip(ids, numbers, strict=True))[:num_top], False)
                for logprob, ids, numbers in islice(lines, len(work.scored))
            ]
        return found
