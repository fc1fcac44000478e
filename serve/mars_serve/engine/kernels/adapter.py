"""The operator that adds an adapter's product to a layer's output at the positions of masks.

It has a twin in plain torch, which other devices run and which is the oracle of the Triton kernel.
Rows of other positions are neither read nor written, so that they keep their bits.
"""

import torch
from torch import Tensor


def add_low_rank(
    outputs: Tensor, inputs: Tensor, down: Tensor, up: Tensor, is_mask: Tensor, scale: float
) -> None:
    """Add ``scale * up @ down @ inputs[i]`` to ``outputs[i]`` where the gate is open, in place.

    Args:
        outputs: [positions, out_features], contiguous.
        inputs: [positions, in_features], contiguous.
        down: [rank, in_features], contiguous.
        up: [out_features, rank], contiguous.
        is_mask: bool [positions], the gate.
        scale: factor of the product.
    """
    torch.ops.marsray.add_low_rank.default(outputs, inputs, down, up, is_mask, scale)


def add_low_rank_twin(
    outputs: Tensor, inputs: Tensor, down: Tensor, up: Tensor, is_mask: Tensor, scale: float
) -> None:
    """See `add_low_rank`; only the product of the masks is computed."""
    rows = is_mask.nonzero().squeeze(-1)
    low = inputs.index_select(0, rows) @ down.t()
    outputs.index_add_(0, rows, low @ up.t(), alpha=scale)


def _nothing(*_: object) -> None:
    return None


torch.library.define(
    "marsray::add_low_rank",
    "(Tensor(a!) outputs, Tensor inputs, Tensor down, Tensor up, Tensor is_mask, float scale) "
    "-> ()",
)
# The kernel takes its place on a GPU, unless attention gathers pages, perhaps for want of Triton.
torch.library.impl("marsray::add_low_rank", "CompositeExplicitAutograd", add_low_rank_twin)
torch.library.register_fake("marsray::add_low_rank", _nothing)
