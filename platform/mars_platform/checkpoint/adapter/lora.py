"""LoRA adapters, which act at all positions: reading those of any trainer, and merging them.

    W' = W + scale * B A      (arXiv 2106.09685)

A directory has peft's format. With a ``mars.json`` it also has a row for the mask token, by which
its model drafts; without one, as other trainers write it, drafting is up to the model. Imports no
Ray or HTTP library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mars_platform.checkpoint.adapter.files import (
    PeftConfig,
    open_adapter,
    read_adapter_tokenizer,
)
from mars_platform.checkpoint.adapter.layers import adaptable_layers, read_tensors
from mars_platform.checkpoint.adapter.settings import AdapterMetadata
from mars_platform.checkpoint.metadata import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS_FILE,
    DRAFT_HEAD_FILE,
    METADATA_FILE,
)
from mars_platform.config import build_settings, read_json
from mars_platform.errors import UserError

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress loads no model
    from transformers import PreTrainedModel

_REMEDY = "give the model that it was trained on, or copy all of its files again"
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_ROW_KEY = re.compile(r".+\.token_adapter\.trainable_tokens_delta(?:\.default)?")
_PARTS = {"model", "language_model", "text_model"}
"""Parts of layers' names that a model of text has not, or has elsewhere, than a multimodal one."""


@dataclass(frozen=True)
class LoraWeights:
    """The weights of a LoRA adapter for one model."""

    products: Mapping[str, tuple[Tensor, Tensor]]
    """A, [rank, in_features], and B, [out_features, rank], by the layer's name in the model."""
    scale: float
    mask_row: Tensor | None = None
    """Row of the mask token in the embedding, [width]; None to leave the model's."""


@dataclass(frozen=True)
class LoraAdapter:
    """The content of a LoRA adapter's directory without its weights."""

    path: Path
    config: PeftConfig
    metadata: AdapterMetadata | None
    """Content of ``mars.json``; None for an adapter by another trainer, or of a stage ``ar``."""

    @property
    def scale(self) -> float:
        """Factor of every product."""
        rank = self.config.r
        return self.config.lora_alpha / (math.sqrt(rank) if self.config.use_rslora else rank)

    def weights(self, model: PreTrainedModel) -> LoraWeights:
        """Read the weights for a model, which may be on the meta device.

        Layers are found by their names, also where only one of adapter and model is of a multimodal
        kind (``model.language_model.layers`` and ``model.layers``).

        Raises:
            UserError: the weights are missing, damaged or not finite, fit no layer of the model, or
                are not all there.
        """
        tensors = read_tensors(self.path / ADAPTER_WEIGHTS_FILE)
        names = {_plain(name): name for name in adaptable_layers(model)}
        parts, row = dict[str, dict[str, Tensor]](), None
        for key in sorted(tensors):
            found = _KEY.fullmatch(key)
            if found is not None and _plain(found[1]) in names:
                parts.setdefault(names[_plain(found[1])], {})[found[2]] = tensors[key]
            elif self.metadata is not None and _ROW_KEY.fullmatch(key):
                row = tensors[key].squeeze(0)
            else:
                known = sorted({name.rpartition(".")[2] for name in names})
                raise self._refusal(
                    f"{key} is for no layer that a LoRA adapter can change in a model of the "
                    f"family {model.config.model_type!r}; it has {', '.join(known)} in "
                    f"{next(iter(names.values()), 'no layer')} and others"
                )
        self._refuse_absent(parts, model)
        self._check(parts, row, model)
        products = {name: (part["A"], part["B"]) for name, part in parts.items()}
        return LoraWeights(products, self.scale, row)

    def _refuse_absent(self, found: Collection[str], model: PreTrainedModel) -> None:
        """Refuse weights that lack those of a layer which the settings name, or of all layers."""
        named = self.config.target_modules
        wanted = [named] if isinstance(named, str) else named or []
        modules = [name for name, _ in model.named_modules()]
        for name in wanted:
            if _is_named(name, modules) and not _is_named(name, found):
                raise self._refusal(f"it holds no weights for {name}, which {ADAPTER_FILE} names")
        if not found:
            raise self._refusal("it holds no weights for any layer")

    def _check(
        self, parts: Mapping[str, dict[str, Tensor]], row: Tensor | None, model: PreTrainedModel
    ) -> None:
        """Refuse weights of other shapes than the model's, and numbers that are not finite."""
        layers, rank = adaptable_layers(model), self.config.r
        checked = dict[str, tuple[Tensor | None, tuple[int, ...]]]()
        for name, part in parts.items():
            shapes = {"A": (rank, layers[name].in_features), "B": (layers[name].out_features, rank)}
            checked |= {f"{name}.lora_{key}": (part.get(key), shapes[key]) for key in "AB"}
        if self.metadata is not None:
            checked["the mask's row"] = row, tuple(model.get_input_embeddings().weight.shape[1:])
        for name, (tensor, shape) in checked.items():
            if tensor is None:
                raise self._refusal(f"it lacks {name}")
            if tuple(tensor.shape) != shape:
                raise self._refusal(
                    f"{name} has the shape {tuple(tensor.shape)}, and rank and model need {shape}"
                )
            # as float32, in which they are computed with, and float8 cannot be asked
            if not tensor.is_floating_point() or not tensor.float().isfinite().all():
                raise self._refusal(f"{name} holds other numbers than finite ones")

    def _refusal(self, problem: str) -> UserError:
        return UserError(f"adapter: {self.path / ADAPTER_WEIGHTS_FILE}: {problem}; {_REMEDY}")


def read_lora(path: str | Path) -> LoraAdapter:
    """Read the directory of a LoRA adapter, of any trainer, without its weights.

    Raises:
        UserError: the directory holds no LoRA adapter, or one of a kind that is not implemented, or
            a file is missing, damaged, a link to one elsewhere, or newer than this version.
    """
    path = Path(path)
    metadata = open_adapter(path)
    if metadata is not None and metadata.scope != "all":
        raise UserError(
            f"adapter: {path} is a draft adapter, which acts at masks only; name a LoRA adapter"
        )
    if (path / DRAFT_HEAD_FILE).exists() or (metadata is not None and metadata.draft_head):
        raise UserError(
            f"adapter: {path} has a draft head, by which no LoRA adapter drafts; remove "
            f"{DRAFT_HEAD_FILE} there, and draft_head from {METADATA_FILE}, or train the head with "
            "a draft adapter"
        )
    file = path / ADAPTER_FILE
    config = build_settings(read_json(file, _REMEDY), PeftConfig, source=str(file))
    if metadata is not None:
        read_adapter_tokenizer(path, metadata)
    rows = list((config.trainable_token_indices or {}).values())
    if rows != ([] if metadata is None else [[metadata.mask_token_id]]):
        raise UserError(
            f"{file}: trainable_token_indices names {rows}, and only the mask token that "
            f"{METADATA_FILE} names may have a row of the adapter's own; merge the adapter into "
            "its model's weights"
        )
    return LoraAdapter(path, config, metadata)


@torch.no_grad()
def merge_lora(
    model: PreTrainedModel, weights: LoraWeights, mask_token_id: int | None = None
) -> None:
    """Add a LoRA adapter to a model's own weights, in place.

    Sums are computed in float32 and rounded once to the model's number type. ``mask_token_id`` is
    the row that takes the adapter's, if it has one; see `add_mask_token`.
    """
    for name, (first, second) in weights.products.items():
        weight = model.get_parameter(f"{name}.weight")
        product = second.to(weight.device).float() @ first.to(weight.device).float()
        weight.copy_(weight.float() + product * weights.scale)
    if weights.mask_row is not None and mask_token_id is not None:
        embedding = model.get_input_embeddings().weight
        embedding[mask_token_id] = weights.mask_row.to(embedding)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _PARTS)


def _is_named(target: str, names: Collection[str]) -> bool:
    wanted = _plain(target)
    return any(f".{_plain(name)}".endswith(f".{wanted}") for name in names)
