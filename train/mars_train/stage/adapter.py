"""Adds a new adapter to the model that a stage begins with. Imports no Ray."""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.files import Adapter, identify_base
from mars_platform.checkpoint.adapter.layers import adapter_settings, attach_adapter
from mars_platform.checkpoint.adapter.settings import AdapterMetadata, AdapterSettings
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.metadata import DraftHeadSettings
from mars_platform.checkpoint.tokenizer import name_mask_token


def add_adapter(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    settings: AdapterSettings,
    *,
    block_size: int,
    base: str,
    draft_head: DraftHeadSettings | None,
    provenance: dict[str, Any],
) -> Checkpoint:
    """Attach a new adapter to a model, in place, and return the checkpoint with it.

    The checkpoint's tokenizer names the mask token. ``base`` is the model's directory or hub id, to
    tell users; ``draft_head`` has the settings of a head that the caller attaches; ``provenance``
    has facts about the run.
    """
    identity = identify_base(checkpoint.path, checkpoint.tokenizer, base)
    mask_token_id, is_new = name_mask_token(checkpoint.tokenizer)
    attach_adapter(model, settings, mask_token_id)
    if not is_new:  # the model was trained with masks, so its own row is the best start
        embedding = model.get_input_embeddings()
        with torch.no_grad():
            mask = torch.tensor(mask_token_id, device=embedding.mask_row.device)
            embedding.mask_row.copy_(embedding.base_layer(mask))
    metadata = AdapterMetadata(
        block_size=block_size,
        mask_token_id=mask_token_id,
        provenance=provenance,
        draft_head=draft_head,
        base=identity,
    )
    # It has no directory yet, and nobody reads one before the stage has ended.
    adapter = Adapter(checkpoint.path, adapter_settings(model), metadata, checkpoint.tokenizer)
    return replace(checkpoint, adapter=adapter).with_metadata(metadata)
