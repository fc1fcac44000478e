"""Counts of audited outputs: those that were served with several tokens a pass and decoded again.

An output diverges where its first token differs from what mode exact gives. Behind that token the
two cannot be compared, so of each output the tokens up to it are counted. Imports no Ray, torch or
HTTP library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import NamedTuple
from zlib import crc32

from mars_platform.tier import Tier

_STEPS = 100
"""Thresholds are counted in steps of 1 / 100, since each request may give one of its own."""
_ROUNDING = 1e-6
_GROUPS = 64
"""Number of groups of tenants, each of which may double the counts that replicas report."""


class AuditKey(NamedTuple):
    """Tells the counts of audited outputs apart."""

    tier: Tier
    threshold: float
    """τ with which the tokens were served, rounded down to hundredths."""
    is_plain: bool
    """Whether each token was simply the likeliest one, as in the outputs that a frontier counts:
    without temperature, penalties, biases, limits or a grammar."""
    group: int = 0
    """Group of tenants that the outputs are of, see `group_of`."""


@dataclass(frozen=True)
class AuditCounts:
    """Counts of audited outputs since some moment."""

    num_outputs: int = 0
    """Outputs with tokens that were served with this τ and compared."""
    num_tokens: int = 0
    """Tokens of these outputs that were compared, the ones that differ included."""
    num_diverged: int = 0
    """Outputs whose first token that differs was served with this τ."""

    def __add__(self, other: AuditCounts) -> AuditCounts:
        return AuditCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: AuditCounts) -> AuditCounts:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return AuditCounts(*(ours - theirs for ours, theirs in pairs))

    @property
    def is_valid(self) -> bool:
        """Whether the numbers fit together, as they do unless a sender counts wrongly."""
        return min(astuple(self)) >= 0 and self.num_diverged <= self.num_tokens


AuditTally = Mapping[AuditKey, AuditCounts]
"""Counts by tier, τ and kind of sampling."""


@dataclass
class AuditOutcome:
    """One audited output."""

    tier: Tier
    is_plain: bool
    tokens: dict[float, int] = field(default_factory=dict)
    """Tokens that were compared, by the τ below 1 that they were served with."""
    diverged_at: float | None = None
    """τ of the token that differs; None if none does, or if it was served with a τ of 1."""
    group: int = 0
    """Group of its tenant."""

    def counts(self) -> dict[AuditKey, AuditCounts]:
        """Return the outcome as counts."""
        found = dict[AuditKey, AuditCounts]()
        for threshold, num_tokens in self.tokens.items():
            has_diverged = int(threshold == self.diverged_at)
            key = AuditKey(self.tier, rounded_down(threshold), self.is_plain, self.group)
            found[key] = found.get(key, AuditCounts()) + AuditCounts(1, num_tokens, has_diverged)
        return found


def group_of(tenant: str) -> int:
    """Return the group of a tenant, the same in all processes; two seldom share one."""
    return crc32(tenant.encode("utf-8", "replace")) % _GROUPS


def of_all_groups(tally: AuditTally) -> dict[AuditKey, AuditCounts]:
    """Return a tally without regard to groups."""
    found = dict[AuditKey, AuditCounts]()
    for key, counts in tally.items():
        whole = key._replace(group=0)
        found[whole] = found.get(whole, AuditCounts()) + counts
    return found


def rounded_down(threshold: float) -> float:
    """Return τ in hundredths; the smallest that is returned is a hundredth."""
    return max(math.floor(threshold * _STEPS + _ROUNDING), 1) / _STEPS


def added(tally: AuditTally, more: AuditTally) -> dict[AuditKey, AuditCounts]:
    """Return the sum of two tallies."""
    found = dict(tally)
    for key, counts in more.items():
        found[key] = found.get(key, AuditCounts()) + counts
    return found


def since(tally: AuditTally, before: AuditTally) -> dict[AuditKey, AuditCounts]:
    """Return what was counted between another moment and this one, without what did not change.

    Counts that have fallen belong to a counter that was started again, and count whole.
    """
    found = dict[AuditKey, AuditCounts]()
    for key, counts in tally.items():
        new = counts - before.get(key, AuditCounts())
        new = new if new.is_valid else counts
        if new != AuditCounts() and new.is_valid:
            found[key] = new
    return found
