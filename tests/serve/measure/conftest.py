from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conversations import row, write


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the commands set it if it is not set


@pytest.fixture
def model_dir(mars_dir: Path, tmp_path: Path) -> Path:
    """A MARS checkpoint that the test may write into."""
    return shutil.copytree(mars_dir, tmp_path / "model")


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """A file of twelve conversations without answers."""
    rows = [row(f"What is {n} plus {n * n}?", "7") for n in range(12)]
    return write(tmp_path / "sums.jsonl", *rows)
