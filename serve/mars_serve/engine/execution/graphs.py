"""The model's forward over one step: eagerly, or by replaying a captured CUDA graph.

A graph fixes every shape and address. Its input is one list of integers at a fixed place, padded to
a shape that recurs, and its output one table of logits at a fixed place; a step whose shape was not
captured runs eagerly. How a function is captured is passed in: on a CPU it is simply called again.
Knows no request and no acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_serve.engine.attention.gathered import Attention
from mars_serve.engine.attention.staging import stage
from mars_serve.engine.attention.varlen import MAX_NARROW, StepShape, VarlenAttention, stored_pages
from mars_serve.engine.batch import StepBatch, bucket
from mars_serve.engine.execution.step_function import StepFunction

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function as often as it takes and returns what runs it again, on the same addresses."""

_WARM_UP_RUNS = 2
_FEWEST_PAGES = 16
_PAGES_FACTOR = 4
"""Page tables are this many times longer from one captured length to the next."""


class Forward(Protocol):
    """One way to run the model over a step."""

    def __call__(self, batch: StepBatch, extra: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Logits of the places that are read, [reads, vocabulary], free to be overwritten until the
        next step; and the ``extra`` tensors, which travel to the device with the step's own.
        """

    def with_scored(
        self, batch: StepBatch, extra: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """The same, and hidden states of the places that are scored, [scored, hidden_size]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """From such hidden states to logits, [n, vocabulary]."""


class EagerForward:
    """Runs with any attention."""

    def __init__(
        self, model: PreTrainedModel, attention: Attention, *, compiled: bool = False
    ) -> None:
        """See `StepFunction`."""
        self._device, self._attention = model.device, attention
        self._function = StepFunction(model, attention, compiled=compiled)

    def __call__(self, batch: StepBatch, extra: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See `Forward`."""
        numbers = [torch.tensor(part) for part in (batch.ids, batch.positions, batch.reads or [0])]
        ids, positions, reads, *staged = stage([*numbers, *extra], self._device)
        return self._function(ids, positions, reads, self._attention.plan(batch)), staged

    def with_scored(
        self, batch: StepBatch, extra: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """See `Forward`."""
        parts = batch.ids, batch.positions, batch.reads or [0], batch.scored
        numbers = [torch.tensor(part) for part in parts]
        ids, positions, reads, scored, *staged = stage([*numbers, *extra], self._device)
        hidden = self._function.hidden(ids, positions, self._attention.plan(batch))
        return self.logits(hidden.index_select(0, reads)), staged, hidden.index_select(0, scored)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`."""
        return self._function.logits(hidden)


@dataclass(frozen=True)
class ForwardShape:
    """Sizes that a whole step is padded to."""

    num_reads: int
    step: StepShape

    @property
    def sizes(self) -> list[int]:
        """Integers of token ids, positions, reads and the attention's plan."""
        return [self.step.num_places, self.step.num_places, self.num_reads, sum(self.step.sizes)]


@dataclass(frozen=True)
class GraphSizes:
    """What decoding can come to, by which the shapes to capture are chosen.

    Those are few: only places and pages are told apart, and the rest is what they allow at most.
    """

    max_rows: int
    max_masks: int
    """Of a row."""
    max_num_batched_tokens: int
    """Places of a step."""
    max_pages: int
    """Of a row."""

    def shapes(self) -> list[ForwardShape]:
        """All of them, the largest first."""
        largest = min(self.max_rows * (2 * self.max_masks + 1), self.max_num_batched_tokens)
        places = sorted({bucket(count) for count in range(1, largest + 1)}, reverse=True)
        pages = [_FEWEST_PAGES]
        while pages[-1] < self.max_pages:
            pages.append(pages[-1] * _PAGES_FACTOR)
        lengths = sorted({min(count, self.max_pages) for count in pages}, reverse=True)
        return [self._shape(count, length) for count in places for length in lengths]

    def shape_for(self, batch: StepBatch, page_size: int) -> ForwardShape:
        """The shape that a step takes if it fits one at all; see `fits`."""
        needed, length = stored_pages(batch, page_size), _FEWEST_PAGES
        while length < needed:
            length *= _PAGES_FACTOR
        return self._shape(len(batch.ids), min(length, self.max_pages))

    def _shape(self, num_places: int, num_pages: int) -> ForwardShape:
        # a decoding row feeds the tokens accepted last, one more than masks at most, and new masks
        num_rows = min(num_places, self.max_rows)
        return ForwardShape(
            num_reads=min(num_places, self.max_rows * (self.max_masks + 1)),
            step=StepShape(
                num_places=num_places,
                num_rows=num_rows,
                num_pages=num_pages,
                num_narrow=num_rows,
                width=min(num_places, (self.max_masks + 1) ** 2, MAX_NARROW),
            ),
        )


class GraphedForward:
    """Runs with paged attention, by a captured graph where the step fits one."""

    def __init__(
        self, model: PreTrainedModel, attention: VarlenAttention, *, compiled: bool = False
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
        """Capture the shapes that decoding will meet, the largest first: the others then find
        their memory already there.

        Args:
            sizes: of decoding.
            capture: `CudaCapture`, or `call_again`.
            on_progress: called with the shapes that are done and their number.
        """
        shapes = sizes.shapes()
        most = max(shape.num_reads for shape in shapes)
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        self._numbers = self._numbers.new_zeros(max(sum(shape.sizes) for shape in shapes))
        self._logits = self._logits.new_zeros(most, vocabulary)
        self._sizes = sizes
        for done, shape in enumerate(shapes, start=1):
            empty = StepBatch([0] * shape.step.num_places, [0] * shape.step.num_places, [], 0)
            self._numbers[: sum(shape.sizes)].copy_(self._pack(empty, shape))
            self._replays[shape] = capture(self._on_fixed_addresses(shape))
            if on_progress is not None:
                on_progress(done, len(shapes))

    def __call__(self, batch: StepBatch, extra: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See `Forward`."""
        shape = self._captured_shape(batch)
        if shape is None:
            shape = self._exact_shape(batch)
            numbers, *staged = stage([self._pack(batch, shape), *extra], self._model.device)
            return self._run(numbers, shape), staged
        numbers, *staged = stage([self._pack(batch, shape), *extra], self._model.device)
        self._numbers[: len(numbers)].copy_(numbers)
        self._replays[shape]()
        return self._logits[: len(batch.reads)], staged

    def with_scored(
        self, batch: StepBatch, extra: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """See `Forward`; never by a graph, which keeps no hidden states."""
        shape = self._exact_shape(batch)
        tensors = [self._pack(batch, shape), torch.tensor(batch.scored), *extra]
        numbers, scored, *staged = stage(tensors, self._model.device)
        ids, positions, reads, packed = torch.split(numbers, shape.sizes)
        plan = self._attention.unpack(packed, shape.step)
        hidden = self._function.hidden(ids, positions, plan)
        return self.logits(hidden.index_select(0, reads)), staged, hidden.index_select(0, scored)

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
        width = max((row.length for row in batch.rows), default=0)
        fits = width <= shape.step.width and len(batch.reads) <= shape.num_reads
        return shape if shape in self._replays and fits else None

    def _pack(self, batch: StepBatch, shape: ForwardShape) -> Tensor:
        """A step's integers; padded reads read place 0."""
        reads = batch.reads
        reads += [0] * (shape.num_reads - len(reads))
        plan = self._attention.pack(batch, shape.step)
        numbers = torch.tensor([*batch.ids, *batch.positions, *reads, *plan])
        assert len(numbers) == sum(shape.sizes), "the step fits its shape"
        return numbers

    def _on_fixed_addresses(self, shape: ForwardShape) -> Callable[[], None]:
        numbers = self._numbers[: sum(shape.sizes)]
        logits = self._logits[: shape.num_reads]

        def run() -> None:
            # into one table for all graphs, which would each keep their own otherwise
            logits.copy_(self._run(numbers, shape))

        return run

    def _run(self, numbers: Tensor, shape: ForwardShape) -> Tensor:
        ids, positions, reads, packed = torch.split(numbers, shape.sizes)
        return self._function(ids, positions, reads, self._attention.unpack(packed, shape.step))


class CudaCapture:
    """Captures functions as CUDA graphs that share their memory: one at a time may run."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`. Libraries prepare themselves in runs before, on a stream of their own.

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
    """See `Capture`: where nothing can be captured."""
    return function
