"""Chooses the attention backend of a model on this machine, and logs the reason."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from mars_platform.errors import UserError
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.interface import Attention, KeyValueShape
from mars_serve.engine.attention.paged_kernel import load_kernel, varlen_available
from mars_serve.engine.attention.varlen import VarlenAttention
from mars_serve.engine.settings import EngineSettings

_log = logging.getLogger(__name__)


def choose_attention(
    model: PreTrainedModel,
    settings: EngineSettings,
    *,
    num_pages: int,
    page_size: int,
    max_masks: int,
) -> Attention:
    """Return a backend that reads pages in place if a kernel can, and one that gathers them if not.

    Args:
        model: on its device and in its type.
        settings: of the engine.
        num_pages: pages for committed tokens.
        page_size: tokens in a page.
        max_masks: most masks of a row.

    Raises:
        UserError: the model's attention cannot be replaced; the message names the model's family.
    """
    refuse_unserved(model)
    shape = KeyValueShape.of(model.config)
    device, dtype = model.device, model.dtype
    reason = why_gathered(settings, device, dtype, page_size=page_size, head_dim=shape.head_dim)
    if reason is None:
        kernel = load_kernel(device)
        _log.info("attention reads pages in place with %s", kernel.name)
        return VarlenAttention(
            shape,
            num_query_heads=model.config.num_attention_heads,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
            device=device,
            kernel=kernel,
        )
    _log.info("attention gathers pages: %s", reason)
    return GatheredAttention(
        shape,
        num_query_heads=model.config.num_attention_heads,
        num_pages=num_pages,
        page_size=page_size,
        max_rows=settings.max_num_seqs,
        max_masks=max_masks,
        dtype=dtype,
        device=device,
        batch_invariant=settings.batch_invariant,
    )


def why_gathered(
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    *,
    page_size: int,
    head_dim: int,
) -> str | None:
    """Return why pages have to be gathered, or None if a kernel can read them in place."""
    if settings.batch_invariant:
        # The chunks of a prompt depend on the other requests, and so would the parts to merge.
        return "engine.batch_invariant is set"
    return varlen_available(device, dtype, page_size=page_size, head_dim=head_dim)


def refuse_unserved(model: PreTrainedModel) -> None:
    """Refuse a model whose attention does not go through transformers' attention interface.

    Raises:
        UserError: the message names the model's family.
    """
    reason = None
    if not getattr(model, "_supports_attention_backend", False):
        reason = "whose attention cannot be replaced"
    elif any(getattr(module, "is_causal", True) is False for module in model.modules()):
        reason = "whose attention is not causal"
    if reason is not None:
        raise UserError(
            f"model: it is of the family {model.config.model_type!r}, {reason}; use a decoder such "
            "as Qwen2, Qwen3, Llama or Mistral"
        )
