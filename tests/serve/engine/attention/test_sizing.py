"""The number of pages by a GPU's memory, of which torch's own figures are given."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mars_platform.errors import UserError
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.attention.sizing import pool_sizes
from mars_serve.engine.settings import EngineSettings

GIB = 2**30
MODEL = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
SETTINGS = EngineSettings(page_size=256, memory_fraction=0.5, max_num_seqs=32)
WHOLE = LayerGroup(28, 16, 4, 128, 128)
WINDOWED = replace(WHOLE, window=1024)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets what is free of 80 GiB, this process's share and its memory."""

    def give(free: float, share: float, reserved: float) -> None:
        memory = int(free * GIB), 80 * GIB
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(reserved * GIB))

    return give


@pytest.mark.parametrize(
    ("free", "share", "reserved", "left"),
    [
        (64, 1.0, 16, 64),  # alone on the device
        (64, 0.5, 16, 24),  # the other half is another replica's, though it is free yet
        (10, 0.5, 16, 10),  # others have taken more than their part
    ],
)
def test_pages_take_a_share_of_what_is_left_of_the_replicas_part(gpu, free, share, reserved, left):
    gpu(free, share, reserved)
    page_bytes = WHOLE.elements_per_token * 256 * 2
    sizes = pool_sizes(SETTINGS, [WHOLE], MODEL)
    assert sizes == (256, left * GIB // 2 // page_bytes, 0)


def test_states_take_their_part_before_pages(gpu):
    gpu(64, 1.0, 16)
    page_bytes, num_slots = WHOLE.elements_per_token * 256 * 2, 2 * 32 + 64 + 1
    sizes = pool_sizes(SETTINGS, [WHOLE], MODEL, slot_bytes=100 * 2**20)
    assert sizes.num_pages == (32 * GIB - num_slots * 100 * 2**20) // page_bytes
    with pytest.raises(UserError, match=r"33024 MiB of states and adapters; .*max_loras$"):
        pool_sizes(SETTINGS, [WHOLE], MODEL, slot_bytes=2**28)


@pytest.mark.parametrize(
    ("groups", "free", "has_room"),
    [([WHOLE, WINDOWED], 64, True), ([WINDOWED], 64, True), ([WHOLE, WINDOWED], 2, False)],
)
def test_windows_of_all_rows_come_first_and_then_a_share_for_cached_ones(
    gpu, groups, free, has_room
):
    gpu(free, 1.0, 0)
    sizes, page_bytes = pool_sizes(SETTINGS, groups, MODEL), WHOLE.elements_per_token * 256 * 2
    room = 32 * (1024 // 256 + 2) + 1024 // 256
    assert sizes.num_window_pages == (room + sizes.num_pages // 8 if has_room else sizes.num_pages)
    num_pages = sizes.num_window_pages + sizes.num_pages * (WHOLE in groups)
    assert 0 <= free * GIB // 2 - num_pages * page_bytes < 2 * page_bytes


def test_weights_that_leave_no_page_are_refused(gpu):
    gpu(free=64, share=0.25, reserved=20)
    with pytest.raises(UserError, match=r"0 MiB are left beside the weights, .* share of one"):
        pool_sizes(SETTINGS, [WHOLE], MODEL)
