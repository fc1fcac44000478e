"""Choice among torch's flash attention kernels that read pages, and the arguments each needs.

Source: ``torch.nn.attention.varlen``, its kernels ``torch.nn.attention._fa3`` and ``_fa4``, and
FlashAttention's own checks. FlashAttention 2, which torch carries, reads pages of a multiple of 256
tokens, wants cumulative key lengths beside the page table, and must not split a row's keys: it then
misplaces the results of all rows but the first. FlashAttention 3 takes pages of any size and
refuses those lengths; it runs on compute capability 9 only and comes in a package of its own.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import varlen

_ARGUMENTS = frozenset(
    {"return_aux", "scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}
)
_FA2, _FA3 = "FlashAttention 2", "FlashAttention 3"
_FA2_PAGE = 256
_FA3_PACKAGE = "flash_attn_interface"
_MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class PagedKernel:
    """A function like ``torch.nn.attention.varlen.varlen_attn``, and the arguments it needs.

    It returns [queries, heads, head_dim] and the log-sum-exps [heads, queries]: so do the kernels
    and their shape functions, though that function's docstring has the log-sum-exps the other way
    round. For queries without a key both may be anything.
    """

    name: str
    call: Callable[..., Any]
    needs_key_starts: bool
    """Whether it needs cumulative key lengths beside a page table; other kernels refuse them."""
    num_splits: int | None
    """Parts into which the kernel splits a row's keys; None lets the kernel choose."""


def varlen_available(
    device: torch.device, dtype: torch.dtype, *, page_size: int, head_dim: int
) -> str | None:
    """Return why no kernel can read such pages here, or None if one can."""
    if device.type != "cuda":
        return f"the device is {device.type}, not a GPU"
    missing = _ARGUMENTS - inspect.signature(varlen.varlen_attn).parameters.keys()
    if missing:
        return f"torch {torch.__version__}'s varlen_attn takes no {', '.join(sorted(missing))}"
    capability, _ = torch.cuda.get_device_capability(device)
    return refusal(capability, _family(capability), dtype, page_size=page_size, head_dim=head_dim)


def refusal(
    capability: int, family: str, dtype: torch.dtype, *, page_size: int, head_dim: int
) -> str | None:
    """Return why a kernel family cannot read such pages on a GPU of a major compute capability."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the weights are {dtype}, and the kernels take float16 and bfloat16"
    if capability < 8:
        return f"the GPU's compute capability is {capability}, and the kernels need 8 or more"
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return f"the head size is {head_dim}, and the kernels take multiples of 8 up to 256"
    if family not in (_FA2, _FA3):
        return f"{family} is active in torch, which is not known to read pages as needed here"
    if family == _FA2 and page_size % _FA2_PAGE:
        return (
            f"{_FA2} reads pages of a multiple of {_FA2_PAGE} tokens and engine.page_size is "
            f"{page_size}; set it to {_FA2_PAGE}, or install {_FA3} on a GPU that has it"
        )
    return None


def load_kernel(device: torch.device) -> PagedKernel:
    """Return the kernel of a device for which `varlen_available` returned None.

    If FlashAttention 3 is installed and can run, it is activated in torch for the process.
    """
    capability, _ = torch.cuda.get_device_capability(device)
    if _family(capability) == _FA2:
        return PagedKernel(_FA2, varlen.varlen_attn, needs_key_starts=True, num_splits=1)
    if torch.nn.attention.current_flash_attention_impl() != "FA3":
        torch.nn.attention.activate_flash_attention_impl("FA3")
    return PagedKernel(_FA3, varlen.varlen_attn, needs_key_starts=False, num_splits=None)


def _family(capability: int) -> str:
    """Return the family of kernels that ``varlen_attn`` calls, or will call once activated."""
    active = torch.nn.attention.current_flash_attention_impl()
    if active == "FA3" or (
        active is None and capability == 9 and importlib.util.find_spec(_FA3_PACKAGE) is not None
    ):
        return _FA3
    return _FA2 if active is None else active
