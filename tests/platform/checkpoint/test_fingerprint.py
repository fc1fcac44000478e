from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.errors import UserError

WEIGHTS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": torch.ones(2, 2, 2, dtype=torch.bfloat16),
    "c": torch.ones(5),
    "d": torch.tensor(2.0),
}


def save(path: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / name)
    return path


def test_the_fingerprint_does_not_depend_on_the_split_into_files(tmp_path):
    whole = weights_fingerprint(save(tmp_path / "whole", WEIGHTS))
    shards = tmp_path / "shards"
    for name, tensor in WEIGHTS.items():
        save(shards, {name: tensor}, f"z-{name}.safetensors")
    assert weights_fingerprint(shards) == whole
    assert len(whole) == 64


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.arange(12.0).reshape(3, 4) + 1},
        {"a": torch.arange(12.0).reshape(2, 6)},
        {"a": torch.arange(12.0).reshape(3, 4).double()},
        {"b": 2 * torch.ones(2, 2, 2, dtype=torch.bfloat16)},
        {"c": torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0])},
        {"d": torch.tensor(3.0)},
        {"e": torch.ones(1)},
    ],
)
def test_other_weights_have_another_fingerprint(tmp_path, changed):
    ours = weights_fingerprint(save(tmp_path / "ours", WEIGHTS))
    assert weights_fingerprint(save(tmp_path / "theirs", WEIGHTS | changed)) != ours


def test_damaged_weights_are_refused(tmp_path):
    file = save(tmp_path, WEIGHTS) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        weights_fingerprint(tmp_path)
