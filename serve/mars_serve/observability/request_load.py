"""Counts a replica's requests as its autoscaling needs them. Belongs to one event loop; other
threads may read.
"""

from __future__ import annotations

from collections import Counter

from mars_autoscale.policy.control import Totals
from mars_platform.method.mode import Mode
from mars_platform.tier import Tier
from mars_serve.engine.request import Request


def live_tier(request: Request) -> Tier | None:
    """The tier whose live τ decodes a request; None where its own mode or τ pins it."""
    options = request.options
    is_pinned = options.mode is not Mode.THRESHOLD or options.threshold is not None
    if is_pinned:
        return None
    return Tier.FLEX if options.tier is Tier.FLEX else Tier.DEFAULT


class RequestLoad:
    """What has come, what waits and what is there."""

    def __init__(self) -> None:
        self._arrived = self._prompt_tokens = self._ended = self._output_tokens = 0
        self._live_tiers = Counter[Tier | None]()
        self._waiting = Counter[Tier]()

    @property
    def totals(self) -> Totals:
        """Since the replica's start."""
        return Totals(self._arrived, self._prompt_tokens, self._ended, self._output_tokens)

    def share(self, tier: Tier | None) -> float:
        """The share of the present requests, 0 to 1, whose `live_tier` this is."""
        counts = {each: self._live_tiers[each] for each in (None, Tier.DEFAULT, Tier.FLEX)}
        return counts[tier] / max(sum(counts.values()), 1)

    def num_ahead(self, tier: Tier) -> int:
        """Requests without an output so far that a new one of this tier comes behind."""
        waiting = list(self._waiting.items())
        return sum(count for each, count in waiting if each.rank >= tier.rank)

    def refused(self, request: Request) -> None:
        """A request has arrived, and was sent away."""
        self._arrived += 1
        self._prompt_tokens += request.num_prompt

    def come(self, request: Request) -> None:
        """A request is there."""
        self._arrived += 1
        self._prompt_tokens += request.num_prompt
        self._live_tiers[live_tier(request)] += 1
        self._waiting[request.options.tier] += 1

    def begun(self, request: Request, num_prefix_hit_tokens: int) -> None:
        """It has its first output.

        Args:
            request: which.
            num_prefix_hit_tokens: tokens of its prompt that were found stored.
        """
        self._prompt_tokens -= num_prefix_hit_tokens
        self._waiting[request.options.tier] -= 1

    def gone(self, request: Request, *, has_begun: bool, num_tokens: int) -> None:
        """It is not there any more: it got what it wanted, or was cancelled.

        Args:
            request: which.
            has_begun: whether it had an output.
            num_tokens: of its output.
        """
        self._live_tiers[live_tier(request)] -= 1
        if has_begun:
            self._ended += 1
            self._output_tokens += num_tokens
        else:
            self._waiting[request.options.tier] -= 1
