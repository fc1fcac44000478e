"""The layers of adapters as an engine runs them, in place of those that training runs.

A *draft adapter* acts at the positions of masks. A *LoRA adapter* acts at every position of its
rows; it lies in one of a fixed number of slots, which rows name, so that a step may mix them. A
layer holds the products of all slots as two tensors.

Where the shapes of a step are fixed, to be captured as graphs, the positions of a product cannot be
picked out, since their number differs from step to step. Each position then names its slot, and
a step that is known to need no product does not compute any. Another step computes the products of
the positions alone that get one, with as few operators as possible: at small batches their number
decides. Whatever a step feeds, the other positions get what the model's own layers return, bit for
bit.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mars_platform.checkpoint.adapter.layers import GatedEmbedding, GatedLinear
from mars_platform.checkpoint.adapter.lora import LoraWeights
from mars_platform.mixing.head import layers_of
from mars_platform.mixing.latent import EXPANSION, is_latent
from mars_serve.engine.kernels.adapter import add_low_rank

_FEWEST = 3
"""Groups of positions from which on one table of all is quicker."""
_MOST_PADDED = 3
"""Most entries of such a table for each position."""
NO_SLOT = -1
"""Number that stands for no slot, at positions without a product."""


class PaddedGroups(NamedTuple):
    """Positions by slot, as many of each slot, so that one operator computes all products."""

    table: Tensor
    """int64 [slots * n], the positions of each slot, then any position."""
    kept: Tensor
    """int64 [positions], the entries of the table that stand for a position of their slot."""
    positions: Tensor
    """int64 [positions], these positions."""

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Tensor]], num_slots: int) -> "PaddedGroups | None":
        """Return the table of some groups, or None if it would be mostly padding."""
        longest = max((len(rows) for _, rows in groups), default=0)
        positions = [rows for _, rows in groups]
        if len(groups) < _FEWEST or num_slots * longest > _MOST_PADDED * sum(map(len, positions)):
            return None
        table = positions[0].new_zeros(num_slots, longest)
        for slot, rows in groups:
            table[slot, : len(rows)] = rows
        kept = [slot * longest + index for slot, rows in groups for index in range(len(rows))]
        return cls(table.flatten(), table.new_tensor(kept), torch.cat(positions))


class Gate:
    """The positions of a step at which layers add products; all layers of one kind share one."""

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        """int64 [positions], the slot of each position or `NO_SLOT`; None if no position has any.
        """
        self.groups: list[tuple[int, Tensor]] = []
        """In steps whose shapes are free, each slot with its positions, int64 [n]."""
        self.padded: PaddedGroups | None = None
        """The same groups in one table, where that is quicker."""

    def set(self, slots: Tensor | None, *, is_fixed: bool, num_slots: int = 0) -> None:
        """Set the gate for the next step, in layers that have ``num_slots``."""
        self.slots, self.groups, self.padded = slots, [], None
        if slots is not None and not is_fixed:
            found = sorted(set(slots.tolist()) - {NO_SLOT})
            self.groups = [(slot, (slots == slot).nonzero().squeeze(-1)) for slot in found]
            self.padded = PaddedGroups.of(self.groups, num_slots)


class SlotLinear(nn.Module):
    """A linear layer to which the product of a slot is added at each position of a gate."""

    def __init__(self, base_layer: nn.Module, down: Tensor, up: Tensor, gate: Gate) -> None:
        """Add products to a layer; ``up`` has their scale.

        ``down`` is [slots, rank, in_features], ``up`` is [slots, rank, out_features].
        """
        super().__init__()
        self.base_layer, self.gate = base_layer, gate
        self.in_features, self.out_features = down.shape[2], up.shape[2]
        self.down, self.up = down.contiguous(), up.contiguous()
        self._ranks = [down.shape[1]] * len(down)

    def load(self, slot: int, product: tuple[Tensor, Tensor] | None, scale: float) -> None:
        """Put a product, ``down`` [rank, in_features] and ``up`` [out_features, rank], into a slot,
        or none.
        """
        self.down[slot].zero_()
        self.up[slot].zero_()
        self._ranks[slot] = 0
        if product is not None:
            down, up = product
            self._ranks[slot] = rank = len(down)
            self.down[slot, :rank].copy_(down)
            self.up[slot, :rank].copy_(up.t().float() * scale)


class FixedLinear(SlotLinear):
    """A layer with slots in steps whose shapes are fixed."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., positions, in_features] to [..., positions, out_features]."""
        outputs: Tensor = self.base_layer(inputs)
        slots = self.gate.slots
        if slots is not None:
            rows = inputs.flatten(0, -2)
            add_low_rank(outputs.flatten(0, -2), rows, self.down, self.up, slots)
        return outputs


class RowsLinear(SlotLinear):
    """A layer with slots that computes the products of the rows alone that get one.

    They are computed in float32: of few rows it takes half the time of bfloat16 on a CPU.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        outputs: Tensor = self.base_layer(inputs)
        if (padded := self.gate.padded) is not None:
            own = inputs.flatten(0, -2).index_select(0, padded.table).float()
            low = own.view(len(self.down), -1, self.in_features) @ self.down.transpose(1, 2)
            added = (low @ self.up).flatten(0, 1).index_select(0, padded.kept)
            outputs.flatten(0, -2).index_add_(0, padded.positions, added.to(outputs.dtype))
            return outputs
        for slot, rows in self.gate.groups:
            if rank := self._ranks[slot]:
                own = inputs.flatten(0, -2).index_select(0, rows).float()
                added = own @ self.down[slot, :rank].t() @ self.up[slot, :rank]
                outputs.flatten(0, -2).index_add_(0, rows, added.to(outputs.dtype))
        return outputs


class StepAdapters:
    """The adapters of a model's layers, and the positions of a step that they act at."""

    def __init__(
        self,
        mask_token_id: int | None,
        mask_rows: Tensor,
        *,
        is_fixed: bool,
        embedding_scale: float | Tensor = 1.0,
    ) -> None:
        """Start with empty slots for LoRA adapters.

        ``mask_rows`` are what the embedding gives for the mask, [slots + 1, width]; the last is for
        rows whose adapter has none of its own. ``embedding_scale`` is the factor between its
        weights and what it gives. ``is_fixed`` says that the shapes of steps are.
        """
        self.mask_token_id, self.is_fixed = mask_token_id, is_fixed
        self.embedding_scale = embedding_scale
        self.num_slots = len(mask_rows) - 1
        self.mask_rows = mask_rows
        self.has_own_row = torch.zeros(len(mask_rows), dtype=torch.bool, device=mask_rows.device)
        """bool [slots + 1], whether the mask has a row of its own there."""
        self.layers: dict[str, SlotLinear] = {}
        """Layers with slots, by their whole names."""
        self.drafts, self.loras = Gate(), Gate()
        self.is_mask: Tensor | None = None
        """bool [positions] of the step; None if no position holds the mask."""
        self.mask_sources: Tensor | None = None
        """int64 [positions], the index in ``mask_rows`` of each position; None for the last one."""

    def set(self, ids: Tensor | None, slots: Tensor | None) -> None:
        """Say what the next step feeds.

        ``ids`` are its token ids, int64 [positions], or None if none is the mask. ``slots`` are
        those of LoRA adapters, int64 [positions], or None if no row has one.
        """
        self.is_mask, self.mask_sources, drafts = None, None, None
        if ids is not None:
            assert self.mask_token_id is not None, "only a model with a mask token feeds masks"
            self.is_mask = is_draft = ids == self.mask_token_id
            if slots is not None:
                has_own_row = self.has_own_row[slots]
                self.mask_sources = torch.where(has_own_row, slots, NO_SLOT)
                is_draft = is_draft & ~has_own_row
            drafts = is_draft.long() - 1
        self.drafts.set(drafts, is_fixed=self.is_fixed)
        self.loras.set(slots, is_fixed=self.is_fixed, num_slots=self.num_slots)

    @torch.inference_mode()
    def load(self, slot: int, weights: LoraWeights) -> None:
        """Put a LoRA adapter, which fits the model, into a slot that no running row names."""
        assert weights.products.keys() <= self.layers.keys(), "the engine adapts what models have"
        for name, layer in self.layers.items():
            layer.load(slot, weights.products.get(name), weights.scale)
        self.has_own_row[slot] = weights.mask_row is not None
        if weights.mask_row is not None:
            self.mask_rows[slot].copy_(weights.mask_row.to(self.mask_rows) * self.embedding_scale)


class MaskEmbedding(nn.Module):
    """An input embedding in which the mask token has rows of adapters' own."""

    def __init__(self, base_layer: nn.Module, adapters: StepAdapters) -> None:
        super().__init__()
        self.base_layer, self.adapters = base_layer, adapters

    @property
    def weight(self) -> Tensor:
        """Rows of the model's own embedding, which some decoders ask for their number type."""
        return self.base_layer.get_parameter("weight")

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [..., positions], those of the step, to [..., positions, width]."""
        is_mask, sources = self.adapters.is_mask, self.adapters.mask_sources
        if is_mask is None:
            return self.base_layer(ids)  # type: ignore[no-any-return]
        rows: Tensor = self.base_layer(ids.masked_fill(is_mask, 0))  # the id may be past the rows
        masks = self.adapters.mask_rows[NO_SLOT if sources is None else sources]
        return torch.where(is_mask.unsqueeze(-1), masks, rows)


@torch.inference_mode()
def adapt_layers(
    model: PreTrainedModel,
    mask_token_id: int | None = None,
    *,
    is_fixed: bool,
    num_slots: int = 0,
    rank: int = 0,
) -> None:
    """Replace a model's adapted layers, in place, by those that an engine's steps run.

    With ``num_slots``, the other layers that LoRA adapters of at most ``rank`` may change are
    replaced as well. `step_adapters` has to be set before each step. A model without adapters or
    slots stays as it is.
    """
    embedding: Any = model.get_input_embeddings()
    is_gated = isinstance(embedding, GatedEmbedding)
    if not (is_gated or num_slots):
        return
    if is_gated:
        mask_token_id, row = embedding.mask_token_id, embedding.mask_row.detach()
        embedding = embedding.base_layer
    else:
        # A mask past the model's own rows is one of LoRA adapters alone.
        known = mask_token_id if (mask_token_id or 0) < len(embedding.weight) else 0
        row = embedding(torch.tensor([known or 0], device=model.device))
    adapters = StepAdapters(
        *(mask_token_id, row.repeat(num_slots + 1, 1)),
        is_fixed=is_fixed,
        embedding_scale=getattr(embedding, "embed_scale", 1.0),
    )
    model.set_input_embeddings(MaskEmbedding(embedding, adapters))
    kind: type[SlotLinear] = FixedLinear if is_fixed else RowsLinear
    dtype = model.dtype if is_fixed else torch.float32
    for parent, name, layer in list(_adaptable(model)):
        inner: Any = layer
        if isinstance(layer, GatedLinear):
            down, up = (each.weight.to(dtype) for each in (layer.lora_A, layer.lora_B))
            up = up.t()[None] * layer.scale
            inner = kind(layer.base_layer, down[None], up, adapters.drafts)
        if num_slots:
            down = layer.weight.new_zeros(num_slots, rank, inner.in_features, dtype=dtype)
            up = layer.weight.new_zeros(num_slots, rank, inner.out_features, dtype=dtype)
            inner = kind(inner, down, up, adapters.loras)
        setattr(parent, name, inner)
    if num_slots:
        adapters.layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, kind) and layer.gate is adapters.loras
        }


def bytes_of_slot(model: PreTrainedModel, rank: int) -> int:
    """Return the bytes that a slot for LoRA adapters takes beside a model's weights on a GPU."""
    layers = (getattr(each, "base_layer", each) for _, _, each in _adaptable(model))
    num_features = sum(layer.in_features + layer.out_features for layer in layers)
    return int(rank * model.dtype.itemsize * num_features)


def step_adapters(model: PreTrainedModel) -> StepAdapters | None:
    """Return the adapters of a model that `adapt_layers` has changed, or None for another model."""
    embedding: Any = model.get_input_embeddings()
    return embedding.adapters if isinstance(embedding, MaskEmbedding) else None


def _adaptable(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the linear layers, adapted or not, that adapters may change, with parents and names."""
    for parent in layers_of(model).modules():
        for name, child in parent.named_children():
            is_linear = type(child) is nn.Linear and not isinstance(parent, GatedLinear)
            if isinstance(child, GatedLinear) or (
                is_linear and not (name == EXPANSION and is_latent(parent))
            ):
                yield parent, name, child
