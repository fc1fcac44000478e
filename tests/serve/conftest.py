"""Tiny models, engines and checkpoints for the tests of the server."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from decoding.adapters import write_adapter
from decoding.families import build_family
from decoding.tiny_models import SIZES, build_model
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens, read_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, load_model, save_checkpoint
from mars_serve.engine.engine import Engine
from mars_serve.engine.settings import EngineSettings
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import create_model

_TEXTS = [f"What is {a} plus {b}? It is {a + b}, I think." for a in range(12) for b in range(12)]


@cache
def _model_of(family: str) -> PreTrainedModel:
    extra = {"sliding_window": None} if family == "mistral" else {}
    return build_model(family, **extra)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], PreTrainedModel]:
    """Random model of a family, untouched by any engine."""
    return _model_of


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """Engine over a copy of a model: ``make_engine(model, special, ...)``."""

    def make(
        model: PreTrainedModel,
        special: SpecialTokens,
        *,
        block_size: int | None = 4,
        mask: int = 3,
        engine_class: type[Engine] = Engine,
        **sizes: int,
    ) -> Engine:
        metadata = block_size and MarsMetadata(block_size=block_size, mask_token_id=mask)
        checkpoint = Checkpoint(None, model.config, None, metadata or None, special)
        defaults = {
            "page_size": 4,
            "num_pages": 120,
            "max_num_seqs": 5,
            "max_num_batched_tokens": 65,
        }
        settings = EngineSettings(**{**defaults, **sizes})
        return engine_class(checkpoint, settings, model=copy.deepcopy(model))

    return make


@pytest.fixture(scope="session")
def cached() -> Callable[[PreTrainedModel, list[int]], tuple[Tensor, Tensor]]:
    """Keys and values that a plain pass caches: [layers, tokens, kv_heads, head_dim] each."""

    def run(model: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
        cache = DynamicCache()
        with torch.inference_mode():
            model(torch.tensor([tokens]), None, None, cache, use_cache=True)
        keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
        values = torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])
        return keys, values

    return run


@pytest.fixture(scope="session")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain AR checkpoint with a byte-level tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("checkpoints") / "plain"
    sizes = {key: value for key, value in SIZES.items() if "vocab" not in key and "max" not in key}
    scratch = ScratchModel(config={"model_type": "qwen2", **sizes}, vocabulary_size=300)
    create_model(scratch, _TEXTS, max_length=128, path=path, seed=0)
    return path


@pytest.fixture(scope="session")
def adapter_dir(plain_dir: Path) -> Path:
    """An adapter of the plain checkpoint."""
    return write_adapter(plain_dir, plain_dir.with_name("adapter"))


@pytest.fixture(scope="session")
def full_dir(plain_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain checkpoint without rows beyond its tokenizer's tokens."""
    path = tmp_path_factory.mktemp("full") / "model"
    model, tokenizer = load_model(plain_dir), read_checkpoint(plain_dir).tokenizer
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def mars_dir(plain_dir: Path) -> Path:
    """The same checkpoint with a mask token and mars.json."""
    path = plain_dir.with_name("mars")
    model, tokenizer = load_model(plain_dir), read_checkpoint(plain_dir).tokenizer
    mask, _ = add_mask_token(model, tokenizer)
    save_checkpoint(path, model, tokenizer, MarsMetadata(block_size=4, mask_token_id=mask))
    return path


@pytest.fixture(scope="session")
def gpt_oss_dir(mars_dir: Path) -> Path:
    """A MARS checkpoint of gpt-oss whose windows, of 8 tokens, are shorter than any prompt."""
    path, known = mars_dir.with_name("gpt_oss"), read_checkpoint(mars_dir)
    model = build_family("gpt_oss", vocab_size=known.vocabulary_size, max_position_embeddings=128)
    save_checkpoint(path, model, known.tokenizer, known.metadata)
    return path
