"""Saves the tensors of a distributed run as one safetensors file per worker.

Any number of workers can load them. Tensors that every worker holds whole are divided among the
workers for writing. If FSDP2 shards a tensor, every worker writes its own rows. Imports no Ray.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

_PATTERN = "shard-*.safetensors"


def save_shards(directory: Path, tensors: Mapping[str, Tensor], rank: int, num_ranks: int) -> None:
    """Write this worker's part; every worker must pass the tensors in the same order."""
    own: dict[str, Tensor] = {}
    first_rows: dict[str, int] = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if isinstance(tensor, DTensor):
            own[name], first_rows[name] = tensor.to_local(), _first_row(tensor)
        elif index % num_ranks == rank:
            own[name] = tensor
    content = {name: tensor.detach().contiguous().cpu() for name, tensor in own.items()}
    file = directory / f"shard-{rank:05d}-of-{num_ranks:05d}.safetensors"
    save_file(content, file, metadata={"first_rows": json.dumps(first_rows)})


def load_shards(directory: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill the targets in place from the files of any number of workers."""
    with ExitStack() as stack, torch.no_grad():
        pieces = _find_pieces(directory, stack)
        for name, target in targets.items():
            if isinstance(target, DTensor):
                local = target.to_local()
                if local.numel():
                    first = _first_row(target)
                    local.copy_(_read_rows(pieces[name], name, first, first + local.shape[0]))
            elif target.dim() == 0:
                target.copy_(pieces[name][0].file.get_tensor(name))
            else:
                target.copy_(_read_rows(pieces[name], name, 0, target.shape[0]))


@dataclass(frozen=True)
class _Piece:
    file: Any
    first: int
    end: int


def _find_pieces(directory: Path, stack: ExitStack) -> dict[str, list[_Piece]]:
    pieces: dict[str, list[_Piece]] = {}
    for path in sorted(directory.glob(_PATTERN)):
        file = stack.enter_context(safe_open(path, framework="pt"))
        first_rows = json.loads((file.metadata() or {}).get("first_rows", "{}"))
        for name in file.keys():  # noqa: SIM118 - not a mapping
            shape, first = file.get_slice(name).get_shape(), first_rows.get(name, 0)
            pieces.setdefault(name, []).append(_Piece(file, first, first + (shape or [1])[0]))
    return pieces


def _read_rows(pieces: list[_Piece], name: str, first: int, end: int) -> Tensor:
    parts = [
        piece.file.get_slice(name)[
            max(first, piece.first) - piece.first : min(end, piece.end) - piece.first
        ]
        for piece in sorted(pieces, key=lambda piece: piece.first)
        if piece.first < end and first < piece.end
    ]
    return torch.cat(parts)


def _first_row(tensor: DTensor) -> int:
    """Return the first row of this worker's shard; FSDP2 splits rows as ``torch.chunk`` does."""
    assert tuple(tensor.placements) == (Shard(0),), "FSDP2 shards along the first dimension"
    rows, num_shards = tensor.shape[0], tensor.device_mesh.size()
    return min(tensor.device_mesh.get_local_rank() * -(-rows // num_shards), rows)
