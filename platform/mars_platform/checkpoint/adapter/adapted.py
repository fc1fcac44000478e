"""Models with an adapter or without, as commands and servers are given them.

Imports no Ray or HTTP library.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from mars_platform.checkpoint.adapter.files import WEIGHTS_FILE, Adapter, load_adapted, read_adapter
from mars_platform.checkpoint.calibration import read_calibration
from mars_platform.checkpoint.directory import Checkpoint, load_model, read_checkpoint
from mars_platform.errors import UserError, one_line

if TYPE_CHECKING:  # importing it takes seconds, and a server's ingress loads no model
    from transformers import PreTrainedModel


def read_model(
    model: str | Path, adapter: str | Path | None = None, *, with_calibration: bool = True
) -> Checkpoint:
    """Read a checkpoint without its weights, together with an adapter that belongs to it.

    Args:
        model: directory or hub id.
        adapter: directory of the adapter; None for the model as it is.
        with_calibration: see `read_checkpoint`.

    Raises:
        UserError: a file of either is missing, malformed or does not fit the others, or the adapter
            belongs to another model.
    """
    if adapter is None:
        return read_checkpoint(model, with_calibration=with_calibration)
    found = read_adapter(adapter)
    adapted = found.adapt(read_checkpoint(model, with_calibration=False))
    if not with_calibration:
        return adapted
    return replace(adapted, calibration=read_calibration(found.path, found.metadata.block_size))


def load_weights(checkpoint: Checkpoint, *, dtype: torch.dtype) -> PreTrainedModel:
    """Load a checkpoint's weights on the CPU, in evaluation mode, and attach its adapter, if any.

    Args:
        checkpoint: what `read_model` returned.
        dtype: type that the weights are converted to, those of the adapter too.

    Raises:
        UserError: weights are missing or damaged, or do not fit each other.
    """
    if checkpoint.adapter is None:
        return load_model(checkpoint.path, dtype=dtype)
    return load_adapted(checkpoint, checkpoint.adapter, dtype=dtype)


def check_fit(checkpoint: Checkpoint) -> None:
    """Refuse an adapter whose weights do not fit its model; only names and shapes are read.

    Args:
        checkpoint: what `read_model` returned; nothing is checked without an adapter.

    Raises:
        UserError: a weight is missing, damaged or of another shape, or the model has no such layer.
    """
    adapter = checkpoint.adapter
    if adapter is None:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(checkpoint.config, trust_remote_code=False)
    adapter.fill(model, _tensors_without_numbers(adapter))


def _tensors_without_numbers(adapter: Adapter) -> dict[str, Tensor]:
    file = adapter.path / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"adapter: {file} cannot be read ({one_line(error)}); copy all of the adapter's files "
            "again"
        ) from error
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
