"""Log-probabilities of a prompt's own tokens, from the hidden states of a step.

Logits of whole prompts would take more memory than everything else in a step, so they are computed
in parts, of which only the reported numbers are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from mars_platform.method.rules import log_probabilities
from mars_serve.engine.device.transfer import HostCopy
from mars_serve.engine.outputs import TokenLogprob
from mars_serve.engine.sampling.sampler import log_probs_of
from mars_serve.engine.scheduled_row import ScheduledRow

# Logits that exist at once. On a CPU, fewer positions would spend more time reading the output
# layer than computing with it; on other devices only memory counts.
_MAX_PART_CPU, _MAX_PART = 2**22, 2**24


def positions_at_once(vocabulary: int, device: torch.device) -> int:
    """Return the number of positions whose logits may exist at once."""
    most = _MAX_PART_CPU if device.type == "cpu" else _MAX_PART
    return max(1, most // vocabulary)


def next_tokens(rows: Sequence[ScheduledRow]) -> list[int]:
    """Return the token behind each position that a step scores, in order."""
    return [
        token
        for row in rows
        if row.request.scores_prompt
        for token in row.request.tokens[row.scored.start + 1 : row.scored.stop + 1]
    ]


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of prompt tokens that a step computes."""

    rows: Sequence[ScheduledRow]
    table: HostCopy
    """float64 [scored, 2 + 2 * tokens]: the log-probability of the token behind each position; its
    rank, which is 1 and the number of likelier tokens; the likeliest tokens there, likeliest first;
    and their log-probabilities."""
    num_top: int

    @classmethod
    def of(
        cls,
        rows: Sequence[ScheduledRow],
        hidden: Tensor,
        tokens: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        num_at_once: int,
    ) -> PromptScores:
        """Compute the log-probabilities of a step, and start to copy them to the host.

        ``hidden``, [scored, hidden_size], are hidden states of the positions that ``rows`` score,
        in order, and ``tokens``, int64 [scored], the token behind each. ``logits_of`` makes raw
        logits [n, vocabulary] of hidden states [n, hidden_size]; those of ``num_at_once`` positions
        may exist at once.
        """
        scoring = [row for row in rows if row.request.scores_prompt]
        num_top = max(row.request.options.num_prompt_logprobs or 0 for row in scoring)
        parts = zip(*(torch.split(each, num_at_once) for each in (hidden, tokens)), strict=True)
        found = [
            _scores(log_probabilities(logits_of(states)), following, num_top)
            for states, following in parts
        ]
        return cls(scoring, HostCopy(torch.cat(found)), num_top)

    def by_request(self) -> dict[str, list[TokenLogprob]]:
        """Return the log-probabilities of each request's scored positions, by request id."""
        lines, found = iter(self.table.wait().tolist()), {}
        for row in self.rows:
            num_top = row.request.options.num_prompt_logprobs
            found[row.request.id] = [
                TokenLogprob(
                    own,
                    list(
                        zip(map(int, top[: self.num_top]), top[self.num_top :], strict=True),
                    )[:num_top],
                    False,
                    int(rank),
                )
                for own, rank, *top in islice(lines, len(row.scored))
            ]
        return found


def _scores(table: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Return lines of `PromptScores.table` for ``tokens``, int64 [positions].

    ``table`` has log-probabilities, float32 [positions, vocabulary].
    """
    own, top, values = log_probs_of(table, tokens, num_top)
    rank = 1 + (table > own[:, None]).sum(-1)
    columns = own[:, None], rank[:, None], top, values
    return torch.cat([column.double() for column in columns], dim=1)
