"""Checkpoints: an ordinary Hugging Face directory plus ``mars.json`` and ``calibration.json``.

Reads, writes and checks them; knows no training loop and no engine. Weights are safetensors only
and no code of a checkpoint is ever executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from pydantic import Field
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from mars_platform.checkpoint.calibration import Calibration, read_calibration
from mars_platform.config import Settings, build_settings
from mars_platform.errors import UserError

if TYPE_CHECKING:  # it takes seconds to import, and servers' ingresses load no model
    from transformers import PreTrainedModel

METADATA_FILE = "mars.json"
MASK_TOKEN = "<|mask|>"  # noqa: S105 - a token of a vocabulary, no secret
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_UNSUPPORTED_OUTPUT = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class MarsMetadata(Settings):
    """Content of ``mars.json``: what decoding needs beyond the Hugging Face files."""

    format_version: Literal[1] = 1
    """Version of this file's layout."""
    block_size: int = Field(ge=1)
    """B that the model was trained with, in tokens: how many masks a step may feed."""
    mask_token_id: int = Field(ge=0)
    """Id of the ``<|mask|>`` token."""
    provenance: dict[str, Any] = Field(default_factory=dict)
    """How the checkpoint was made: base model, recipe, versions."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids with a meaning to decoding."""

    eos: frozenset[int]
    """Any of these ends a sequence at once."""
    never_emitted: frozenset[int]
    """Mask and padding: never chosen as output."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory that was found and read, without its weights."""

    path: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    metadata: MarsMetadata | None
    """None for a plain AR checkpoint."""
    special: SpecialTokens
    calibration: Calibration | None = None
    """None where the directory has none."""

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return int(self.config.max_position_embeddings)

    def with_metadata(self, metadata: MarsMetadata) -> Checkpoint:
        """The same checkpoint as a MARS one to be trained, thus without a calibration.

        Its tokenizer has got the mask token already.
        """
        special = _special_tokens(self.path, self.tokenizer, metadata)
        return replace(self, metadata=metadata, special=special, calibration=None)


def locate_model(model: str) -> Path:
    """Directory of a model given as a directory or a Hugging Face hub id.

    Raises:
        UserError: it is neither, or the hub cannot be reached and it is not in the local cache.
    """
    path = Path(model)
    if (path / "config.json").is_file():
        return path
    if path.exists():
        raise UserError(f"model: {model} holds no config.json, so it is not a model directory")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"model: there is no directory {model}; give an existing one or a hub id")
    try:
        return Path(snapshot_download(model, allow_patterns=_DOWNLOADED))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model: {model} is no local directory and cannot be had from the Hugging Face hub "
            f"({type(error).__name__}); check the name, or the network"
        ) from error


def read_checkpoint(model: str | Path, *, with_calibration: bool = True) -> Checkpoint:
    """Read everything but the weights.

    Args:
        model: directory or hub id.
        with_calibration: else ``calibration.json`` is left alone, as where it is to be replaced.
            A plain AR checkpoint's is never read.

    Raises:
        UserError: a part is missing, malformed or does not fit the others.
    """
    path = locate_model(str(model))
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(f"model: {path} has no tokenizer; add its tokenizer.json")
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"model: {path} cannot be loaded ({reason})") from error
    refuse_unsupported(config, path)
    metadata = read_metadata(path)
    if metadata is not None and metadata.mask_token_id != _token_id(tokenizer, MASK_TOKEN):
        raise UserError(
            f"{path / METADATA_FILE}: mask_token_id is {metadata.mask_token_id}, but the tokenizer "
            f"has {MASK_TOKEN} at {_token_id(tokenizer, MASK_TOKEN)}; use one checkpoint's files"
        )
    special = _special_tokens(path, tokenizer, metadata)
    calibration = None
    if with_calibration and metadata is not None:
        calibration = read_calibration(path, metadata.block_size)
    return Checkpoint(path, config, tokenizer, metadata, special, calibration)


def read_metadata(path: Path) -> MarsMetadata | None:
    """``mars.json`` of a checkpoint directory, or None where there is none.

    Raises:
        UserError: the file is there but not valid.
    """
    file = path / METADATA_FILE
    if not file.is_file():
        return None
    return build_settings(_read_json(file), MarsMetadata, source=str(file))


def load_model(
    path: Path, *, dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> PreTrainedModel:
    """Load the weights of a checkpoint directory, in evaluation mode, on the CPU.

    Raises:
        UserError: the weights are missing, incomplete, damaged, or are not safetensors.
    """
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"model: weights of {path} cannot be loaded ({reason})") from error
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise UserError(
            f"model: weights of {path} are incomplete: {len(loading['missing_keys'])} tensors are "
            f"missing ({missing}); copy all of its files"
        )
    loaded: PreTrainedModel = model
    return loaded.eval()


def save_checkpoint(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    metadata: MarsMetadata | None,
) -> None:
    """Write a directory that plain transformers loads as the AR model."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    if metadata is not None:
        text = metadata.model_dump_json(indent=2)
        (path / METADATA_FILE).write_text(text + "\n", encoding="utf-8")


def add_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, bool]:
    """Give tokenizer and model a ``<|mask|>`` token, if they have none yet.

    It takes a spare row of a padded embedding where there is one. The row starts as the mean of
    the rows in use: spare rows of published models are untrained and can be far off any token.

    Returns:
        The token's id, and whether the embedding had to be grown for it.
    """
    present = _token_id(tokenizer, MASK_TOKEN)
    if present is not None:
        return present, False
    num_used = len(tokenizer)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [MASK_TOKEN]}, replace_extra_special_tokens=False
    )
    token_id = _token_id(tokenizer, MASK_TOKEN)
    assert token_id is not None
    grown = token_id >= model.get_input_embeddings().weight.shape[0]
    if grown:
        model.resize_token_embeddings(token_id + 1, mean_resizing=False)
    with torch.no_grad():
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings()):
            embedding.weight[token_id] = embedding.weight[:num_used].mean(dim=0)
    # plain transformers must not emit the mask either
    model.generation_config.suppress_tokens = [token_id]
    return token_id, grown


def refuse_unsupported(config: PreTrainedConfig, path: Path) -> None:
    """Refuse families whose forward pass is not what training and decoding assume.

    Raises:
        UserError: naming the family and the trait.
    """
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    default = ["sliding_attention" if windowed else "full_attention"]
    layer_types = set(getattr(config, "layer_types", None) or default)
    traits = sorted(layer_types - {"full_attention"})
    traits += [name for name in _UNSUPPORTED_OUTPUT if getattr(config, name, None) not in (None, 1)]
    if traits:
        raise UserError(
            f"model: {path} is of the family {config.model_type!r} with {', '.join(traits)}, which "
            "is not supported; use a decoder with full attention (Qwen2, Qwen3, Llama, Mistral)"
        )


def _special_tokens(
    path: Path, tokenizer: PreTrainedTokenizerBase, metadata: MarsMetadata | None
) -> SpecialTokens:
    file = path / "generation_config.json"
    generation = _read_json(file) if file.is_file() else {}
    listed = generation.get("eos_token_id")
    eos = set(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    hidden = {tokenizer.pad_token_id} if tokenizer.pad_token_id is not None else set()
    if metadata is not None:
        hidden.add(metadata.mask_token_id)
    # Several families pad with one of their end tokens, which must remain possible to emit.
    return SpecialTokens(eos=frozenset(eos), never_emitted=frozenset(hidden - eos))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: the top level must be an object")
    return content


def _token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    found = tokenizer.get_vocab().get(token)
    return None if found is None else int(found)
