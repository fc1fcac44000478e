from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from mars_serve.engine.execution.staging import pack, stage, unpack


@dataclass(frozen=True)
class Inner:
    mask: Tensor
    missing: Tensor | None
    count: int


@dataclass(frozen=True)
class Outer:
    shares: Tensor
    inner: Inner
    ids: Tensor


STRUCT = Outer(
    shares=torch.tensor([0.25, 1.0, 2.0]),
    inner=Inner(mask=torch.tensor([True]), missing=None, count=3),
    ids=torch.arange(5),
)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.arange(3)],
        [torch.tensor([0.25, 1.0, 2.0]), torch.arange(5), torch.tensor([True]), torch.arange(0)],
        [torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([[1.5]], dtype=torch.float64)],
    ],
)
def test_packed_tensors_unpack_to_the_same(tensors: list[Tensor]) -> None:
    for before, after in zip(tensors, unpack(pack(tensors, pinned=False), tensors), strict=True):
        assert before.dtype == after.dtype
        assert before.equal(after)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "meta",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ),
    ],
)
def test_all_tensors_of_a_dataclass_are_staged(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "meta":  # pinned memory needs a GPU
        monkeypatch.setattr(
            "mars_serve.engine.execution.staging.pack",
            lambda tensors, **_: pack(tensors, pinned=False),
        )
    staged = stage(STRUCT, torch.device(device))
    assert (staged.inner.missing, staged.inner.count) == (None, 3)
    for before, after in (
        (STRUCT.shares, staged.shares),
        (STRUCT.inner.mask, staged.inner.mask),
        (STRUCT.ids, staged.ids),
    ):
        assert after.device.type == device
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        assert device == "meta" or before.equal(after.cpu())
    assert [field.name for field in fields(staged)] == ["shares", "inner", "ids"]
