"""Tells one model's weights from another's without reading all of them."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mars_platform.checkpoint.metadata import ADAPTER_FILE, METADATA_FILE
from mars_platform.config import read_json
from mars_platform.errors import UserError, one_line


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
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    shape = tensors.get_slice(name).get_shape()
                    is_matrix = len(shape) > 1
                    part = tensors.get_slice(name)[:1] if is_matrix else tensors.get_tensor(name)
                    header = f"{name} {part.dtype} {shape} ".encode()
                    raw = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    sums[name] = hashlib.sha256(header + raw).digest()
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot be read ({one_line(error)}); copy it again") from error
    return hashlib.sha256(b"".join(sums[name] for name in sorted(sums))).hexdigest()


def _sum_of_base(path: Path) -> dict[str, bytes]:
    """Return the sum of the model that an adapter belongs to; nothing for a whole model."""
    if not (path / ADAPTER_FILE).is_file():
        return {}
    base = read_json(path / METADATA_FILE, "copy the adapter's file again").get("base")
    return {"": str(base.get("weights")).encode()} if isinstance(base, dict) else {}
