"""The interface of attention over paged keys and values, which each backend implements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from mars_platform.mixing.specs import AttentionSpec
from mars_serve.engine.batch import BatchRow, StepBatch


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose sizes are equal, and whose queries see equally far back."""

    num_layers: int
    """Layers with keys and values of their own."""
    heads: int
    """Query heads, a multiple of the key/value heads."""
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """See `AttentionSpec`, as for the next two."""
    chunk: int | None = None
    value_in_key: bool = False

    @property
    def per_kv(self) -> int:
        """Query heads of each key/value head."""
        return self.heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        """Most numbers of a key or value that a matrix product takes at once.

        Up to 64 numbers of a key behind its value are taken apart.
        """
        rest = self.key_dim - self.value_dim
        is_apart = self.value_in_key and rest <= 64
        return max(self.value_dim, rest if is_apart else self.key_dim)

    @property
    def elements_per_token(self) -> int:
        """Most elements of a token's keys and values over all layers, padding included."""
        num_parts = 1 if self.value_in_key else 2
        return num_parts * self.num_layers * self.kv_heads * max(self.key_dim, self.value_dim)

    @property
    def is_bounded(self) -> bool:
        """Whether a query may not see the first tokens of its text."""
        return self.reach is not None

    @property
    def reach(self) -> int | None:
        """Most tokens that a query sees, itself included; None for all."""
        return self.chunk or self.window

    def oldest(self, positions: Any) -> Any:
        """Return the first position that the query at a position sees, or those at an array of
        positions.
        """
        if self.chunk is not None:
            return positions - positions % self.chunk
        first = positions + 1 - (self.window or 2**62)
        return first * (first > 0)

    def pages(self, row: BatchRow) -> list[int]:
        """Return the pages of a row in these layers; see `WindowPages`."""
        return row.window_pages if self.is_bounded else row.pages


class Place(NamedTuple):
    """Where a layer's keys and values are."""

    group: int
    rank: int
    """Number among the group's layers that have their own."""
    is_own: bool
    """Whether the layer writes them; it reads those of an earlier layer otherwise."""


def group_layers(specs: Sequence[AttentionSpec]) -> tuple[list[LayerGroup], dict[int, Place]]:
    """Return the groups of a model's layers, and the place of each layer.

    A layer that shares the keys of one in another group stores them again.
    """
    each = [(*spec.sizes, spec.window, spec.chunk, spec.value_in_key) for spec in specs]
    kinds = list(dict.fromkeys(each))
    counts, places = [0] * len(kinds), dict[int, Place]()
    for spec, kind in zip(specs, each, strict=True):
        group = kinds.index(kind)
        shared = None if spec.shares is None else places[spec.shares]
        if shared is not None and shared.group == group:
            places[spec.layer] = shared._replace(is_own=False)
        else:
            places[spec.layer] = Place(group, counts[group], is_own=True)
            counts[group] += 1
    return [LayerGroup(n, *kind) for n, kind in zip(counts, kinds, strict=True)], places


class Attention(Protocol):
    """An attention backend, which owns the KV cache.

    The rows of a step lie side by side. Each position sees the cached tokens of its request and,
    within its row, the positions that `BatchRow.visible` names. Keys and values of committed tokens
    and drafts are written to the request's pages; those of masks are never read by a later step.
    """

    page_size: int

    def prepare(self, batch: StepBatch) -> Any:
        """Return the attention metadata of a step: tensors on the device that layers share."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        metadata: Any,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_cached: bool = False,
    ) -> Tensor:
        """Attend in one layer of a step, and cache the keys and values of its tokens.

        ``query`` is [positions, heads, key_dim], ``key`` [positions, kv_heads, key_dim], ``value``
        [positions, kv_heads, value_dim], and the result [positions, heads, value_dim]. ``metadata``
        is what `prepare` returned for the step, ``softcap`` the largest size of a score, and
        ``sinks``, [heads], a further score of each head, which has no value. If ``is_cached``, keys
        and values are cached already.
        """

    def recover(self) -> None:
        """Clear numbers that are not finite and may have spread beyond the failed row's pages."""
