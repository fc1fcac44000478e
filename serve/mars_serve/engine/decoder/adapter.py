"""An adapter's layers as an engine runs them, in place of those that training runs.

Where the shapes of a step are fixed, to be captured as graphs, the positions of masks cannot be
picked out, since their number differs from step to step. A gate is then set for all
positions, and a step that is known to feed no masks does not compute the product
at all. On a CPU that runs a step eagerly, the product is computed of the masks alone, with as few
operators as possible: at small batches their number decides. Whatever a step feeds, the other
positions get what the model's own layers return, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.layers import GatedEmbedding, GatedLinear
from mars_serve.engine.kernels.adapter import add_low_rank


class StepGate:
    """The positions of a step that the adapter acts at; all layers of a model share one."""

    def __init__(self, mask_token_id: int) -> None:
        self.mask_token_id = mask_token_id
        self.is_mask: Tensor | None = None
        """bool [positions]; None if no position of the step holds the mask."""

    def set(self, ids: Tensor | None) -> None:
        """Set the gate to the token ids of a step, int64 [positions], or to no mask at all."""
        self.is_mask = None if ids is None else ids == self.mask_token_id


class FixedEmbedding(nn.Module):
    """An input embedding in which the mask token has a row of the adapter's own."""

    def __init__(self, gated: GatedEmbedding, gate: StepGate) -> None:
        """Take over the parts of a gated embedding."""
        super().__init__()
        self.base_layer, self.mask_row, self.gate = gated.base_layer, gated.mask_row, gate

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [..., positions], those of the gate, to [..., positions, width]."""
        is_mask = self.gate.is_mask
        if is_mask is None:
            return self.base_layer(ids)  # type: ignore[no-any-return]
        rows: Tensor = self.base_layer(ids.masked_fill(is_mask, 0))  # the id may be past the rows
        return torch.where(is_mask.unsqueeze(-1), self.mask_row, rows)


class FixedLinear(nn.Module):
    """A linear layer with a low-rank product that is added at mask positions."""

    def __init__(
        self, base_layer: nn.Linear, down: Tensor, up: Tensor, scale: float, gate: StepGate
    ) -> None:
        """Add ``scale`` times the product of ``up`` and ``down`` to a layer, at the gate's
        positions.

        ``down`` is [rank, in_features], ``up`` is [out_features, rank]; both are contiguous.
        """
        super().__init__()
        self.base_layer, self.scale, self.gate = base_layer, scale, gate
        self.in_features, self.out_features = down.shape[1], up.shape[0]
        self.down = nn.Parameter(down, requires_grad=False)
        self.up = nn.Parameter(up, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., positions, in_features] to [..., positions, out_features]."""
        outputs: Tensor = self.base_layer(inputs)
        is_mask = self.gate.is_mask
        if is_mask is not None:
            rows = inputs.flatten(0, -2)
            add_low_rank(outputs.flatten(0, -2), rows, self.down, self.up, is_mask, self.scale)
        return outputs


class RowsLinear(nn.Module):
    """A linear layer with a low-rank product of the mask rows alone, for an eager step on a CPU.

    The product is computed in float32: of so few rows it takes half the time of bfloat16.
    """

    def __init__(self, gated: GatedLinear) -> None:
        """Take over the parts of a gated layer."""
        super().__init__()
        self.base_layer, self._gate = gated.base_layer, gated.gate
        self._down = gated.lora_A.weight.detach().float().t().contiguous()  # [in_features, rank]
        up = gated.lora_B.weight.detach().float().t() * gated.scale
        self._up = up.contiguous()  # [rank, out_features]

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        outputs: Tensor = self.base_layer(inputs)
        rows = self._gate.rows
        if len(rows):
            masked = inputs.flatten(0, -2).index_select(0, rows).float()
            added = (masked @ self._down @ self._up).to(outputs.dtype)
            outputs.flatten(0, -2).index_add_(0, rows, added)
        return outputs


def pick_rows(model: PreTrainedModel) -> None:
    """Replace a model's gated linear layers, in place, by ones for eager steps on a CPU."""
    for parent, name, gated in _gated_layers(model):
        setattr(parent, name, RowsLinear(gated))


def fix_shapes(model: PreTrainedModel) -> None:
    """Replace a model's gated layers, in place, by ones whose steps have fixed shapes.

    Their gate, see `step_gate`, has to be set before each step. A model without an adapter stays
    as it is.
    """
    embedding: Any = model.get_input_embeddings()
    if not isinstance(embedding, GatedEmbedding):
        return
    gate = StepGate(embedding.mask_token_id)
    model.set_input_embeddings(FixedEmbedding(embedding, gate))
    for parent, name, gated in _gated_layers(model):
        down, up = gated.lora_A.weight.detach(), gated.lora_B.weight.detach()
        setattr(parent, name, FixedLinear(gated.base_layer, down, up, gated.scale, gate))


def step_gate(model: PreTrainedModel) -> StepGate | None:
    """Return the gate of a model that `fix_shapes` has changed, or None for another model."""
    embedding: Any = model.get_input_embeddings()
    return embedding.gate if isinstance(embedding, FixedEmbedding) else None


def _gated_layers(model: PreTrainedModel) -> list[tuple[nn.Module, str, GatedLinear]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, GatedLinear)
    ]
