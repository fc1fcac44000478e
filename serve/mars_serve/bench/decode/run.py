"""Runs ``marsray bench decode``: times contenders in turn, in rounds, at several batch sizes.

In each round every contender decodes the same requests once. The first contender changes from round
to round, and a drift of the machine's speed affects all alike. One run of each contender before the
rounds warms it up and is not counted.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from rich.console import Console

from mars_platform.checkpoint.metadata import locate_model
from mars_platform.checkpoint.number_type import NumberType, stored_dtype
from mars_platform.cli.progress import ProgressDisplay, progress_display
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.bench.decode.contenders import Contender, build_engine, decode_with_engine
from mars_serve.bench.decode.models import BenchModel, trained_model, untrained_model
from mars_serve.bench.decode.workload import (
    BenchRequest,
    Draws,
    RaggedShape,
    generated_requests,
    paper_acceptance,
    prompted_requests,
    requests_in_run,
)
from mars_serve.bench.options import DecodeOptions
from mars_serve.engine.decoding_options import DecodingOptions, Sampling
from mars_serve.measure.evaluation.decoding import available_device
from mars_serve.measure.evaluation.items import read_items

_MODES = (Mode.AR, Mode.THRESHOLD, Mode.EXACT)
_NEED_MASKS = (Mode.THRESHOLD, Mode.EXACT)


@dataclass(frozen=True)
class Timing:
    """One run of one contender."""

    seconds: float
    num_tokens: int
    num_passes: int
    num_positions: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens for each second, the time of the prompts included."""
        return self.num_tokens / self.seconds


@dataclass
class ContenderResult:
    """One contender at one batch size."""

    timings: list[Timing] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    """Outputs of the run before the rounds, in the order of the requests."""

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens for each forward pass, over all rounds."""
        return sum(each.num_tokens for each in self.timings) / self._num_passes

    @property
    def positions_per_forward(self) -> float:
        """Positions of each forward pass, over all rounds."""
        return sum(each.num_positions for each in self.timings) / self._num_passes

    @property
    def _num_passes(self) -> int:
        return sum(each.num_passes for each in self.timings)


@dataclass(frozen=True)
class BatchResult:
    """All contenders at one batch size."""

    batch: int
    requests: list[BenchRequest]
    results: dict[str, ContenderResult]


@dataclass(frozen=True)
class DecodeComparison:
    """Everything that a benchmark measured."""

    options: DecodeOptions
    model: BenchModel
    draws: Draws | None
    """Drawn lengths of accepted runs; None if they were the model's own."""
    batches: list[BatchResult]


def compare(options: DecodeOptions, console: Console) -> DecodeComparison:
    """Run the benchmark, with progress on ``console``."""
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = _model(options)
    drawn = paper_acceptance()
    draws = Draws(drawn, drawn, options.seed) if options.untrained is not None else None
    requests = _requests(model, options)
    batches = []
    with progress_display(console) as display, _cheap_collection():
        for batch in options.batches:
            part = requests[: requests_in_run(batch, options.num_requests)]
            contenders = _contenders(model, part, batch, draws, options)
            results = _measure(contenders, part, batch, options, display)
            batches.append(BatchResult(batch, part, results))
            del contenders  # frees their models before the next ones are made
            gc.collect()
    return DecodeComparison(options, model, draws, batches)


@contextmanager
def _cheap_collection() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection within the block.

    They are imported modules above all, and traversing them takes long enough to disturb a run.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check(options: DecodeOptions) -> None:
    if (options.model is None) == (options.untrained is None):
        raise UserError("MODEL: name a checkpoint, or give --untrained, one of the two")
    if options.adapter is not None and options.model is None:
        raise UserError("--adapter: untrained weights have none; name a checkpoint")
    if options.prompts is not None and options.untrained is not None:
        raise UserError(
            "--prompts: untrained weights have no tokenizer; leave it out or name a checkpoint"
        )
    available_device(options.device)


def _model(options: DecodeOptions) -> BenchModel:
    dtype = getattr(torch, options.dtype or _default_dtype(options))
    if options.untrained is not None:
        return untrained_model(options.untrained, dtype, options.device, options.seed)
    assert options.model is not None
    model = trained_model(options.model, dtype, options.device, adapter=options.adapter)
    needing = [name for name in options.contenders if name in _NEED_MASKS]
    if needing and model.checkpoint.metadata is None:
        raise UserError(
            f"MODEL: {model.name} is a plain AR checkpoint without mars.json; leave out the "
            f"contender {needing[0]}"
        )
    return model if options.prompts is not None else model.without_end()


def _default_dtype(options: DecodeOptions) -> NumberType:
    if options.model is not None:
        return stored_dtype(locate_model(options.model))
    return "bfloat16" if options.device == "cuda" else "float32"


def _requests(model: BenchModel, options: DecodeOptions) -> list[BenchRequest]:
    """Return the requests of the largest run; smaller runs take the first ones."""
    count = max(requests_in_run(batch, options.num_requests) for batch in options.batches)
    checkpoint = model.checkpoint
    if options.prompts is None:
        shape = RaggedShape(options.prompt_tokens, options.output_tokens)
        shape.check(checkpoint.max_length)
        metadata = checkpoint.metadata
        hidden = checkpoint.special.never_emitted | (
            {metadata.mask_token_id} if metadata else set()
        )
        vocabulary = [i for i in range(checkpoint.vocabulary_size) if i not in hidden]
        return generated_requests(count, shape, vocabulary, options.seed)
    items = read_items(
        [options.prompts], checkpoint.tokenizer, max_length=checkpoint.max_length, max_items=count
    )
    largest = max(options.batches)
    if len(items) < largest:
        raise UserError(
            f"--batch: {largest} is more than the {len(items)} prompts of {options.prompts}; lower "
            "it or add prompts"
        )
    return prompted_requests(items, options.max_tokens, checkpoint.max_length)


def _contenders(
    model: BenchModel,
    requests: list[BenchRequest],
    batch: int,
    draws: Draws | None,
    options: DecodeOptions,
) -> dict[str, Contender]:
    """Return the contenders that the options name; their models are made at first use."""
    exact = Mode.EXACT in options.contenders
    engine = cache(partial(build_engine, model, requests, batch, draws, exact=exact))
    sampling = Sampling(temperature=options.temperature)
    return {
        mode: partial(
            decode_with_engine,
            engine=engine,
            options=DecodingOptions(1, mode, options.threshold, sampling=sampling),
        )
        for mode in _MODES
        if mode in options.contenders
    }


def _measure(
    contenders: dict[str, Contender],
    requests: list[BenchRequest],
    batch: int,
    options: DecodeOptions,
    display: ProgressDisplay,
) -> dict[str, ContenderResult]:
    title, total = f"batch {batch}", (options.rounds + 1) * len(contenders)
    results: dict[str, ContenderResult] = {}
    for done, (name, contender) in enumerate(contenders.items()):
        display.update(title, done, total, f"{name}: warming up")
        results[name] = ContenderResult(outputs=contender(requests).outputs)
    done, latest, names = len(contenders), "", list(contenders)
    for index in range(options.rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            display.update(title, done, total, f"{name}: round {index + 1}{latest}")
            timing = _time(contenders[name], requests, options.device)
            results[name].timings.append(timing)
            latest = f"; before it, {timing.tokens_per_s:,.0f} tokens/s"
            done += 1
    display.update(title, total, total)
    return results


def _time(contender: Contender, requests: list[BenchRequest], device: str) -> Timing:
    gc.collect()
    _synchronise(device)
    started = time.perf_counter()
    decoded = contender(requests)
    _synchronise(device)
    seconds = time.perf_counter() - started
    return Timing(seconds, decoded.num_tokens, decoded.num_passes, decoded.num_positions)


def _synchronise(device: str) -> None:
    """Wait until the device has done all its work; on a CPU it has when a call returns."""
    if device == "cuda":
        torch.cuda.synchronize()
