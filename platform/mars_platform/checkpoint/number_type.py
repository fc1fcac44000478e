"""Reads in which number type a checkpoint is stored, and tells which one is slow here.

Imports no Ray, torch or HTTP library.
"""

from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open

from mars_platform.config import read_json
from mars_platform.errors import UserError, one_line

NumberType = Literal["float32", "bfloat16", "float16"]
"""Number types of weights that are trained and served, by torch's names."""

_HEADER_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_WIDENING: tuple[NumberType, ...] = ("float16", "bfloat16", "float32")
_FAST_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "asimdbf16"}
"""Flags of x86 and ARM processors that multiply bfloat16 natively."""
_REMEDY = "copy the checkpoint's file again"


def stored_dtype(path: Path) -> NumberType:
    """Return the number type of a checkpoint directory's weights.

    It stands in ``config.json`` as ``dtype`` or ``torch_dtype``; if it does not, the header of the
    weights decides, with the widest type of its tensors.

    Raises:
        UserError: a file cannot be read, or the type is none of `NumberType`.
    """
    file = path / "config.json"
    config: dict[str, Any] = read_json(file, _REMEDY)
    named = config.get("dtype") or config.get("torch_dtype")
    if named is None:
        return _dtype_of_tensors(path)
    for dtype in get_args(NumberType):
        if str(named).removeprefix("torch.") == dtype:
            return dtype  # type: ignore[no-any-return]
    raise UserError(f"{file}: dtype {named!s:.40} cannot be served as it is; set dtype: float32")


def is_bfloat16_slow(processors: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether products in bfloat16 take many times as long as in float32 on this processor.

    Processors without instructions for such products, on x86 AVX-512 BF16 or AMX, are slow. Without
    the file ``processors``, which lists flags, nothing is known, and none is called slow.
    """
    if not processors.is_file():
        return False
    return _FAST_FLAGS.isdisjoint(processors.read_text(encoding="utf-8").split())


def _dtype_of_tensors(path: Path) -> NumberType:
    found = set()
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy") as tensors:
                names = list(tensors.keys())
                found |= {_HEADER_NAMES.get(tensors.get_slice(name).get_dtype()) for name in names}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read ({one_line(error)}); copy it again") from error
    for dtype in reversed(_WIDENING):
        if dtype in found:
            return dtype
    raise UserError(
        f"model: {path} says nowhere in which number type it is; set dtype: float32, or another"
    )
