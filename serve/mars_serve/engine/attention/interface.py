"""The interface of attention over paged keys and values, which each backend implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mars_platform.mixing.specs import AttentionSpec
from mars_serve.engine.batch import StepBatch


@dataclass(frozen=True)
class KeyValueShape:
    """Numbers of layers and key/value heads of a model, and the size of a head."""

    num_layers: int
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, specs: Sequence[AttentionSpec]) -> KeyValueShape:
        """Return the shape of a model whose layers attend alike."""
        first = specs[0]
        return cls(1 + max(spec.layer for spec in specs), first.kv_heads, first.key_dim)

    @property
    def elements_per_token(self) -> int:
        """Number of elements of a token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim


class Attention(Protocol):
    """An attention backend, which owns the KV cache.

    The rows of a step lie side by side. Each position sees the cached tokens of its request and,
    within its row, the positions that `BatchRow.visible` names. Keys and values of committed tokens
    and drafts are written to the request's pages; those of masks are never read by a later step.
    """

    page_size: int
    """Tokens in a page."""

    def prepare(self, batch: StepBatch) -> Any:
        """Return the attention metadata of a step: tensors on the device that all layers share."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, metadata: Any
    ) -> Tensor:
        """Attend in one layer of a step, and cache the keys and values of its tokens.

        Args:
            layer: index of the layer.
            query: [positions, heads, head_dim].
            key: [positions, kv_heads, head_dim].
            value: [positions, kv_heads, head_dim].
            scaling: factor of the scores.
            metadata: what `prepare` returned for the step.

        Returns:
            [positions, heads, head_dim].
        """

    def recover(self) -> None:
        """Clear numbers that are not finite and may have spread beyond the failed row's pages."""
