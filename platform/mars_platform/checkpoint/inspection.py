"""Inspects the files of a model to train, seconds before transformers could load them.

Whatever is refused here would be refused as well when the model is loaded. Imports no Ray, torch or
HTTP library.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from mars_platform.checkpoint.metadata import (
    CHAT_TEMPLATE_FILE,
    MASK_TOKEN,
    check_mask_token,
    read_metadata_of,
)
from mars_platform.config import read_json
from mars_platform.errors import UserError, one_line

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_REMEDY = "copy the checkpoint's file again"
_LAYER_WEIGHT = re.compile(r"\.layers\.\d+\..*?(\w+)\.weight$")


@dataclass(frozen=True)
class Inspection:
    """Facts about a model that its files state; None for what only transformers knows."""

    path: Path
    max_length: int | None
    vocabulary_size: int | None
    """Rows of the embedding."""
    mask_token_id: int | None
    """Id of the mask token; None also if the tokenizer has none."""
    layers: frozenset[str]
    """Names of the linear layers of attention and MLP, such as q_proj; empty if the files do not
    say."""


def inspect_model(model: str) -> Inspection:
    """Inspect a model, a directory or hub id, without loading its weights.

    Raises:
        UserError: a file is missing, malformed or none of the model's own, or the model is of no
            kind that can be trained on conversations.
    """
    path, metadata = read_metadata_of(model)
    config = read_json(path / "config.json", _REMEDY)
    _refuse_quantized(path, config)
    tensors: Iterable[str] = ()
    if "transformers_weights" not in config:  # the rare key names other files
        tensors = check_weights(path)
    check_chat_template(path)
    mask_token_id = read_mask_token_id(path)
    if metadata is not None and mask_token_id is not None:
        check_mask_token(path, metadata, mask_token_id)
    return Inspection(
        path=path,
        max_length=_whole_number(config, "max_position_embeddings"),
        vocabulary_size=_whole_number(config, "vocab_size"),
        mask_token_id=mask_token_id,
        layers=_linear_layers(tensors),
    )


def _linear_layers(tensors: Iterable[str]) -> frozenset[str]:
    """Return the names of linear layers by their weights, such as model.layers.0.mlp.up_proj."""
    text = [name for name in tensors if "language_model." in name]  # of multimodal models
    found = map(_LAYER_WEIGHT.search, text or tensors)
    return frozenset(each[1] for each in found if each and not each[1].endswith("norm"))


def _whole_number(config: dict[str, Any], key: str) -> int | None:
    text = config.get("text_config")  # of a multimodal model
    value = (text if isinstance(text, dict) else config).get(key)
    return value if isinstance(value, int) else None


def _refuse_quantized(path: Path, config: dict[str, Any]) -> None:
    if config.get("quantization_config"):
        raise UserError(
            f"model: {path} is quantized (quantization_config in its config.json), and training "
            "needs weights in floating point; give the model that it was made from"
        )


def check_weights(path: Path) -> dict[str, list[int]]:
    """Refuse weights that are missing, cut short, or not safetensors; only headers are read.

    Returns:
        The shape of each tensor, by its name.
    """
    names, found = [_WEIGHTS], dict[str, list[int]]()
    if not (path / _WEIGHTS).is_file() and (path / _INDEX).is_file():
        named = read_json(path / _INDEX, _REMEDY)["weight_map"]
        names = sorted(set(named.values() if isinstance(named, dict) else named))
    for name in names:
        try:
            with safe_open(path / name, framework="numpy") as tensors:
                keys = tensors.keys()
                found |= {key: tensors.get_slice(key).get_shape() for key in keys}
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"model: weights of {path} cannot be loaded ({name}: {one_line(error)}); copy all "
                "of its safetensors files"
            ) from error
    return found


def check_chat_template(path: Path) -> None:
    """Refuse a model without a chat template in any of the places that transformers reads."""
    if (path / "chat_template.jinja").is_file() or any(
        path.glob("additional_chat_templates/*.jinja")
    ):
        return
    files = [path / name for name in ("tokenizer_config.json", CHAT_TEMPLATE_FILE)]
    if not any(file.is_file() and read_json(file, _REMEDY).get("chat_template") for file in files):
        raise UserError(
            "model: the tokenizer has no chat template; add the model's as chat_template.jinja"
        )


def read_mask_token_id(path: Path) -> int | None:
    """Return the id of the mask token in ``tokenizer.json``; None if there is none."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None  # transformers makes one of the model's other files
    try:
        found: int | None = Tokenizer.from_file(str(file)).token_to_id(MASK_TOKEN)
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file}: cannot be read ({one_line(error)}); {_REMEDY}") from error
    return found
