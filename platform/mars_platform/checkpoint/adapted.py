"""Models with an adapter or without, as commands and servers are given them.

Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mars_platform.checkpoint.adapter.draft_head import load_draft_head
from mars_platform.checkpoint.adapter.files import (
    Adapter,
    identify_base,
    read_adapter,
    read_adapter_tokenizer,
)
from mars_platform.checkpoint.adapter.lora import read_lora
from mars_platform.checkpoint.adapter.settings import BaseIdentity
from mars_platform.checkpoint.calibration import read_calibration
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.weights import load_model, loader_of
from mars_platform.errors import UserError
from mars_platform.mixing.head import drop_towers

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress loads no model
    from transformers import PreTrainedModel


def read_model(
    model: str | Path, adapter: str | Path | None = None, *, with_calibration: bool = True
) -> Checkpoint:
    """Read a checkpoint without its weights, together with an adapter that belongs to it.

    ``model`` is a directory or hub id, ``adapter`` a directory or None; see also `read_checkpoint`.

    Raises:
        UserError: a file of either is missing, malformed or does not fit the others, or the adapter
            belongs to another model.
    """
    if adapter is None:
        return read_checkpoint(model, with_calibration=with_calibration)
    found = read_adapter(adapter)
    adapted = adapt(read_checkpoint(model, with_calibration=False), found)
    if not with_calibration:
        return adapted
    return replace(adapted, calibration=read_calibration(found.path, found.metadata.block_size))


def adapt(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Return a model's checkpoint with an adapter's block size, mask token and tokenizer.

    Its path stays that of the model, whose weights lie there. It has no calibration yet.
    """
    refuse_other_base(base, adapter.metadata.base, adapter.path)
    adapted = replace(base, tokenizer=adapter.tokenizer, adapter=adapter)
    return adapted.with_metadata(adapter.metadata)


def with_lora_masks(base: Checkpoint, paths: Iterable[str | Path]) -> Checkpoint:
    """Return a plain checkpoint with the mask of the first of some LoRA adapters that has one.

    Other checkpoints, and those whose adapters have none, stay as they are.
    """
    found = (read_lora(path) for path in (paths if base.metadata is None else ()))
    for adapter in found:
        if adapter.metadata is not None:
            tokenizer = read_adapter_tokenizer(adapter.path, adapter.metadata)
            known = replace(base, tokenizer=tokenizer).with_metadata(adapter.metadata)
            return replace(known, masks_are_loras=True)
    return base


def refuse_other_base(base: Checkpoint, ours: BaseIdentity, adapter: Path) -> None:
    """Compare a model with the one that the adapter in a directory belongs to."""
    theirs = identify_base(base.path, base.tokenizer, ours.name)
    parts = {"weights": "weights", "config": "config.json", "tokenizer": "tokenizer"}
    differing = [parts[key] for key in parts if getattr(ours, key) != getattr(theirs, key)]
    if differing:
        raise UserError(
            f"adapter: {adapter} belongs to another model than {base.path}, which differs in "
            f"{', '.join(differing)}; give the model that it was trained on, {ours.name}"
        )


def load_weights(checkpoint: Checkpoint, *, dtype: torch.dtype) -> PreTrainedModel:
    """Load the weights of a checkpoint that `read_model` returned, on the CPU, in evaluation mode.

    All weights are converted to ``dtype`` and take no gradients. An adapter and a draft head are
    attached. What a multimodal model has for images and sound is left out.

    Raises:
        UserError: weights are missing or damaged, or do not fit each other.
    """
    model = load_model(checkpoint.path, dtype=dtype)
    drop_towers(model)
    _attach(checkpoint, model)
    return model.requires_grad_(False).eval()


def check_fit(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose adapter or draft head does not fit; no weight of it is read."""
    metadata = checkpoint.metadata
    if checkpoint.adapter is None and (metadata is None or metadata.draft_head is None):
        return
    with torch.device("meta"):
        model = loader_of(checkpoint.config).from_config(checkpoint.config, trust_remote_code=False)
    _attach(checkpoint, model)


def _attach(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    if checkpoint.adapter is not None:
        checkpoint.adapter.attach(model)
    elif checkpoint.metadata is not None:
        load_draft_head(model, checkpoint.path, checkpoint.metadata)
