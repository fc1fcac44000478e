"""Describes what the layers of a model ask of attention, as their calls have shown it.

Imports no Ray or HTTP library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Temperature(NamedTuple):
    """Scaling of queries with the logarithm of their positions, which begins at 1."""

    floor: float
    """Tokens from one factor to the next."""
    factor: float

    def scale(self, positions: Any) -> Any:
        """Return the factors at a tensor of positions."""
        return ((positions + 1) / self.floor).floor().log1p() * self.factor + 1.0


@dataclass(frozen=True)
class AttentionSpec:
    """The attention that one layer asks for in one of its calls."""

    layer: int
    """Index that the layer gives itself."""
    heads: int
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


@dataclass(frozen=True)
class ScanSpec:
    """The states that one layer has; see `mars_platform.mixing.recurrent.ScanCall`."""

    heads: int
    key_dim: int
    """Rows of a head's state."""
    value_dim: int
    """Columns of a head's state."""
    is_delta: bool
    """Whether a value is learned at a rate, by what the state lacks; else it is added."""
    decay_per_channel: bool
    """Whether each row of a state decays by itself."""


@dataclass(frozen=True)
class ConvSpec:
    """The convolution of one layer over the last positions."""

    channels: int
    kernel: int
    """Positions in each sum, its own included."""


class LayerSpecs(NamedTuple):
    """All that a model's layers ask for."""

    attention: tuple[AttentionSpec, ...]
    """Attention of each layer that attends, in the order of the layers."""
    scans: tuple[ScanSpec, ...]
    """States of each layer that has some, in the order of the calls."""
    convolutions: tuple[ConvSpec, ...]
    """Convolution of each layer that has one, in the order of the calls."""
