"""Tiers of requests: which are served first, and which give up quality first.

Imports no Ray, torch or HTTP library.
"""

from enum import StrEnum


class Tier(StrEnum):
    """The service tier of a request."""

    PRIORITY = "priority"
    """Served first, and decoded without loss of quality."""
    DEFAULT = "default"
    """Decoded with the threshold that the autoscaler sets."""
    FLEX = "flex"
    """Served last, with lower thresholds than the default tier under load."""

    @property
    def rank(self) -> int:
        """Priority of the tier; requests of a higher rank are served first."""
        return _RANKS[self]


_RANKS = {Tier.PRIORITY: 1, Tier.DEFAULT: 0, Tier.FLEX: -1}
