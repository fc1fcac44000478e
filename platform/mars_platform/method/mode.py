"""Decoding modes and confidence measures. Imports nothing heavy: the command line names them."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """How a request is decoded."""

    THRESHOLD = "threshold"
    """Several tokens a pass, as far as the model is sure enough of them."""
    EXACT = "exact"
    """Several tokens a pass, each one checked: the output is that of ``ar``."""
    AR = "ar"
    """One token a pass."""


class Confidence(StrEnum):
    """How sure the model is of a token that it proposes, a number in [0, 1]."""

    PROBABILITY = "probability"
    MARGIN = "margin"
    ENTROPY = "entropy"
