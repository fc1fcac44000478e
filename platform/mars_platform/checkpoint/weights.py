"""Loads and saves the models of checkpoints, and gives them a mask token.

Weights are read from safetensors only, and no code in a checkpoint is ever executed. Imports no Ray
or HTTP library.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
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

from mars_platform.checkpoint.adapter.draft_head import save_draft_head, without_draft_head
from mars_platform.checkpoint.inspection import check_weights
from mars_platform.checkpoint.metadata import METADATA_FILE, MarsMetadata
from mars_platform.checkpoint.tokenizer import name_mask_token
from mars_platform.errors import UserError, one_line
from mars_platform.mixing.head import per_layer_embedding, text_prefixes

if TYPE_CHECKING:  # importing transformers' models takes seconds
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin


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
    weights, for_text = without_draft_head(model.state_dict()), text_prefixes(model)
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
    save_draft_head(path, model)
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
