"""Builds frontiers with made-up figures."""

from __future__ import annotations

from typing import Any

from mars_autoscale.model.frontier import Frontier
from mars_platform.config import build_settings

Corners = tuple[tuple[float, float], tuple[float, float]]


def point(
    mode: str,
    threshold: float,
    quality: float,
    tokens: float,
    positions: float,
    half: float = 2.0,
) -> dict[str, Any]:
    """Return a point whose quality interval is ``half`` percentage points to either side."""
    return {
        "mode": mode,
        "threshold": threshold,
        "quality": quality,
        "quality_low": quality - half,
        "quality_high": quality + half,
        "tokens_per_forward": tokens,
        "positions_per_row": positions,
    }


AR = point("ar", 1.0, 80.0, 1.0, 1.0)


def frontier_of(
    *points: dict[str, Any],
    weights: str,
    seconds: float | Corners,
    window: int = 4,
    prefill_tokens_per_s: float = 10_000.0,
    **more: Any,
) -> Frontier:
    """Build a frontier.

    Args:
        points: Points from `point`.
        weights: Fingerprint of the weights.
        seconds: Step times at the corners of (0, 100) positions and (0, 1000) cached tokens, or
            one time for all.
        window: Masks of a row per step.
        prefill_tokens_per_s: Prompt tokens per second.
        more: Other fields of the frontier.
    """
    corners = seconds if isinstance(seconds, tuple) else ((seconds, seconds), (seconds, seconds))
    content = {
        "weights": weights,
        "hardware": "one H200",
        "dtype": "bfloat16",
        "measure": "accuracy",
        "num_items": 500,
        "window": window,
        "step_seconds": {"positions": (0, 100), "stored": (0, 1000), "seconds": corners},
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "points": points,
        **more,
    }
    return build_settings(content, Frontier, source="test")
