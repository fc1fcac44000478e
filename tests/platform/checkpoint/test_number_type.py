import json

import pytest
import torch
from safetensors.torch import save_file

from mars_platform.checkpoint.number_type import is_bfloat16_slow, stored_dtype
from mars_platform.errors import UserError


def write(path, config, **tensors):
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tensors:
        save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_configuration_decides(tmp_path, key, dtype):
    assert stored_dtype(write(tmp_path, {key: dtype}, a=torch.ones(2, dtype=torch.half))) == dtype


def test_without_it_the_widest_tensor_decides(tmp_path):
    narrow, wide = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    assert stored_dtype(write(tmp_path, {}, a=narrow)) == "bfloat16"
    assert stored_dtype(write(tmp_path, {}, a=narrow, b=wide)) == "float32"
    assert stored_dtype(write(tmp_path, {"dtype": None}, a=narrow.half())) == "float16"


def test_other_types_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"dtype float64 cannot be served.*dtype: float32"):
        stored_dtype(write(tmp_path, {"dtype": "float64"}))
    with pytest.raises(UserError, match="nowhere"):
        stored_dtype(write(tmp_path, {}, a=torch.ones(2, dtype=torch.float64)))


def test_damaged_weights_are_refused(tmp_path):
    write(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match="copy it again"):
        stored_dtype(tmp_path)


@pytest.mark.parametrize(
    ("flags", "is_slow"),
    [
        ("flags\t\t: fpu avx2 avx512f", True),
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", False),
        ("flags\t\t: fpu amx_tile amx_bf16", False),
        ("Features\t: fp asimd bf16", False),
        ("Features\t: fp asimd", True),
    ],
)
def test_a_processor_without_instructions_for_bfloat16_is_slow_at_it(tmp_path, flags, is_slow):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n", encoding="utf-8")
    assert is_bfloat16_slow(tmp_path / "cpuinfo") == is_slow


def test_a_processor_of_which_nothing_is_known_is_not_called_slow(tmp_path):
    assert not is_bfloat16_slow(tmp_path / "cpuinfo")
