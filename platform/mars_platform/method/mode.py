"""Decoding modes, confidence measures, and the live parameters, light enough for the command line.

Imports no Ray, torch or HTTP library.
"""

from dataclasses import dataclass
from enum import StrEnum

from mars_platform.errors import UserError
from mars_platform.tier import Tier


class Mode(StrEnum):
    """How a request is decoded."""

    THRESHOLD = "threshold"
    """Several tokens a forward pass, for as long as the model's confidence reaches τ."""
    EXACT = "exact"
    """Several tokens a forward pass, each one verified: the output equals that of ``ar``."""
    AR = "ar"
    """One token a forward pass."""


def default_mode(*, has_masks: bool, has_threshold: bool) -> Mode:
    """Return the mode where none is named: one that loses nothing, unless a τ was named."""
    if has_threshold:
        return Mode.THRESHOLD
    return Mode.EXACT if has_masks else Mode.AR


def check_threshold(name: str, threshold: float) -> None:
    """Refuse a τ that is out of range; ``name`` is that of the field or option."""
    if not 0.0 < threshold <= 1.0:
        raise UserError(f"{name}: {threshold} is not in (0, 1]; 1 is plain AR decoding")


class Confidence(StrEnum):
    """Measure in [0, 1] of how sure the model is of a token that it proposes.

    `mars_platform.method.rules.confidence` defines each of them.
    """

    PROBABILITY = "probability"
    MARGIN = "margin"
    ENTROPY = "entropy"


@dataclass(frozen=True)
class LiveDecoding:
    """How requests in mode threshold that name no τ are decoded right now.

    Autoscaler, replica and engine share it.
    """

    threshold: float
    """τ of tier default, in (0, 1]."""
    flex_threshold: float | None = None
    """τ of tier flex, in (0, 1]; None for the same as tier default."""
    is_exact: bool = False
    """Whether rows at τ = 1 run in mode exact: the same tokens, from fewer and wider passes."""

    def __post_init__(self) -> None:
        for value in (self.threshold, self.threshold_of(Tier.FLEX)):
            check_threshold("confidence_threshold", value)

    def threshold_of(self, tier: Tier) -> float:
        """Return the τ of a tier's requests."""
        if tier is Tier.FLEX and self.flex_threshold is not None:
            return self.flex_threshold
        return self.threshold
