"""The paged attention kernel: where it can run, and on a GPU the same numbers as elsewhere."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from decoding.attention_steps import AttentionStep
from decoding.engine_requests import make_request, make_row
from decoding.engines import Models
from mars_serve.engine.attention.gathered import GatheredAttention
from mars_serve.engine.attention.interface import KeyValueShape
from mars_serve.engine.attention.paged_kernel import load_kernel, refusal, varlen_available
from mars_serve.engine.attention.plain_kernel import plain_varlen_attn
from mars_serve.engine.attention.selection import choose_attention
from mars_serve.engine.attention.varlen import VarlenAttention
from mars_serve.engine.batch import build_batch
from mars_serve.engine.settings import EngineSettings

MASK = 3
SHAPE = KeyValueShape(num_layers=1, num_heads=2, head_dim=64)


# Selection


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"page_size": 512}, None),
        ({"family": "FlashAttention 3", "page_size": 16}, None),
        ({"page_size": 16}, "engine.page_size is 16; set it to 256"),
        ({"dtype": torch.float32}, "float32"),
        ({"capability": 7}, "compute capability is 7"),
        ({"head_dim": 12}, "head size is 12"),
        ({"head_dim": 512}, "head size is 512"),
        ({"family": "FA4"}, "FA4 is active"),
    ],
)
def test_a_refusal_names_its_reason(changes: dict[str, Any], words: str | None) -> None:
    call = {
        "capability": 8,
        "family": "FlashAttention 2",
        "dtype": torch.bfloat16,
        "page_size": 256,
        "head_dim": 128,
        **changes,
    }
    reason = refusal(**call)
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({}, "the device is cpu"), ({"batch_invariant": True}, "batch_invariant is set")],
)
def test_pages_are_gathered_if_no_kernel_reads_them(
    tiny_model: Models, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], words: str
) -> None:
    with caplog.at_level(logging.INFO):
        attention = choose_attention(
            tiny_model("qwen2"),
            EngineSettings(**settings),
            num_pages=4,
            page_size=16,
            max_masks=2,
        )
    assert isinstance(attention, GatheredAttention)
    assert words in caplog.text


def test_plain_kernel_equals_ordinary_attention() -> None:
    query, key, value = torch.randn(3, 9, 2, 4)
    starts = torch.tensor([0, 9], dtype=torch.int32)
    output, lse = plain_varlen_attn(
        query,
        key,
        value,
        starts,
        starts,
        9,
        9,
        return_aux=torch.nn.attention.varlen.AuxRequest(lse=True),
        scale=0.5,
        window_size=(-1, 0),
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in (query, key, value)), is_causal=True, scale=0.5
    )
    torch.testing.assert_close(output, expected.transpose(0, 1))
    assert lse.shape == (2, 9)
    torch.testing.assert_close(lse[:, 0], (query[0] * key[0]).sum(-1) * 0.5)


# On a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PAGE = 256


@pytest.fixture
def device() -> torch.device:
    """The GPU, if a kernel reads pages of `PAGE` tokens on it."""
    device = torch.device("cuda", torch.cuda.current_device())
    reason = varlen_available(device, torch.bfloat16, page_size=PAGE, head_dim=64)
    if reason is not None:
        pytest.skip(reason)
    return device


def paged_on(device: torch.device, num_pages: int) -> VarlenAttention:
    return VarlenAttention(
        SHAPE,
        num_query_heads=8,
        num_pages=num_pages,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device=device,
        kernel=load_kernel(device),
    )


@needs_gpu
@pytest.mark.parametrize("num_cached", [0, 1, 255, 256, 700])
def test_a_gpu_kernel_equals_dense_attention(device: torch.device, num_cached: int) -> None:
    first = (num_cached, 3, (4,))
    rows = [first, (3, 80, (0,)), (0, 3, (2, 1)), (600, 70, (7,)), (9, 1, (4, 4, 2))]
    step = AttentionStep(rows, device, torch.bfloat16, PAGE)
    attention = paged_on(device, step.num_pages)
    output = step.attend(attention, [attention.keys, attention.values])
    torch.testing.assert_close(output.float(), step.expected(), rtol=2e-2, atol=2e-2)


@needs_gpu
def test_a_gpu_kernels_log_sum_exps_have_heads_first(device: torch.device) -> None:
    attention = paged_on(device, num_pages=1)
    query = torch.randn(70, 8, 64, dtype=torch.bfloat16, device=device)
    key, value = torch.randn(2, 70, 2, 64, dtype=torch.bfloat16, device=device)
    row = make_row(make_request("", [5] * 70, pages=[0]))
    _, lse = attention._attend_wide(
        query, key, value, 0.125, attention.prepare(build_batch([row], None))
    )
    keys = key.float().repeat_interleave(4, dim=1)
    scores = (torch.einsum("qhd,khd->qhk", query.float(), keys) * 0.125).masked_fill(
        torch.ones(70, 70, device=device).triu(1).bool()[:, None], -torch.inf
    )
    torch.testing.assert_close(lse.float(), scores.logsumexp(-1), rtol=1e-2, atol=1e-2)


@needs_gpu
def test_both_backends_agree_on_a_gpu(device: torch.device) -> None:
    torch.manual_seed(0)
    types = {"dtype": torch.bfloat16, "device": device}
    paged = paged_on(device, num_pages=8)
    gathered = GatheredAttention(
        SHAPE, num_query_heads=8, num_pages=8, page_size=PAGE, max_rows=2, max_masks=4, **types
    )
    for begin, length, masks in [(0, 300, 0), (300, 5, 4), (305, 1, 2)]:
        rows = [
            make_row(
                make_request("", [5] * 400, num_cached=begin, pages=[2 * row, 2 * row + 1]),
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
