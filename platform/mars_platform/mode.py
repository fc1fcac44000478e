"""Decoding modes and confidence measures. Imports nothing heavy: the command line names them."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """How a request is decoded."""

    THRESHOLD = "threshold"
    AR = "ar"


class Confidence(StrEnum):
    """How sure the model is of a token that it proposes, a number in [0, 1]."""

    PROBABILITY = "probability"
    MARGIN = "margin"
    ENTROPY = "entropy"
