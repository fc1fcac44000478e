"""The decoding modes. Imports nothing heavy: the command line names them in its help."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """How a request is decoded."""

    THRESHOLD = "threshold"
    AR = "ar"
