"""The number of pages of an engine's pool, by the settings or by the device's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from mars_platform.errors import UserError
from mars_platform.mixing.specs import AttentionSpec
from mars_serve.engine.attention.interface import group_layers
from mars_serve.engine.settings import CPU_PAGES, EngineSettings


def elements_per_token(specs: Sequence[AttentionSpec]) -> int:
    """Return the number of elements of a token's keys and values over all layers."""
    return sum(group.elements_per_token for group in group_layers(specs)[0])


def num_pages(settings: EngineSettings, token_elements: int, model: PreTrainedModel) -> int:
    """Return the number of pages that the settings give or the device's memory allows.

    On a GPU, pages fill the memory that is free once ``model`` is on it, within this process's
    share of the device, as `torch.cuda.set_per_process_memory_fraction` has set it. A token has
    ``token_elements``; see `elements_per_token`.

    Raises:
        UserError: the memory does not hold one page.
    """
    if settings.num_pages is not None:
        return settings.num_pages
    if model.device.type != "cuda":
        return CPU_PAGES
    free = _bytes_left(model.device)
    page_size = settings.page_size_on(model.device.type)
    page_bytes = token_elements * page_size * model.dtype.itemsize
    fitting: int = int(free * settings.memory_fraction) // page_bytes
    if fitting < 1:
        raise UserError(
            f"engine.memory_fraction: {free / 2**20:.0f} MiB are left beside the weights, less "
            f"than one page of {page_bytes / 2**20:.1f} MiB; use a larger GPU or share of one, or "
            "a smaller model"
        )
    return fitting


def _bytes_left(device: torch.device) -> int:
    """Return the bytes that this process may still allocate on a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))
