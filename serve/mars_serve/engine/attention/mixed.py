"""Attention of models whose layers differ: each group of layers has a backend of its own."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mars_serve.engine.attention.interface import Attention, Place
from mars_serve.engine.attention.paged import PagedAttention, PagedMetadata
from mars_serve.engine.attention.plan import Numbers, StepShape
from mars_serve.engine.batch import StepBatch

_Backend = TypeVar("_Backend", bound=Attention)


class MixedAttention(Generic[_Backend]):
    """Attends in each layer by its group's backend; see `Attention`."""

    def __init__(self, backends: Sequence[_Backend], places: Mapping[int, Place]) -> None:
        """Take a backend for each group, with pages of one size, and the place of each layer."""
        self.backends, self._places = backends, places
        self.page_size = backends[0].page_size

    def prepare(self, batch: StepBatch) -> list[Any]:
        """See `Attention.prepare`."""
        return [backend.prepare(batch) for backend in self.backends]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        metadata: Sequence[Any],
        softcap: float | None = None,
        sinks: Tensor | None = None,
        is_cached: bool = False,
    ) -> Tensor:
        """See `Attention.attend`."""
        group, rank, is_own = self._places[layer]
        return self.backends[group].attend(
            *(rank, query, key, value, scaling, metadata[group], softcap, sinks),
            is_cached=is_cached or not is_own,
        )

    def recover(self) -> None:
        """See `Attention.recover`."""
        for backend in self.backends:
            backend.recover()


class MixedPagedAttention(MixedAttention[PagedAttention]):
    """Attends over pages in place, in groups of layers; see `PagedAttention`."""

    def sizes(self, shape: StepShape) -> list[int]:
        """Return the integers of each group's metadata."""
        return [sum(backend.sizes(shape)) for backend in self.backends]

    def pack(self, batch: StepBatch, shape: StepShape, numbers: Numbers) -> None:
        """See `PagedAttention.pack`."""
        ends = pairwise(accumulate(self.sizes(shape), initial=0))
        for backend, (begin, end) in zip(self.backends, ends, strict=True):
            backend.pack(batch, shape, numbers[begin:end])

    def unpack(self, numbers: Tensor, shape: StepShape) -> list[PagedMetadata]:
        """See `PagedAttention.unpack`."""
        parts = zip(self.backends, torch.split(numbers, self.sizes(shape)), strict=True)
        return [backend.unpack(part, shape) for backend, part in parts]


InPlace = PagedAttention | MixedPagedAttention
"""Attention that reads pages in place, and whose metadata is one array of integers."""
