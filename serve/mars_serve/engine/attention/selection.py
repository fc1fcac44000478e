"""Chooses the attention backend of a model on this machine, and logs the reason."""

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from mars_platform.mixing.specs import AttentionSpec
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.interface import Attention, LayerGroup, group_layers
from mars_serve.engine.attention.mixed import MixedAttention, MixedPagedAttention
from mars_serve.engine.attention.native import NativeAttention
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.kernels.native import native_for, why_not_native
from mars_serve.engine.settings import EngineSettings

_log = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 512
_LEAST_CAPABILITY = 8
"""Major compute capability from which Triton multiplies matrices of bfloat16 and copies blocks
asynchronously."""


def choose_attention(
    model: PreTrainedModel,
    specs: Sequence[AttentionSpec],
    settings: EngineSettings,
    *,
    page_size: int,
    num_pages: int,
    num_window_pages: int,
) -> Attention:
    """Return a backend that reads pages in place if something can, or else one that gathers them.

    ``model``, of layers with ``specs``, is on its device and in its type. See `PoolSizes`.
    """
    groups, places = group_layers(specs)
    device, dtype = model.device, model.dtype
    reason = why_gathered(settings, device, dtype, groups)
    options: dict[str, Any] = {"page_size": page_size, "dtype": dtype, "device": device}
    counts = [num_window_pages if group.is_bounded else num_pages for group in groups]
    sizes = list(zip(groups, counts, strict=True))
    is_uniform = len(groups) == 1 and all(
        place.is_own and place.rank == layer for layer, place in places.items()
    )
    native = native_for(device, dtype) if reason is None else None
    if native is not None:
        _log.info("attention reads pages in place, by functions of C++")
        read = [NativeAttention(each, num_pages=n, native=native, **options) for each, n in sizes]
        return read[0] if is_uniform else MixedAttention(read, places)
    if reason is None:
        _log.info("attention reads pages in place")
        paged = [PagedAttention(group, num_pages=count, **options) for group, count in sizes]
        return paged[0] if is_uniform else MixedPagedAttention(paged, places)
    _log.info("attention gathers pages: %s", reason)
    options["batch_invariant"] = settings.batch_invariant
    gathered = [GatheredAttention(group, num_pages=count, **options) for group, count in sizes]
    return gathered[0] if is_uniform else MixedAttention(gathered, places)


def why_gathered(
    settings: EngineSettings,
    device: torch.device,
    dtype: torch.dtype,
    groups: Sequence[LayerGroup],
) -> str | None:
    """Return why pages have to be gathered, or None if something can read them in place."""
    if settings.batch_invariant:
        # The chunks of a prompt depend on the other requests, and so do the pieces to combine.
        return "engine.batch_invariant is set"
    if device.type != "cuda":
        if any(group.value_in_key for group in groups):  # they would be stored apart
            return "values are parts of the keys, which only the GPU's kernel reads"
        return why_not_native(device, dtype)
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which CUDA builds of torch bring along, is not installed"
    capability, _ = torch.cuda.get_device_capability(device)
    return refusal(capability, dtype, max(group.head_dim for group in groups))


def refusal(capability: int, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernel cannot run on a GPU of a major compute capability."""
    if dtype not in _DTYPES:
        return f"the weights are {dtype}, and the kernel takes bfloat16, float16 and float32"
    if capability < _LEAST_CAPABILITY:
        return (
            f"the GPU's compute capability is {capability}, and the kernel needs "
            f"{_LEAST_CAPABILITY} or more"
        )
    if head_dim > _MAX_HEAD_DIM:
        return f"the head size is {head_dim}, and the kernel takes up to {_MAX_HEAD_DIM}"
    return None
