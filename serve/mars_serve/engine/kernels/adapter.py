"""The operator that adds low-rank products to a layer's output, at some positions of a step.

A layer has slots, each with a product, and each position names the slot whose product it gets. It
has a twin in plain torch, which other devices run and which is the oracle of the Triton kernel.
Rows of positions without a product are not written, so that they keep their bits.
"""

import torch
from torch import Tensor


def add_low_rank(outputs: Tensor, inputs: Tensor, down: Tensor, up: Tensor, slots: Tensor) -> None:
    """Add ``inputs[i] @ down[s].T @ up[s]`` to ``outputs[i]`` where s is ``slots[i]``, in place.

    Args:
        outputs: [positions, out_features], contiguous.
        inputs: [positions, in_features], contiguous.
        down: [slots, rank, in_features], contiguous.
        up: [slots, rank, out_features], contiguous, with the product's scale.
        slots: int64 [positions]; a position whose number is -1 gets no product.
    """
    torch.ops.marsray.add_low_rank.default(outputs, inputs, down, up, slots)


def add_low_rank_twin(
    outputs: Tensor, inputs: Tensor, down: Tensor, up: Tensor, slots: Tensor
) -> None:
    """See `add_low_rank`; only the products that positions get are computed."""
    for slot in set(slots.tolist()) - {-1}:
        rows = (slots == slot).nonzero().squeeze(-1)
        low = inputs.index_select(0, rows) @ down[slot].t()
        outputs.index_add_(0, rows, low @ up[slot])


def _nothing(*_: object) -> None:
    return None


torch.library.define(
    "marsray::add_low_rank",
    "(Tensor(a!) outputs, Tensor inputs, Tensor down, Tensor up, Tensor slots) -> ()",
)
# The kernel takes its place on a GPU, unless attention gathers pages, perhaps for want of Triton.
torch.library.impl("marsray::add_low_rank", "CompositeExplicitAutograd", add_low_rank_twin)
torch.library.register_fake("marsray::add_low_rank", _nothing)
