from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from decoding.tiny_models import SIZES
from mars_serve.bench.decode.models import BenchModel, untrained_model

TINY = {**SIZES, "model_type": "qwen2", "max_position_embeddings": 64, "initializer_range": 0.02}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A ``config.json`` of a tiny model."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    return file


@pytest.fixture
def model(config: Path) -> BenchModel:
    """A tiny model with random weights."""
    return untrained_model(str(config), torch.float32, "cpu", 0)
