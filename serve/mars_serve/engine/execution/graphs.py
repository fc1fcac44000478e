"""The model's forward over one step: eagerly, or by replaying a captured CUDA graph.

A graph fixes all shapes and addresses. Its input is one list of integers at a fixed address, padded
to a shape that recurs. Its output is one table of logits and one of the likeliest tokens with their
confidences, so that a step at temperature 0 is a copy to the device, a replay and a copy back. A
step whose shape was not captured runs eagerly.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_serve.engine.attention.interface import Attention
from mars_serve.engine.attention.mixed import InPlace
from mars_serve.engine.attention.plan import StepShape, cached_pages
from mars_serve.engine.batch import StepBatch, bucket
from mars_serve.engine.device.transfer import host_numbers, to_device
from mars_serve.engine.execution.proposals import Reads
from mars_serve.engine.execution.staging import InputSizes, StepInput, fill
from mars_serve.engine.execution.step_function import StepFunction
from mars_serve.engine.kernels.acceptance import propose
from mars_serve.engine.states.packed import PackedStates
from mars_serve.engine.states.slots import States

_log = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Function that runs another as often as capturing takes, and returns a function that repeats the
run on the same addresses."""

_WARM_UP_RUNS = 1
_FEWEST_PAGES = 16
_PAGES_FACTOR = 16
"""Ratio of one captured length of page tables to the next shorter one. A longer table costs a step
no more than its copy to the device, and each length another set of graphs."""


@dataclass(frozen=True)
class ForwardOutput:
    """The model's output of one step."""

    logits: Tensor
    """[reads, vocabulary], logits of the positions that are read. May be overwritten; valid until
    the next step."""
    hidden: Tensor
    """[reads, hidden_size], hidden states that the logits were made of; valid as these are."""
    reads: Reads | None
    """Description of the logits, on their device; None if the step reads none."""
    proposals: Tensor | None
    """int32 [reads, 2], the table of `kernels.acceptance.propose`; None if it is not computed."""
    scored: Tensor
    """[scored, hidden_size], hidden states of the positions that are scored."""
    next_tokens: Tensor
    """int64 [scored], the token behind each of these positions."""


class Forward(Protocol):
    """One way to run the model over a step."""

    def __call__(
        self, batch: StepBatch, reads: Reads | None, next_tokens: Sequence[int]
    ) -> ForwardOutput:
        """Run the model over a step.

        ``reads`` is on the host, None if no logits are read. ``next_tokens`` has the token behind
        each position that ``batch`` scores.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden_size]."""


class EagerForward:
    """Runs the model eagerly, with any attention backend."""

    def __init__(
        self, model: PreTrainedModel, attention: Attention, states: States | None = None
    ) -> None:
        """Take a model, see `StepFunction`, and the states of its recurrent layers, if any."""
        self._device, self._attention, self._states = model.device, attention, states
        self._function = StepFunction(model, attention)

    def __call__(
        self, batch: StepBatch, reads: Reads | None, next_tokens: Sequence[int]
    ) -> ForwardOutput:
        """See `Forward`."""
        num_reads, slots = max(len(batch.reads), 1), batch.slots or ()
        sizes = InputSizes(len(batch.ids), num_reads, len(batch.scored), 0, num_slots=len(slots))
        numbers = host_numbers(sizes.total, self._device)
        fill(sizes.on_host(numbers), batch, reads, next_tokens)
        step = sizes.on_device(to_device(numbers, self._device))
        metadata = self._attention.prepare(batch)
        mixing = None if self._states is None else self._states.prepare(batch)
        hidden = self._function.hidden(
            *(step.ids, step.position_ids, metadata, mixing),
            has_masks=batch.has_masks,
            slots=step.slots if slots else None,
        )
        read = hidden.index_select(0, step.reads)
        return ForwardOutput(
            logits=self._function.logits(read),
            hidden=read,
            reads=_on_device(reads, step),
            proposals=None,
            scored=hidden.index_select(0, step.scored),
            next_tokens=step.next_tokens,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`."""
        return self._function.logits(hidden)


@dataclass(frozen=True)
class ForwardShape:
    """Sizes that a whole step is padded to."""

    num_reads: int
    step: StepShape
    num_scored: int = 0
    is_adapted: bool = False
    """Whether the step computes the product of a draft adapter."""
    has_loras: bool = False
    """Whether the step computes the products of LoRA adapters."""


@dataclass(frozen=True)
class GraphSizes:
    """Limits of steps, by which the shapes to capture are chosen so that every step fits one.

    Attention takes any layout of rows in a shape of enough positions, rows and pages. So the shapes
    differ in positions, of which `bucket` makes few lengths; in pages, of which there are two or
    three; and in reads, which are one a row or one a position. In mode exact a row may read all its
    positions, and otherwise the output layer's share of a large step is not computed in vain. With
    an adapter, steps of one position a row have a second shape, in which it does not act: mode ar
    then takes no longer than without one. Larger steps seldom lack masks. With slots for LoRA
    adapters, each shape has a second one in which they act.
    """

    max_rows: int
    max_row_length: int
    """Most positions of a decoding row."""
    max_num_batched_tokens: int
    """Most positions of a step."""
    max_pages: int
    has_adapter: bool = False
    has_slots: bool = False

    def shapes(self) -> list[ForwardShape]:
        """Return all shapes to capture, the largest first."""
        largest = min(self.max_rows * self.max_row_length, self.max_num_batched_tokens)
        positions = sorted({bucket(count) for count in range(1, largest + 1)}, reverse=True)
        pages = [_FEWEST_PAGES]
        while pages[-1] < self.max_pages:
            pages.append(pages[-1] * _PAGES_FACTOR)
        lengths = sorted({min(count, self.max_pages) for count in pages}, reverse=True)
        return [
            self._shape(count, length, num_reads, is_adapted=is_adapted, has_loras=has_loras)
            for has_loras in (True, False)[not self.has_slots :]
            for count in positions
            for length in lengths
            for num_reads in sorted({count, min(count, self.max_rows)}, reverse=True)
            for is_adapted in sorted({self._adapts(count, True), self._adapts(count, False)})
        ]

    def shape_for(self, batch: StepBatch, page_size: int) -> ForwardShape:
        """Return the only captured shape that could hold a step."""
        needed, length = cached_pages(batch, page_size), _FEWEST_PAGES
        while length < needed:
            length *= _PAGES_FACTOR
        num_reads = len(batch.reads)
        most = self.max_rows if num_reads <= self.max_rows else len(batch.ids)
        is_adapted = self._adapts(len(batch.ids), batch.has_masks)
        how = {"is_adapted": is_adapted, "has_loras": batch.slots is not None}
        return self._shape(len(batch.ids), min(length, self.max_pages), most, **how)

    def _shape(
        self,
        num_positions: int,
        num_pages: int,
        num_reads: int,
        *,
        is_adapted: bool,
        has_loras: bool,
    ) -> ForwardShape:
        num_rows = min(num_positions, self.max_rows)
        step = StepShape(num_positions, num_rows, num_pages)
        reads = min(num_positions, num_reads)
        return ForwardShape(reads, step, is_adapted=is_adapted, has_loras=has_loras)

    def _adapts(self, num_positions: int, has_masks: bool) -> bool:
        """Return whether a step of a captured shape computes the product of an adapter."""
        if not self.has_adapter or num_positions == 1:  # a mask stands behind a token
            return False
        return has_masks or num_positions > bucket(self.max_rows)


@dataclass(frozen=True)
class _CapturedStep:
    replay: Callable[[], None]
    sizes: InputSizes
    step: StepInput[Tensor]


@dataclass(frozen=True)
class CapturedGraphs:
    """Number of the captured graphs, and the time and memory that they took."""

    num_graphs: int
    seconds: float
    num_bytes: int
    """Bytes of the device's memory; 0 on devices without graphs."""


class GraphedForward:
    """Runs the model with paged attention, by a captured graph if the step fits one."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: InPlace,
        banned: Tensor,
        states: States | None = None,
    ) -> None:
        """Take a model, see `EagerForward`. ``banned``, int64 [banned], is never emitted."""
        self._device, self._attention = model.device, attention
        self._states = None if states is None else PackedStates(states)
        self._function = StepFunction(model, attention)
        self._sizes: GraphSizes | None = None
        self._captured: dict[ForwardShape, _CapturedStep] = {}
        vocabulary = model.get_output_embeddings().out_features
        self._is_banned = torch.zeros(vocabulary, dtype=torch.bool, device=self._device)
        self._is_banned[banned] = True
        self._numbers = torch.empty(0, dtype=torch.long, device=self._device)
        self._logits = torch.empty(0, vocabulary, dtype=model.dtype, device=self._device)
        width = model.get_output_embeddings().in_features
        self._read = torch.empty(0, width, dtype=model.dtype, device=self._device)
        self._proposals = torch.empty(0, 2, dtype=torch.int32, device=self._device)

    @torch.inference_mode()
    def capture(
        self,
        sizes: GraphSizes,
        capture: Capture,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CapturedGraphs:
        """Capture the shapes of steps within ``sizes``, the largest first, so that all share its
        memory.

        ``on_progress`` gets the number of captured shapes, and that of all.
        """
        begin, free = time.perf_counter(), _free_bytes(self._device)
        gated, has_slots = self._function.is_gated, self._function.has_slots
        sizes = replace(sizes, has_adapter=gated, has_slots=has_slots)
        shapes = sizes.shapes()
        most = max(shape.num_reads for shape in shapes)
        self._numbers = self._numbers.new_zeros(max(self._input(each).total for each in shapes))
        self._logits = self._logits.new_zeros(most, self._logits.shape[1])
        self._read = self._read.new_zeros(most, self._read.shape[1])
        self._proposals = self._proposals.new_zeros(most, 2)
        self._sizes = sizes
        for done, shape in enumerate(shapes, start=1):
            zeros = [0] * shape.step.num_positions
            empty = StepBatch(ids=zeros, position_ids=zeros, rows=[], num_positions=0)
            inputs = self._input(shape)
            self._send(self._pack(empty, None, (), shape, inputs))
            step = inputs.on_device(self._numbers[: inputs.total])
            replay = capture(self._on_fixed_addresses(shape, step))
            self._captured[shape] = _CapturedStep(replay, inputs, step)
            if on_progress is not None:
                on_progress(done, len(shapes))
        taken = max(0, free - _free_bytes(self._device))
        found = CapturedGraphs(len(shapes), time.perf_counter() - begin, taken)
        _log.info(
            "captured %d shapes of steps in %.1f s; the graphs take %.0f MiB",
            *(found.num_graphs, found.seconds, found.num_bytes / 2**20),
        )
        return found

    def __call__(
        self, batch: StepBatch, reads: Reads | None, next_tokens: Sequence[int]
    ) -> ForwardOutput:
        """See `Forward`; graphs keep no hidden states, so scored positions are run eagerly."""
        shape = None if batch.scored else self._shape_for(batch)
        captured = None if shape is None else self._captured.get(shape)
        if shape is None or captured is None:
            return self._run_eagerly(batch, reads, next_tokens)
        self._send(self._pack(batch, reads, (), shape, captured.sizes))
        captured.replay()
        count, step = len(batch.reads), captured.step
        return ForwardOutput(
            logits=self._logits[:count],
            hidden=self._read[:count],
            reads=_on_device(reads, step),
            proposals=self._proposals[:count],
            scored=self._logits[:0],
            next_tokens=step.next_tokens,
        )

    def _run_eagerly(
        self, batch: StepBatch, reads: Reads | None, next_tokens: Sequence[int]
    ) -> ForwardOutput:
        shape = self._exact_shape(batch)
        sizes = self._input(shape)
        numbers = self._pack(batch, reads, next_tokens, shape, sizes)
        step = sizes.on_device(to_device(numbers, self._device))
        hidden = self._hidden(step, shape)
        read = hidden.index_select(0, step.reads)
        logits = self._function.logits(read)
        return ForwardOutput(
            logits=logits,
            hidden=read,
            reads=_on_device(reads, step),
            proposals=self._propose(logits, step),
            scored=hidden.index_select(0, step.scored),
            next_tokens=step.next_tokens,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Forward`."""
        return self._function.logits(hidden)

    def _exact_shape(self, batch: StepBatch) -> ForwardShape:
        step = StepShape.of(batch, self._attention.page_size)
        how = self._function.is_gated and batch.has_masks, batch.slots is not None
        return ForwardShape(max(len(batch.reads), 1), step, len(batch.scored), *how)

    def _shape_for(self, batch: StepBatch) -> ForwardShape | None:
        if self._sizes is None or len(batch.rows) > self._sizes.max_rows:
            return None
        return self._sizes.shape_for(batch, self._attention.page_size)

    def _input(self, shape: ForwardShape) -> InputSizes:
        step, num_states = shape.step, 0
        if self._states is not None:
            num_states = sum(self._states.sizes(step.num_positions, step.num_rows))
        attention = sum(self._attention.sizes(step))
        sizes = step.num_positions, shape.num_reads, shape.num_scored
        return InputSizes(*sizes, attention, num_states, step.num_positions * shape.has_loras)

    def _pack(
        self,
        batch: StepBatch,
        reads: Reads | None,
        next_tokens: Sequence[int],
        shape: ForwardShape,
        sizes: InputSizes,
    ) -> Tensor:
        numbers = host_numbers(sizes.total, self._device)
        parts = sizes.on_host(numbers)
        fill(parts, batch, reads, next_tokens)
        step = shape.step
        self._attention.pack(batch, step, parts.attention)
        if self._states is not None:
            self._states.pack(batch, step.num_positions, step.num_rows, parts.states)
        return numbers

    def _send(self, numbers: Tensor) -> None:
        self._numbers[: len(numbers)].copy_(numbers, non_blocking=True)

    def _on_fixed_addresses(
        self, shape: ForwardShape, step: StepInput[Tensor]
    ) -> Callable[[], None]:
        # One table serves all graphs; otherwise each would keep its own logits.
        tables = self._read, self._logits, self._proposals
        read, logits, proposals = (table[: shape.num_reads] for table in tables)

        def run() -> None:
            torch.index_select(self._hidden(step, shape), 0, step.reads, out=read)
            self._function.write_logits(read, logits)
            proposals.copy_(self._propose(logits, step))

        return run

    def _hidden(self, step: StepInput[Tensor], shape: ForwardShape) -> Tensor:
        metadata = self._attention.unpack(step.attention, shape.step)
        mixing, sizes = None, (shape.step.num_positions, shape.step.num_rows)
        if self._states is not None:
            mixing = self._states.unpack(step.states, *sizes)
        return self._function.hidden(
            *(step.ids, step.position_ids, metadata, mixing),
            has_masks=shape.is_adapted,
            slots=step.slots if shape.has_loras else None,
        )

    def _propose(self, logits: Tensor, step: StepInput[Tensor]) -> Tensor:
        temperatures = step.temperatures.view(torch.float64)
        return propose(logits, self._is_banned, step.measures, temperatures)


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


def _on_device(reads: Reads | None, step: StepInput[Tensor]) -> Reads | None:
    if reads is None:
        return None
    count, temperatures = len(reads.measures), None
    if reads.temperatures is not None:
        temperatures = step.temperatures[:count].view(torch.float64)
    return replace(reads, measures=step.measures[:count], temperatures=temperatures)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
