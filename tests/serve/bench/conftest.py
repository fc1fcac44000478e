from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mars_serve.bench.decode.models import BenchModel, untrained_model

TINY = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


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
