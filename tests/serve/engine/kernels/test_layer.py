"""Triton kernels of a layer, in the interpreter, equal their twins."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[3] / "support"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@needs_triton
def test_kernels_of_a_layer_equal_their_twins() -> None:
    script = SUPPORT / "interpreted" / "layer_cases.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_cases, largest = json.loads(done.stdout.splitlines()[-1])
    assert num_cases == 88
    assert set(largest) == {"torch.float32", "torch.float16"}
