"""The number of pages by a GPU's memory, of which torch's own figures are given."""

from types import SimpleNamespace

import pytest
import torch

from mars_platform.errors import UserError
from mars_serve.engine.attention.sizing import num_pages
from mars_serve.engine.settings import EngineSettings

GIB = 2**30
MODEL = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
SETTINGS = EngineSettings(page_size=256, memory_fraction=0.5)
TOKEN_ELEMENTS = 28 * 2 * 4 * 128


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
    page_bytes = TOKEN_ELEMENTS * 256 * 2
    assert num_pages(SETTINGS, TOKEN_ELEMENTS, MODEL) == left * GIB // 2 // page_bytes


def test_weights_that_leave_no_page_are_refused(gpu):
    gpu(free=64, share=0.25, reserved=20)
    with pytest.raises(UserError, match=r"0 MiB are left beside the weights, .* share of one"):
        num_pages(SETTINGS, TOKEN_ELEMENTS, MODEL)
