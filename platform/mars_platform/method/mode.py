"""Decoding modes and confidence measures, light enough to import for the command line.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """How a request is decoded."""

    THRESHOLD = "threshold"
    """Several tokens a forward pass, for as long as the model's confidence reaches τ."""
    EXACT = "exact"
    """Several tokens a forward pass, each one verified: the output equals that of ``ar``."""
    AR = "ar"
    """One token a forward pass."""


class Confidence(StrEnum):
    """Measure in [0, 1] of how sure the model is of a token that it proposes.

    `mars_platform.method.rules.confidence` defines each of them.
    """

    PROBABILITY = "probability"
    MARGIN = "margin"
    ENTROPY = "entropy"
