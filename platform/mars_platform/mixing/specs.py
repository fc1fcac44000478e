"""Describes what the layers of a model ask of attention, as their calls have shown it.

Imports no Ray or HTTP library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple


class Temperature(NamedTuple):
    """Scaling of queries with the logarithm of their positions, which begins at 1."""

    floor: float
    """Tokens from one factor to the next."""
    factor: float

    def scale(self, positions: Any) -> Any:
        """Return the factors at a tensor of positions."""
        return ((positions + 1) / self.floor).floor().log1p() * self.factor + 1.0


class Trait(StrEnum):
    """Differences of a layer's attention from full causal attention with one size of heads."""

    WINDOW = "a sliding window"
    CHUNK = "attention within chunks"
    SOFTCAP = "capped scores"
    SINKS = "attention sinks"
    TEMPERATURE = "queries scaled by their positions"
    VALUE_DIM = "keys and values of different sizes"
    UNEQUAL = "other sizes than the first layer"
    REPEATED = "attention more than once a pass"


@dataclass(frozen=True)
class AttentionSpec:
    """The attention that one layer asks for in one of its calls."""

    layer: int
    """Index that the layer gives itself."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    key_dim: int
    """Numbers in a head's key, as in its query."""
    value_dim: int
    """Numbers in a head's value."""
    window: int | None = None
    """Last tokens that a query sees, itself included; None for all."""
    chunk: int | None = None
    """Tokens of the chunks within which queries see; None for no chunks."""
    softcap: float | None = None
    """Largest size of a score; None for any."""
    has_sinks: bool = False
    """Whether each head has a further score, which has no value."""
    value_in_key: bool = False
    """Whether the value is the beginning of the key; see `mars_platform.mixing.latent`."""
    temperature: Temperature | None = None
    shares: int | None = None
    """Layer whose keys and values this one reads; None if it has its own."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Query heads, key/value heads, and the sizes of keys and values."""
        return self.heads, self.kv_heads, self.key_dim, self.value_dim

    def within(self, max_length: int) -> AttentionSpec:
        """Return what the layer asks for in texts of up to ``max_length`` tokens."""
        window, chunk = (
            size if size is not None and size < max_length else None
            for size in (self.window, self.chunk)
        )
        return replace(self, window=window, chunk=chunk)

    def traits(self, max_length: int) -> set[Trait]:
        """Return the traits that show in texts of up to ``max_length`` tokens."""
        spec = self.within(max_length)
        shown = {
            Trait.WINDOW: spec.window is not None,
            Trait.CHUNK: spec.chunk is not None,
            Trait.SOFTCAP: self.softcap is not None,
            Trait.SINKS: self.has_sinks,
            Trait.TEMPERATURE: self.temperature is not None
            and self.temperature.floor <= max_length,
            Trait.VALUE_DIM: self.key_dim != self.value_dim,
        }
        return {trait for trait, is_shown in shown.items() if is_shown}


def beyond(
    specs: Sequence[AttentionSpec], supported: Collection[Trait], max_length: int
) -> str | None:
    """Return which layers have a trait that is not supported, in words; None if none has.

    Traits count if they show in texts of up to ``max_length`` tokens.
    """
    layers: dict[Trait, dict[int, None]] = {}
    calls = Counter(spec.layer for spec in specs)
    for spec in specs:
        own = spec.traits(max_length)
        if spec.sizes != specs[0].sizes:
            own.add(Trait.UNEQUAL)
        if calls[spec.layer] > 1:
            own.add(Trait.REPEATED)
        for trait in sorted(own - set(supported)):
            layers.setdefault(trait, {})[spec.layer] = None
    found = [f"{trait} in layers {str([*where][:4])[1:-1]}" for trait, where in layers.items()]
    return f"it has {' and '.join(found)}, which is not supported" if found else None
