"""The numbers of pages of an engine's pools, by the settings or by the device's memory."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from mars_platform.errors import UserError
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.memory import CACHED_SHARE, WindowPages
from mars_serve.engine.settings import CPU_PAGES, EngineSettings


class PoolSizes(NamedTuple):
    """Sizes of the pool of pages that hold whole texts, and of that of `WindowPages`."""

    page_size: int
    num_pages: int
    num_window_pages: int
    """0 if every layer sees whole texts."""


def pool_sizes(
    settings: EngineSettings,
    groups: Sequence[LayerGroup],
    model: PreTrainedModel,
    slot_bytes: int = 0,
    lora_bytes: int = 0,
) -> PoolSizes:
    """Return the pages that the settings give or the device's memory allows.

    On a GPU, pages fill the memory that is free once ``model``, of layers in ``groups``, is on it,
    within this process's share of the device, as `torch.cuda.set_per_process_memory_fraction` has
    set it. States of recurrent layers of ``slot_bytes`` each take a part of that, as do
    ``lora_bytes`` of slots for LoRA adapters.

    Raises:
        UserError: the memory does not hold one page.
    """
    page_size, num_pages = settings.page_size_on(model.device.type), settings.num_pages
    room, reach = 0, max((group.reach or 0 for group in groups), default=0)
    if reach:
        rows, positions = settings.max_num_seqs, settings.max_num_batched_tokens
        room = WindowPages.room(page_size, reach, rows, positions)
    if num_pages is None and model.device.type == "cuda":
        page_bytes = [0, 0]
        for group in groups:
            num_bytes = group.elements_per_token * page_size * model.dtype.itemsize
            page_bytes[group.is_bounded] += num_bytes
        taken = (settings.num_state_slots + 1) * slot_bytes + lora_bytes
        num_pages = _num_fitting(settings, model.device, taken, room, *page_bytes)
    num_pages = num_pages or CPU_PAGES
    return PoolSizes(
        page_size, num_pages, min(num_pages, room + num_pages // CACHED_SHARE) if room else 0
    )


def _num_fitting(
    settings: EngineSettings,
    device: torch.device,
    taken: int,
    room: int,
    page_bytes: int,
    window_bytes: int,
) -> int:
    """Return how many pages a GPU's memory holds beside those of windows and ``taken`` bytes.

    If there are n, windows have n or ``room + n / CACHED_SHARE`` pages, whichever is less. So the
    larger of the two numbers that either would leave room for fits.
    """
    free = _bytes_left(device)
    share = int(free * settings.memory_fraction) - taken
    fitting = max(
        share // (page_bytes + window_bytes),
        (share - room * window_bytes) * CACHED_SHARE // (CACHED_SHARE * page_bytes + window_bytes),
    )
    if fitting < 1:
        needed = f"one page of {(page_bytes + window_bytes) / 2**20:.1f} MiB"
        states = f" and {taken / 2**20:.0f} MiB of states and adapters" if taken else ""
        fewer = ", lower engine.max_num_seqs, num_state_snapshots or max_loras" if taken else ""
        raise UserError(
            f"engine.memory_fraction: {free / 2**20:.0f} MiB are left beside the weights, of which "
            f"the pool's share is less than {needed}{states}; use a larger GPU or share of one, or "
            f"a smaller model{fewer}"
        )
    return fitting


def _bytes_left(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free, allowed - torch.cuda.memory_reserved(device)))
