"""Tells one model's weights from another's without reading all of them.

Imports no Ray, torch or HTTP library.
"""

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mars_platform.checkpoint.metadata import ADAPTER_FILE, DRAFT_HEAD_FILE, METADATA_FILE
from mars_platform.config import read_json
from mars_platform.errors import UserError, one_line

_TORCH_NAMES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Number types by their names in safetensors' files."""


def weights_fingerprint(path: Path) -> str:
    """Return a SHA-256 sum, in hexadecimal, that identifies the weights of a checkpoint directory.

    It covers the name, type and shape of every tensor and the first row of each matrix, not all
    bytes: reading a large model takes longer than loading it. Training changes every matrix and
    therefore the sum; editing a few weights by hand may not. In an adapter's directory it covers
    the sum of the adapter's model as well, which ``mars.json`` names.

    Raises:
        UserError: a weights file, or an adapter's ``mars.json``, is damaged.
    """
    sums = _sum_of_base(path)
    for file in (*path.glob("*.safetensors"), *path.glob(DRAFT_HEAD_FILE)):
        try:
            sums |= _sums_of_tensors(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read ({one_line(error)}); copy it again") from error
    return hashlib.sha256(b"".join(sums[name] for name in sorted(sums))).hexdigest()


def _sums_of_tensors(file: Path) -> dict[str, bytes]:
    """Return the sum of each tensor in a file, by its name.

    The bytes are read as the format lays them out (a header's length, its JSON, the tensors), since
    the library gives those of bfloat16 to nobody but torch, which takes seconds to import.
    """
    sums = dict[str, bytes]()
    with safe_open(file, framework="numpy"), file.open("rb") as content:  # refuses a damaged file
        length = int.from_bytes(content.read(8), "little")
        tensors = json.loads(content.read(length))
        tensors.pop("__metadata__", None)
        for name, entry in tensors.items():
            (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], entry["dtype"]
            size = (end - begin) // max(shape[0], 1) if len(shape) > 1 else end - begin
            content.seek(8 + length + begin)
            header = f"{name} torch.{_TORCH_NAMES.get(dtype, dtype)} {shape} ".encode()
            sums[name] = hashlib.sha256(header + content.read(size)).digest()
    return sums


def _sum_of_base(path: Path) -> dict[str, bytes]:
    """Return the sum of the model that an adapter belongs to; nothing for a whole model."""
    if not (path / ADAPTER_FILE).is_file():
        return {}
    base = read_json(path / METADATA_FILE, "copy the adapter's file again").get("base")
    return {"": str(base.get("weights")).encode()} if isinstance(base, dict) else {}
