"""The choice of an attention backend, and on a GPU the same numbers from both."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from decoding.attention_steps import AttentionStep
from decoding.engine_requests import make_request, make_row
from decoding.engines import Models
from mars_platform.mixing.specs import AttentionSpec
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.interface import LayerGroup
from mars_serve.engine.attention.native import NativeAttention
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.attention.selection import choose_attention, refusal, why_gathered
from mars_serve.engine.batch import build_batch
from mars_serve.engine.settings import EngineSettings

MASK, PAGE = 3, 64
GROUP = LayerGroup(num_layers=1, heads=8, kv_heads=2, key_dim=64, value_dim=64)
LATENTS = LayerGroup(1, heads=128, kv_heads=1, key_dim=576, value_dim=512, value_in_key=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"dtype": torch.float32, "head_dim": 80}, None),
        ({"dtype": torch.float64}, "float64"),
        ({"capability": 7}, "compute capability is 7"),
        ({"head_dim": 513}, "head size is 513"),
        ({"head_dim": LATENTS.head_dim}, None),
        ({"head_dim": replace(LATENTS, key_dim=640).head_dim}, "head size is 640"),
    ],
)
def test_a_refusal_names_its_reason(changes: dict[str, Any], words: str | None) -> None:
    call = {"capability": 8, "dtype": torch.bfloat16, "head_dim": 128, **changes}
    reason = refusal(**call)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(
    ("dtype", "settings", "words"),
    [
        (torch.float32, {}, ""),
        (torch.float64, {}, "the weights are torch.float64"),
        (torch.float32, {"batch_invariant": True}, "batch_invariant is set"),
    ],
)
def test_pages_are_gathered_if_no_kernel_reads_them(
    tiny_model: Models,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    settings: dict[str, Any],
    words: str,
) -> None:
    with caplog.at_level(logging.INFO):
        attention = choose_attention(
            copy.deepcopy(tiny_model("qwen2")).to(dtype),
            [AttentionSpec(layer=0, heads=4, kv_heads=2, key_dim=8, value_dim=8)],
            EngineSettings(**settings),
            page_size=16,
            num_pages=4,
            num_window_pages=0,
        )
    assert isinstance(attention, GatheredAttention if words else NativeAttention)
    assert words in caplog.text


# On a GPU

needs_paged_gpu = pytest.mark.skipif(
    not torch.cuda.is_available()
    or why_gathered(EngineSettings(), torch.device("cuda"), torch.bfloat16, [GROUP]) is not None,
    reason="needs a GPU on which the kernel reads pages",
)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def paged_on(device: torch.device, num_pages: int) -> PagedAttention:
    return PagedAttention(
        GROUP,
        num_pages=num_pages,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device=device,
    )


@needs_paged_gpu
@pytest.mark.parametrize("num_cached", [0, 1, 255, 256, 700])
def test_a_gpu_kernel_equals_dense_attention(device: torch.device, num_cached: int) -> None:
    first = (num_cached, 3, (4,))
    rows = [first, (3, 80, (0,)), (0, 3, (2, 1)), (600, 70, (7,)), (9, 1, (4, 4, 2))]
    step = AttentionStep(rows, device, torch.bfloat16, PAGE)
    attention = paged_on(device, step.num_pages)
    output = step.attend(attention, [attention.keys, attention.values])
    torch.testing.assert_close(output.float(), step.expected(), rtol=2e-2, atol=2e-2)


@needs_paged_gpu
def test_both_backends_agree_on_a_gpu(device: torch.device) -> None:
    torch.manual_seed(0)
    types = {"dtype": torch.bfloat16, "device": device}
    paged = paged_on(device, num_pages=16)
    gathered = GatheredAttention(GROUP, num_pages=16, page_size=PAGE, **types)
    for begin, length, masks in [(0, 300, 0), (300, 5, 4), (305, 1, 2)]:
        rows = [
            make_row(
                make_request("", [5] * 400, num_cached=begin, pages=range(8 * row, 8 * row + 8)),
                length,
                (masks,),
            )
            for row in range(2)
        ]
        batch = build_batch(rows, MASK)
        query = torch.randn(len(batch.ids), 8, 64, **types)
        key, value = torch.randn(2, len(batch.ids), 2, 64, **types)
        one, other = (
            attention.attend(0, query, key, value, 0.125, attention.prepare(batch))
            for attention in (paged, gathered)
        )
        used = slice(batch.num_positions)
        torch.testing.assert_close(one[used], other[used], rtol=2e-2, atol=2e-2)
