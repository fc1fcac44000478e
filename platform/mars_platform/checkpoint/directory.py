"""Checkpoints: an ordinary Hugging Face directory plus ``mars.json`` and ``calibration.json``.

Weights are read from safetensors only, and no code in a checkpoint is ever executed. Imports no Ray
or HTTP library.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from mars_platform.checkpoint.adapter.files import Adapter
from mars_platform.checkpoint.calibration import Calibration, read_calibration
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.checkpoint.inspection import check_weights
from mars_platform.checkpoint.metadata import (
    METADATA_FILE,
    MarsMetadata,
    check_mask_token,
    read_metadata_of,
)
from mars_platform.checkpoint.tokenizer import (
    mask_id,
    name_mask_token,
    read_end_ids,
    read_tokenizer,
)
from mars_platform.errors import UserError, one_line
from mars_platform.mixing.head import per_layer_embedding, text_prefixes

if TYPE_CHECKING:  # importing transformers' models takes seconds; a server's ingress loads none
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids that decoding treats specially."""

    eos: frozenset[int]
    never_emitted: frozenset[int]
    """Ids that are never chosen as output: mask and padding."""


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint directory without its weights."""

    path: Path
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    metadata: MarsMetadata | None
    """Content of ``mars.json``; None for a plain AR checkpoint."""
    special: SpecialTokens
    calibration: Calibration | None = None
    """Content of ``calibration.json``; None if there is none or it was not to be read."""
    masks_are_loras: bool = False
    """Whether the model itself has no masks, and ``metadata`` is that of its LoRA adapters."""
    adapter: Adapter | None = None
    """Adapter that acts at masks, whose weights lie in a directory of its own; None for none."""

    @property
    def own_path(self) -> Path:
        """Directory of what belongs to this model alone: that of its adapter, if it has one.

        The files of ``marsray calibrate`` lie there, and the card.
        """
        return self.path if self.adapter is None else self.adapter.path

    @property
    def fingerprint(self) -> str:
        """Sum, in hexadecimal, that identifies the weights, those of an adapter included."""
        return weights_fingerprint(self.own_path)

    @property
    def vocabulary_size(self) -> int:
        """Number of rows of the embedding, and of logits."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_length(self) -> int:
        """Length of the longest sequence, prompt and output together, in tokens."""
        return int(self.config.get_text_config().max_position_embeddings)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have both a text and a logit; an adapter's mask may have none."""
        return min(len(self.tokenizer), self.vocabulary_size)

    def with_metadata(self, metadata: MarsMetadata) -> Checkpoint:
        """Return this AR checkpoint as a MARS checkpoint that is yet to be trained.

        It has no calibration. The tokenizer must already have the mask token.
        """
        special = _special_tokens(self.path, self.tokenizer, metadata, self.vocabulary_size)
        return replace(self, metadata=metadata, special=special, calibration=None)


def read_checkpoint(model: str | Path, *, with_calibration: bool = True) -> Checkpoint:
    """Read a checkpoint, a directory or hub id, without its weights.

    Without ``with_calibration``, ``calibration.json`` is not read, as it never is for a plain AR
    checkpoint: a new calibration must not fail on the file that it replaces.

    Raises:
        UserError: a file is missing, malformed or does not fit the others, or is none of the
            checkpoint's own.
    """
    path, metadata = read_metadata_of(model)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        vocabulary_size = config.get_text_config().vocab_size
        tokenizer = read_tokenizer(path)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UserError(f"model: {path} cannot be loaded ({one_line(error)})") from error
    if metadata is not None:
        check_mask_token(path, metadata, mask_id(tokenizer))
    special = _special_tokens(path, tokenizer, metadata, vocabulary_size)
    calibration = None
    if with_calibration and metadata is not None:
        calibration = read_calibration(path, metadata.block_size)
    return Checkpoint(path, config, tokenizer, metadata, special, calibration)


def loader_of(config: PreTrainedConfig) -> Any:
    """Return transformers' loader of a family's models: with all parts, if it is multimodal."""
    is_whole = config.get_text_config() is config
    is_multimodal = not is_whole and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM


def load_model(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    headers_only: bool = False,
    quantization: QuantizationConfigMixin | None = None,
) -> PreTrainedModel:
    """Load the weights of a checkpoint directory as ``dtype`` on the CPU, in evaluation mode.

    With ``headers_only`` no number is read: the model is on the device "meta". ``quantization``
    says to what layers' weights are quantized.

    Raises:
        UserError: the weights are missing, incomplete, damaged, or not safetensors.
    """
    disable_progress_bar()  # a display of the whole command stands there
    shapes = check_weights(path) if headers_only else {}
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        loader, source = loader_of(config), dict[str, Any]()
        if quantization is not None:
            source["quantization_config"] = quantization
        name: Path | None = path
        if headers_only:
            with torch.device("meta"):  # a family's own class takes tensors in place of a path
                loader, name = type(loader.from_config(config, trust_remote_code=False)), None
                empty = {key: torch.empty(shape, dtype=dtype) for key, shape in shapes.items()}
            source = {"config": config, "state_dict": empty, "device_map": "meta"}
        model, loading = loader.from_pretrained(
            name,
            trust_remote_code=False,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **source,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model: weights of {path} cannot be loaded ({one_line(error)})") from error
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:3])
        raise UserError(
            f"model: weights of {path} are incomplete: {len(loading['missing_keys'])} tensors are "
            f"missing ({missing}); copy all of its files"
        )
    loaded: PreTrainedModel = model
    return loaded.eval()


def unread_weights(path: Path, model: PreTrainedModel) -> list[str]:
    """Return the weights in a checkpoint's files that its family leaves unread, sorted.

    Those are layers that draft several tokens at once (MTP), for the most part.
    """
    patterns = model._keys_to_ignore_on_load_unexpected or []
    names = set[str]()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            names |= set(tensors.keys())
    unread = {name for name in names if any(re.search(each, name) for each in patterns)}
    return sorted(name for name in unread if not name.endswith("inv_freq"))  # is computed anew


def save_checkpoint(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    metadata: MarsMetadata | None,
    *,
    start: Path | None = None,
) -> None:
    """Write a checkpoint directory, which plain transformers can load as the AR model.

    A multimodal model keeps what is not for text: its weights are written in the narrowest type
    that holds them exactly, as they were stored, and the files of its processor are copied from
    ``start``, the checkpoint that it was made from.
    """
    weights, for_text = model.state_dict(), text_prefixes(model)
    beside = {
        key: tensor
        for key, tensor in weights.items()
        if not key.startswith(for_text) and tensor.is_floating_point()
    }
    for dtype in (torch.bfloat16, torch.float16):
        narrow = {key: tensor.to(dtype) for key, tensor in beside.items()}
        if all(torch.equal(narrow[key].to(beside[key]), beside[key]) for key in beside):
            weights |= narrow
            break
    model.save_pretrained(path, state_dict=weights)
    for file in start.glob("*processor_config.json") if start else ():
        shutil.copyfile(file, path / file.name)
    tokenizer.save_pretrained(path)
    if metadata is not None:
        text = metadata.model_dump_json(indent=2)
        (path / METADATA_FILE).write_text(text + "\n", encoding="utf-8")


def add_mask_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, bool]:
    """Add the ``<|mask|>`` token to tokenizer and model, unless they have it.

    The token takes a spare row of a padded embedding; without a spare row the embedding grows by
    one, and with it an embedding that gives each layer a further input. The row starts as the mean
    of the rows in use, because the spare rows of published models are untrained and can be far from
    any token.

    Returns:
        The token's id, and whether the embedding has grown.
    """
    num_used = len(tokenizer)
    token_id, is_new = name_mask_token(tokenizer)
    if not is_new:
        return token_id, False
    per_layer = per_layer_embedding(model)
    num_rows = model.get_input_embeddings().weight.shape[0]
    grown = token_id >= num_rows
    if grown or (per_layer is not None and token_id >= per_layer.num_embeddings):
        model.resize_token_embeddings(max(token_id + 1, num_rows), mean_resizing=False)
    with torch.no_grad():
        for embedding in (model.get_input_embeddings(), model.get_output_embeddings(), per_layer):
            if embedding is not None:
                embedding.weight[token_id] = embedding.weight[:num_used].mean(dim=0)
    # plain transformers must not emit the mask either
    model.generation_config.suppress_tokens = [token_id]
    return token_id, grown


def _special_tokens(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    metadata: MarsMetadata | None,
    vocabulary_size: int,
) -> SpecialTokens:
    banned = {tokenizer.pad_token_id} if tokenizer.pad_token_id is not None else set()
    if metadata is not None:
        banned.add(metadata.mask_token_id)
    # an adapter's mask, or an added token, may lie past the output layer and has no logit
    known = range(vocabulary_size)
    ends = read_end_ids(path, tokenizer)
    eos, banned = ({token for token in ids if token in known} for ids in (ends, banned))
    # Several families pad with one of their end tokens, which must stay possible to emit.
    return SpecialTokens(eos=frozenset(eos), never_emitted=frozenset(banned - eos))
