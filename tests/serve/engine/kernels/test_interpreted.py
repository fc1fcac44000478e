"""Triton kernels, in the interpreter, equal their twins in plain torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = Path(__file__).parents[3] / "support" / "interpreted"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def figures_of(script: str) -> list[Any]:
    """Run comparisons in a process of their own, and return the figures of its last line."""
    done = subprocess.run(
        [sys.executable, str(INTERPRETED / script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_kernels_of_a_layer_equal_their_twins() -> None:
    num_cases, largest = figures_of("layer_cases.py")
    assert num_cases == 88
    assert set(largest) == {"torch.float32", "torch.float16"}


def test_proposals_and_confidences_equal_their_twins() -> None:
    num_reads, num_nans, _ = figures_of("acceptance_cases.py")
    assert num_reads == 192
    assert num_nans == 48  # four damaged reads of eight, by three measures, four times
