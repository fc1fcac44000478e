"""Tiers of requests: who is served first, and who pays with quality first."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """The tier that a request is served in."""

    PRIORITY = "priority"
    """Served first, and decoded without loss."""
    DEFAULT = "default"
    FLEX = "flex"
    """Served last, and decoded with the lowest threshold."""

    @property
    def rank(self) -> int:
        """The tier's place in the order of service; requests of a higher rank go first."""
        return _RANKS[self]


_RANKS = {Tier.PRIORITY: 1, Tier.DEFAULT: 0, Tier.FLEX: -1}
