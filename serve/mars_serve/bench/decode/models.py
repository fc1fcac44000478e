"""Makes the model that a benchmark decodes with: a checkpoint, or random weights of a given shape.

The engine changes its model in place, so it is made anew for each use; the same seed gives the same
random weights every time.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from mars_platform.checkpoint.adapted import load_weights, read_model
from mars_platform.checkpoint.directory import Checkpoint, SpecialTokens
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import loader_of
from mars_platform.config import read_json
from mars_platform.errors import UserError, one_line

_UNTRAINED_BLOCK_SIZE = 4
_QWEN2 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32768,
}
PRESETS: dict[str, dict[str, Any]] = {
    "qwen2-100m": {  # no published model: about 100 million weights
        **_QWEN2,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
    },
    "qwen2.5-0.5b": {  # config.json of Qwen/Qwen2.5-0.5B-Instruct
        **_QWEN2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "qwen2.5-7b": {  # config.json of Qwen/Qwen2.5-7B-Instruct
        **_QWEN2,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
}


@dataclass(frozen=True)
class BenchModel:
    """A model that can be made as often as contenders need it."""

    name: str
    checkpoint: Checkpoint
    """Configuration, tokenizer and special tokens."""
    is_trained: bool
    """Whether the weights are a checkpoint's and not random."""
    create: Callable[[], PreTrainedModel]
    """Function that makes the model anew, on its device, for evaluation, with sdpa attention."""
    dtype: torch.dtype
    device: str

    @property
    def dtype_name(self) -> str:
        """Name of the weights' type, such as ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    def without_end(self) -> BenchModel:
        """Return the same model without end tokens: an output ends only at its limit."""
        special = replace(self.checkpoint.special, eos=frozenset())
        return replace(self, checkpoint=replace(self.checkpoint, special=special))


def trained_model(
    name: str, dtype: torch.dtype, device: str, *, adapter: Path | None = None
) -> BenchModel:
    """Return the model of a checkpoint directory or hub id, with an adapter if one is given."""
    checkpoint = read_model(name, adapter)

    def create() -> PreTrainedModel:
        return load_weights(checkpoint, dtype=dtype).to(device)

    return BenchModel(name, checkpoint, True, create, dtype, device)


def untrained_model(name: str, dtype: torch.dtype, device: str, seed: int) -> BenchModel:
    """Return a model with random weights, as its family initialises them.

    ``name`` is a preset or a ``config.json``. The last token id is the mask, the block size is 4,
    and there is no tokenizer and no end token.
    """
    config = _config(name)
    metadata = MarsMetadata(
        block_size=_UNTRAINED_BLOCK_SIZE, mask_token_id=int(config.get_text_config().vocab_size) - 1
    )
    special = SpecialTokens(eos=frozenset(), never_emitted=frozenset())
    checkpoint = Checkpoint(Path(name), config, None, metadata, special)

    def create() -> PreTrainedModel:
        devices = [torch.cuda.current_device()] if device == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.device(device):
            torch.manual_seed(seed)
            model = loader_of(config).from_config(
                deepcopy(config),  # a model writes its attention into its config
                trust_remote_code=False,
                dtype=dtype,
                attn_implementation="sdpa",
            )
        assert isinstance(model, PreTrainedModel)
        return model.eval()

    return BenchModel(name, checkpoint, False, create, dtype, device)


def _config(name: str) -> PreTrainedConfig:
    if name in PRESETS:
        return AutoConfig.for_model(**PRESETS[name])
    if not Path(name).is_file():
        raise UserError(
            f"--untrained: {name} is neither a config.json nor one of {', '.join(PRESETS)}"
        )
    content = read_json(Path(name), "name another file with --untrained")
    if "model_type" not in content:
        raise UserError(f"--untrained: {name} has no model_type; add it, 'qwen2' for example")
    try:
        return AutoConfig.for_model(**content)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise UserError(f"--untrained: {name} is no model's config ({one_line(error)})") from error
