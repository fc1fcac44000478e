"""Recurrences over packed rows in chunks, against those of all pairs of slots."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mars_platform.method.rules import visibility
from mars_platform.mixing.recurrent import ConvolveCall, ScanCall
from mars_train.method import trees
from mars_train.method.attention import slots_of
from mars_train.method.layout import PADDING_DOCUMENT, Batch, Layout, collate, lay_out

KINDS = ["delta", "delta of channels", "added"]
Text = tuple[list[bool], int | None, int]
"""Each case says which tokens are labels, how large blocks are, and how far they are shifted."""
TEXTS = st.tuples(
    st.lists(st.booleans(), min_size=2, max_size=13), st.sampled_from([None, 1, 2, 5]), st.just(1)
)
ROW: list[list[Text]] = [[([False, *[True] * 6], 3, 1), ([True, False, True], 2, 0)]]
ROWS = st.lists(st.lists(TEXTS, min_size=1, max_size=3), min_size=1, max_size=3)


def batch_of(rows: list[list[Text]]) -> Batch:
    def layout(labels: list[bool], block_size: int | None, offset: int) -> Layout:
        ids = np.ones(len(labels), np.int64)
        return lay_out(ids, np.array(labels), block_size, 2, block_offset=offset)

    return collate([[layout(*text) for text in row] for row in rows], 0)


def seen_by(batch: Batch) -> Tensor:
    return visibility(batch.documents, batch.position_ids, batch.blocks, batch.noisy)


def random_call(batch: Batch, kind: str, strength: float = 1.0, seed: int = 0) -> ScanCall:
    generator = torch.Generator().manual_seed(seed)
    heads, key_dim, value_dim = 2, 3, 2

    def random(*size: int) -> Tensor:
        shape = *batch.tokens.shape, heads, *size
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value = random(key_dim), random(key_dim), random(value_dim)
    decay = -strength * random(key_dim if "channels" in kind else 1).square()
    rate = None if kind == "added" else random().sigmoid()
    return ScanCall(query, key / key.norm(dim=-1, keepdim=True), value, decay, rate)


def dense(call: ScanCall, seen: Tensor) -> Tensor:
    """Solve for all slots of a row at once, by the formulas of `mars_platform.mixing.tree`."""
    query, key, value, decay = (each.transpose(1, 2) for each in call[:4])
    total = seen[:, None].double() @ decay  # [rows, heads, slots, 1 or key_dim]
    between = total[:, :, :, None] - total[:, :, None]
    weight = between.masked_fill(~seen[:, None, :, :, None], -torch.inf).exp()
    weight = weight.expand(*weight.shape[:-1], key.shape[-1])
    reads, writes = (
        torch.einsum("rhik,rhijk,rhjk->rhij", each, weight, key) for each in (query, key)
    )
    if call.rate is not None:
        rate = call.rate.transpose(1, 2)[..., None]
        system = torch.eye(writes.shape[-1]) + rate * writes.tril(-1)
        value = torch.linalg.solve(system, rate * value)
    return (reads @ value).transpose(1, 2)


def chunked(batch: Batch, call: ScanCall, size: int = 3) -> Tensor:
    """Run the recurrence in chunks of ``size`` clean tokens."""
    with patch.multiple(trees, _CHUNK=size, _CHANNEL_CHUNK=size):
        return trees.RowTrees(slots_of(batch)).scan(call)


@settings(max_examples=40)
@example(rows=[ROW[0][:1]] * 2, kind="delta", size=1, seed=0)
@given(ROWS, st.sampled_from(KINDS), st.sampled_from([1, 3, 64]), st.integers(0, 99))
def test_chunks_give_the_outputs_and_gradients_of_all_pairs(
    rows: list[list[Text]], kind: str, size: int, seed: int
) -> None:
    batch = batch_of(rows)
    call = random_call(batch, kind, seed=seed)
    inputs = [each.requires_grad_() for each in call if each is not None]
    is_used = batch.documents != PADDING_DOCUMENT
    found, expected = chunked(batch, call, size), dense(call, seen_by(batch))
    torch.testing.assert_close(found[is_used], expected[is_used], rtol=0, atol=1e-11)
    factors = torch.randn_like(expected) * is_used[..., None, None]
    pairs = (torch.autograd.grad((each * factors).sum(), inputs) for each in (found, expected))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_small_differences(kind: str) -> None:
    batch = batch_of(ROW)
    assert batch.tokens.numel() == 15

    def run(*given: Tensor) -> Tensor:
        return chunked(batch, ScanCall(*given, *[None] * (5 - len(given))))  # type: ignore[arg-type]

    call = random_call(batch, kind)
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in call if x is not None])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_reaches_no_text(kind: str) -> None:
    batch = batch_of([*ROW, ROW[0][:1]])
    is_padding = batch.documents == PADDING_DOCUMENT
    assert is_padding.any()
    call, spoilt = random_call(batch, kind), []
    expected = chunked(batch, call)
    for each in call:
        if each is not None:
            each = each.clone()
            each[is_padding] = torch.nan
            each.requires_grad_()
        spoilt.append(each)
    found = chunked(batch, ScanCall(*spoilt))
    assert torch.equal(found, expected)
    found.sum().backward()
    assert all(each.grad[~is_padding].isfinite().all() for each in spoilt if each is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays_stay_finite_in_float32(kind: str) -> None:
    batch = batch_of([[([True] * 70, 4, 1)]])
    call = random_call(batch, kind, strength=100.0)
    assert float(call.decay.sum()) < -10_000
    expected = dense(call, seen_by(batch))
    narrow = [None if each is None else each.float().requires_grad_() for each in call]
    found = chunked(batch, ScanCall(*narrow), 16)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    found.sum().backward()
    assert all(each.grad.isfinite().all() for each in narrow if each is not None)


@settings(max_examples=20)
@given(ROWS, st.integers(1, 5))
def test_a_convolution_reads_the_nearest_ancestors(rows: list[list[Text]], kernel: int) -> None:
    batch, generator = batch_of(rows), torch.Generator().manual_seed(0)
    inputs = torch.randn(*batch.tokens.shape, 2, generator=generator)
    weight = torch.randn(2, kernel, generator=generator)
    found = trees.RowTrees(slots_of(batch)).convolve(ConvolveCall(inputs, weight))
    seen, position = seen_by(batch), batch.position_ids
    distance = position[:, :, None] - position[:, None]
    expected = torch.zeros_like(inputs)
    for back in range(kernel):
        reads = (seen & (distance == back)).float()
        expected += (reads @ inputs) * weight[:, kernel - 1 - back]
    is_used = batch.documents != PADDING_DOCUMENT
    torch.testing.assert_close(found[is_used], expected[is_used])
