"""The model's forward over one step: eagerly, or by replaying a captured CUDA graph.

A graph fixes all shapes and addresses. Its input is one list of integers at a fixed address, padded
to a shape that recurs, and its output one table of logits at a fixed address; a step whose shape
was not captured runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.attention.plan import StepShape, cached_pages
from mars_serve.engine.batch import StepBatch, bucket
from mars_serve.engine.execution.staging import stage
from mars_serve.engine.execution.step_function import StepFunction

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Function that runs another as often as capturing takes, and returns a function that repeats the
run on the same addresses."""

_WARM_UP_RUNS = 2
_FEWEST_PAGES = 16
_PAGES_FACTOR = 4
"""Ratio of one captured length of page tables to the next shorter one."""

Extra = TypeVar("Extra")


@dataclass(frozen=True)
class ForwardOutput(Generic[Extra]):
    """The model's output of one step."""

    logits: Tensor
    """[reads, vocabulary], logits of the positions that are read. May be overwritten; valid until
    the next step."""
    scored: Tensor | None
    """[scored, hidden_size], hidden states of the positions that are scored, if there are any."""
    extra: Extra
    """The step's further tensors, on the device."""


class Forward(Protocol):
    """One way to run the model over a step."""

    def __call__(self, batch: StepBatch, extra: Extra) -> ForwardOutput[Extra]:
        """Run the model over a step.

        Args:
            batch: layout of the step.
            extra: a dataclass of further tensors, copied to the device in the step's one transfer.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden_size]."""


@dataclass(frozen=True)
class _EagerInput(Generic[Extra]):
    ids: Tensor
    position_ids: Tensor
    reads: Tensor
    scored: Tensor | None
    extra: Extra


class EagerForward:
    """Runs the model eagerly, with any attention backend."""

    def __init__(
        self, model: PreTrainedModel, attention: Attention, *, compiled: bool = False
    ) -> None:
        """See `StepFunction`."""
        self._device, self._attention = model.device, attention
        self._function = StepFunction(model, attention, compiled=compiled)

    def __call__(self, batch: StepBatch, extra: Extra) -> ForwardOutput[Extra]:
        """See `Forward`."""
        host = _EagerInput(
            ids=torch.tensor(batch.ids),
            position_ids=torch.tensor(batch.position_ids),
            reads=torch.tensor(batch.reads or [0]),
            scored=_scored(batch),
            extra=extra,
        )
        step = stage(host, self._device)
        metadata = self._attention.prepare(batch)
        hidden = self._function.hidden(step.ids, step.position_ids, metadata)
        return _output(self._function, hidden, step.reads, step.scored, step.extra)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`."""
        return self._function.logits(hidden)


@dataclass(frozen=True)
class ForwardShape:
    """Sizes that a whole step is padded to."""

    num_reads: int
    step: StepShape


@dataclass(frozen=True)
class GraphSizes:
    """Limits of decoding steps, by which the shapes to capture are chosen.

    The shapes are few: they differ in positions and pages only, and leave room for the most rows
    and reads that these allow.
    """

    max_rows: int
    max_masks: int
    """Most masks of a row."""
    max_num_batched_tokens: int
    """Most positions of a step."""
    max_pages: int
    """Most pages of a row."""

    def shapes(self) -> list[ForwardShape]:
        """Return all shapes to capture, the largest first."""
        largest = min(self.max_rows * (2 * self.max_masks + 1), self.max_num_batched_tokens)
        positions = sorted({bucket(count) for count in range(1, largest + 1)}, reverse=True)
        pages = [_FEWEST_PAGES]
        while pages[-1] < self.max_pages:
            pages.append(pages[-1] * _PAGES_FACTOR)
        lengths = sorted({min(count, self.max_pages) for count in pages}, reverse=True)
        return [self._shape(count, length) for count in positions for length in lengths]

    def shape_for(self, batch: StepBatch, page_size: int) -> ForwardShape:
        """Return the only captured shape that could hold a step."""
        needed, length = cached_pages(batch, page_size), _FEWEST_PAGES
        while length < needed:
            length *= _PAGES_FACTOR
        return self._shape(len(batch.ids), min(length, self.max_pages))

    def _shape(self, num_positions: int, num_pages: int) -> ForwardShape:
        # A decoding row feeds the tokens accepted last, at most one more than masks, and new masks.
        return ForwardShape(
            num_reads=min(num_positions, self.max_rows * (self.max_masks + 1)),
            step=StepShape(num_positions, min(num_positions, self.max_rows), num_pages),
        )


@dataclass(frozen=True)
class _GraphedInput(Generic[Extra]):
    numbers: Tensor
    scored: Tensor | None
    extra: Extra


class GraphedForward:
    """Runs the model with paged attention, by a captured graph if the step fits one."""

    def __init__(
        self, model: PreTrainedModel, attention: PagedAttention, *, compiled: bool = False
    ) -> None:
        """See `StepFunction`."""
        self._model, self._attention = model, attention
        self._function = StepFunction(model, attention, compiled=compiled)
        self._sizes: GraphSizes | None = None
        self._replays: dict[ForwardShape, Callable[[], None]] = {}
        self._numbers = torch.empty(0, dtype=torch.long, device=model.device)
        self._logits = torch.empty(0, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def capture(
        self,
        sizes: GraphSizes,
        capture: Capture,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Capture the shapes of decoding steps, the largest first, so that all share its memory.

        Args:
            sizes: limits of decoding steps.
            capture: `CudaCapture`, or `call_again`.
            on_progress: called with the number of captured shapes and the number of all.
        """
        shapes = sizes.shapes()
        most = max(shape.num_reads for shape in shapes)
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        self._numbers = self._numbers.new_zeros(max(sum(self._sizes_of(shape)) for shape in shapes))
        self._logits = self._logits.new_zeros(most, vocabulary)
        self._sizes = sizes
        for done, shape in enumerate(shapes, start=1):
            zeros = [0] * shape.step.num_positions
            empty = StepBatch(ids=zeros, position_ids=zeros, rows=[], num_positions=0)
            self._numbers[: sum(self._sizes_of(shape))].copy_(self._pack(empty, shape))
            self._replays[shape] = capture(self._on_fixed_addresses(shape))
            if on_progress is not None:
                on_progress(done, len(shapes))

    def __call__(self, batch: StepBatch, extra: Extra) -> ForwardOutput[Extra]:
        """See `Forward`; graphs keep no hidden states, so scored positions are run eagerly."""
        captured = None if batch.scored else self._captured_shape(batch)
        shape = captured or self._exact_shape(batch)
        step = stage(
            _GraphedInput(self._pack(batch, shape), _scored(batch), extra), self._model.device
        )
        if captured is None:
            hidden, reads = self._run(step.numbers, shape)
            return _output(self._function, hidden, reads, step.scored, step.extra)
        self._numbers[: len(step.numbers)].copy_(step.numbers)
        self._replays[shape]()
        return ForwardOutput(self._logits[: len(batch.reads)], None, step.extra)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`."""
        return self._function.logits(hidden)

    def _exact_shape(self, batch: StepBatch) -> ForwardShape:
        step = StepShape.of(batch, self._attention.page_size)
        return ForwardShape(max(len(batch.reads), 1), step)

    def _captured_shape(self, batch: StepBatch) -> ForwardShape | None:
        if self._sizes is None:
            return None
        shape = self._sizes.shape_for(batch, self._attention.page_size)
        fits = len(batch.reads) <= shape.num_reads
        return shape if shape in self._replays and fits else None

    def _sizes_of(self, shape: ForwardShape) -> list[int]:
        """Return the integers of token ids, position ids, reads and attention metadata."""
        step = shape.step
        return [step.num_positions] * 2 + [shape.num_reads, sum(self._attention.sizes(step))]

    def _pack(self, batch: StepBatch, shape: ForwardShape) -> Tensor:
        """Return a step's integers; padded reads read position 0."""
        reads, sizes = batch.reads, self._sizes_of(shape)
        assert len(reads) <= shape.num_reads, "the step fits its shape"
        numbers = np.zeros(sum(sizes), dtype=np.int64)
        ids, position_ids, padded, packed = np.split(numbers, np.cumsum(sizes)[:-1])
        ids[:], position_ids[:], padded[: len(reads)] = batch.ids, batch.position_ids, reads
        self._attention.pack(batch, shape.step, packed)
        return torch.from_numpy(numbers)

    def _on_fixed_addresses(self, shape: ForwardShape) -> Callable[[], None]:
        numbers = self._numbers[: sum(self._sizes_of(shape))]
        logits = self._logits[: shape.num_reads]

        def run() -> None:
            # One table serves all graphs; otherwise each would keep its own logits.
            hidden, reads = self._run(numbers, shape)
            logits.copy_(self.logits(hidden.index_select(0, reads)))

        return run

    def _run(self, numbers: Tensor, shape: ForwardShape) -> tuple[Tensor, Tensor]:
        """Run the decoder; return all hidden states and the positions that are read."""
        ids, position_ids, reads, packed = torch.split(numbers, self._sizes_of(shape))
        metadata = self._attention.unpack(packed, shape.step)
        return self._function.hidden(ids, position_ids, metadata), reads


class CudaCapture:
    """Captures functions as CUDA graphs that share memory, so only one may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`. Libraries prepare themselves in earlier runs, on a stream of their own.

        Source: ``torch.cuda.graph``.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            function()
        return graph.replay


def call_again(function: Callable[[], None]) -> Callable[[], None]:
    """Stand in for a `Capture` on devices without graphs: the function is called again."""
    return function


def _scored(batch: StepBatch) -> Tensor | None:
    return torch.tensor(batch.scored) if batch.scored else None


def _output(
    function: StepFunction, hidden: Tensor, reads: Tensor, scored: Tensor | None, extra: Extra
) -> ForwardOutput[Extra]:
    return ForwardOutput(
        logits=function.logits(hidden.index_select(0, reads)),
        scored=None if scored is None else hidden.index_select(0, scored),
        extra=extra,
    )
