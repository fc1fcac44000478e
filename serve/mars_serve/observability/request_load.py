"""Counts a replica's requests for its autoscaling.

The counts belong to one event loop; other threads may read them.
"""

from __future__ import annotations

from collections import Counter

from mars_autoscale.policy.lengths import LengthCounter
from mars_autoscale.policy.reports import RequestCounts
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from mars_serve.engine.request import Request


def live_tier(request: Request) -> Tier | None:
    """Return the tier whose live τ decodes a request; None if its own mode or τ does."""
    options = request.options
    is_pinned = options.mode is not Mode.THRESHOLD or options.threshold is not None
    if is_pinned:
        return None
    return Tier.FLEX if options.tier is Tier.FLEX else Tier.DEFAULT


class RequestLoad:
    """Requests that have come to the engine, that wait there and that run."""

    def __init__(self) -> None:
        self._prompt_tokens = self._prefix_hit_tokens = 0
        self._lengths = LengthCounter()
        self._live_tiers = Counter[Tier | None]()
        """Present requests by `live_tier`."""

    @property
    def counts(self) -> RequestCounts:
        """Counts since the replica's start, those that this class keeps."""
        return RequestCounts(self._prompt_tokens, self._prefix_hit_tokens, self._lengths.counts)

    def share(self, tier: Tier | None) -> float:
        """Return the share, 0 to 1, of the present requests that have this `live_tier`."""
        counts = {each: self._live_tiers[each] for each in (None, Tier.DEFAULT, Tier.FLEX)}
        return counts[tier] / max(sum(counts.values()), 1)

    def come(self, request: Request) -> None:
        """Count a request that is in the engine from now on."""
        self._prompt_tokens += request.num_prompt
        self._lengths.begun(request.options.max_tokens)
        self._live_tiers[live_tier(request)] += 1

    def begun(self, num_prefix_hit_tokens: int) -> None:
        """Count the first output of a request, some of whose prompt tokens were cached."""
        self._prefix_hit_tokens += num_prefix_hit_tokens

    def grown(self, before: int, after: int) -> None:
        """Count the new tokens of an output that had ``before`` and has ``after`` tokens."""
        self._lengths.grown(before, after)

    def gone(self, request: Request, *, has_begun: bool, num_tokens: int) -> None:
        """Count a request that has finished, failed or was cancelled.

        Args:
            request: the request.
            has_begun: whether it had an output.
            num_tokens: number of its output tokens.
        """
        self._live_tiers[live_tier(request)] -= 1
        if has_begun:
            self._lengths.ended(num_tokens)
