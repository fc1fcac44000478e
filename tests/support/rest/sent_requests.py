"""Requests of a load test that were planned, and that were sent, with made-up times."""

from __future__ import annotations

from array import array
from typing import Any

from mars_platform.tier import Tier
from mars_serve.bench.load.plan import (
    PlannedRequest,
)
from mars_serve.bench.load.send import SentRequest


def planned(index: int = 0, at_s: float = 0.0, **fields: Any) -> PlannedRequest:
    """Return a request with three prompt tokens and four output tokens."""
    return PlannedRequest(index, at_s, fields.pop("tier", Tier.DEFAULT), 3, 4, **fields)


def sent(
    sent_s: float, first_s: float | None, end_s: float | None, tier: str = "default", **fields: Any
) -> SentRequest:
    """Return a request that was sent, with the times that its client saw."""
    at_s = fields.pop("at_s", sent_s)
    request = planned(at_s=at_s, tier=Tier(tier))
    times = array("d", [] if first_s is None else [first_s])
    return SentRequest(request, sent_s, end_s, times, **fields)


def served(sent_s: float, ttft_s: float, e2e_s: float, **fields: Any) -> SentRequest:
    """Return a request that was served, with four tokens in two passes unless told otherwise."""
    known = {"status": 200, "num_tokens": 4, "num_passes": 2, "threshold_mean": 0.9}
    return sent(sent_s, sent_s + ttft_s, sent_s + e2e_s, **{**known, **fields})
