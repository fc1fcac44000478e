"""``marsray bench decode``: contenders in turn, in rounds, at several batch sizes.

In each round every contender decodes the same requests once; who goes first moves on from round
to round, so that a drift of the machine's speed hits all alike. Before that each contender is
warmed up and its settings are tried out, which is not counted.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mars_platform.cli.progress import ProgressDisplay, progress_display
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.bench.decode.contenders import (
    BlockSync,
    Contender,
    EngineContender,
    NotAvailable,
    build_engine,
)
from mars_serve.bench.decode.hugging_face import HfContinuous, HfGenerate
from mars_serve.bench.decode.models import BenchModel, ModelForms, trained_model, untrained_model
from mars_serve.bench.decode.workload import (
    PAPER_ACCEPTANCE,
    BenchRequest,
    Draws,
    RaggedShape,
    agreeing,
    generated_requests,
    prompted_requests,
    read_acceptance,
    requests_in_run,
)
from mars_serve.engine.request import DecodingOptions, Outcomes
from mars_serve.measure.evaluation.scoring import read_items

CONTENDERS = (
    "ar",
    "threshold",
    "exact",
    "exact-all",
    "exact-last",
    "hf-generate",
    "hf-generate+packed",
    "hf-continuous",
    "hf-continuous+packed",
    "block-sync",
)
_LAYOUTS = {"exact": None, "exact-all": Outcomes.ALL, "exact-last": Outcomes.LAST}
"""Contenders in mode exact and the outcomes that they feed masks for; None: the engine's choice."""
_NEED_MASKS = ("threshold", *_LAYOUTS, "block-sync")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class DecodeOptions:
    """What ``marsray bench decode`` is asked for."""

    model: str | None = None
    """Checkpoint directory or hub id; None where ``untrained`` is given."""
    untrained: str | None = None
    """Preset or ``config.json`` to make random weights from."""
    prompts: Path | None = None
    """Conversations to decode; None for generated requests."""
    contenders: Sequence[str] = CONTENDERS
    batches: Sequence[int] = (1, 4, 8, 16, 32)
    rounds: int = 5
    num_requests: int = 48
    """Requests a run, where two batches are not more."""
    shape: RaggedShape = field(default_factory=RaggedShape)
    """Lengths of generated requests."""
    max_tokens: int = 256
    """Output tokens for a conversation at the most."""
    threshold: float = 0.95
    """τ in (0, 1]."""
    acceptance: str | None = None
    """File or name of a distribution of accepted runs; None: the model's own, or the paper's where
    the weights are untrained or ``agreement`` is given."""
    agreement: float | None = None
    """In mode exact, draw each draft right with this probability, in [0, 1], instead."""
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    compiled: bool = False
    """Compile the engine's model."""


@dataclass(frozen=True)
class Timing:
    """One run of one contender."""

    seconds: float
    num_tokens: int
    num_passes: int
    num_positions: int | None = None
    """What the passes fed; see `Decoded`."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, prompts' time included."""
        return self.num_tokens / self.seconds


@dataclass
class Result:
    """One contender at one batch size."""

    timings: list[Timing] = field(default_factory=list)
    """One for each round."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The fastest of the tried ones."""
    trials: list[dict[str, Any]] = field(default_factory=list)
    """What was tried, and the tokens a second it gave."""
    outputs: list[list[int]] = field(default_factory=list)
    """Of the last trial, in the order of the requests."""
    unavailable: str | None = None
    """Why it could not run."""


@dataclass(frozen=True)
class BatchResult:
    """All contenders at one batch size."""

    batch: int
    requests: list[BenchRequest]
    results: dict[str, Result]


@dataclass(frozen=True)
class Comparison:
    """Everything that was measured."""

    options: DecodeOptions
    model: BenchModel
    draws: Draws | None
    batches: list[BatchResult]


def compare(options: DecodeOptions, console: Console) -> Comparison:
    """Run the benchmark, with progress on ``console``.

    Raises:
        UserError: the model, the data or an option is unusable.
    """
    _check(options)
    _check_agreement(options)
    _check_source(options)
    model = _model(options)
    _check_model(model, options)
    draws = _draws(model, options)
    requests = _requests(model, options)
    batches = []
    with progress_display(console) as display, _cheap_collection():
        for batch in options.batches:
            part = requests[: requests_in_run(batch, options.num_requests)]
            with _contenders(model, part, batch, draws, options) as contenders:
                results = _measure(contenders, part, batch, options, display)
            batches.append(BatchResult(batch, part, results))
            del contenders  # their models go before the next ones are made
            gc.collect()
    return Comparison(options, model, draws, batches)


@contextmanager
def _cheap_collection() -> Iterator[None]:
    """Leave what is there already, imported modules above all, out of garbage collection.

    Looking through it takes long enough to disturb a run.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check(options: DecodeOptions) -> None:
    for name in options.contenders:
        if name not in CONTENDERS:
            raise UserError(
                f"--contender: there is no {name!r}; choose from {', '.join(CONTENDERS)}"
            )
    for batch in options.batches:
        if batch < 1:
            raise UserError(f"--batch: {batch} is no batch size; give 1 or more")
    if not 0.0 < options.threshold <= 1.0:
        raise UserError(
            f"--threshold: {options.threshold} is not in (0, 1]; 1 is plain AR decoding"
        )


def _check_agreement(options: DecodeOptions) -> None:
    if options.agreement is None:
        return
    if not 0.0 <= options.agreement <= 1.0:
        raise UserError(f"--agreement: {options.agreement} is no probability; give one in [0, 1]")
    if not any(name in _LAYOUTS for name in options.contenders):
        raise UserError(
            "--agreement: only contenders in mode exact check drafts; add --contender exact"
        )


def _check_source(options: DecodeOptions) -> None:
    if (options.model is None) == (options.untrained is None):
        raise UserError("MODEL: name a checkpoint, or give --untrained, one of the two")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: there is no CUDA device on this machine; use cpu")
    if options.prompts is not None and options.untrained is not None:
        raise UserError(
            "--prompts: untrained weights have no tokenizer; leave it out or name a checkpoint"
        )


def _check_model(model: BenchModel, options: DecodeOptions) -> None:
    needing = [name for name in options.contenders if name in _NEED_MASKS]
    if needing and model.checkpoint.metadata is None:
        raise UserError(
            f"MODEL: {model.name} is a plain AR checkpoint without mars.json; leave out the "
            f"contender {needing[0]}"
        )


def _model(options: DecodeOptions) -> BenchModel:
    dtype = _DTYPES[options.dtype]
    if options.untrained is not None:
        return untrained_model(options.untrained, dtype, options.device, options.seed)
    assert options.model is not None
    model = trained_model(options.model, dtype, options.device)
    return model if options.prompts is not None else model.without_end()


def _draws(model: BenchModel, options: DecodeOptions) -> Draws | None:
    if (options.acceptance, options.untrained, options.agreement) == (None, None, None):
        return None
    acceptance = read_acceptance(options.acceptance or PAPER_ACCEPTANCE)
    if options.agreement is None:
        return Draws(acceptance, acceptance, options.seed)
    assert model.checkpoint.metadata is not None
    exact = agreeing(options.agreement, model.checkpoint.metadata.block_size)
    return Draws(acceptance, exact, options.seed)


def _requests(model: BenchModel, options: DecodeOptions) -> list[BenchRequest]:
    """As many as the largest run takes."""
    count = max(requests_in_run(batch, options.num_requests) for batch in options.batches)
    checkpoint = model.checkpoint
    if options.prompts is None:
        options.shape.check(checkpoint.max_length)
        metadata = checkpoint.metadata
        hidden = checkpoint.special.never_emitted | (
            {metadata.mask_token_id} if metadata else set()
        )
        vocabulary = [i for i in range(checkpoint.config.vocab_size) if i not in hidden]
        return generated_requests(count, options.shape, vocabulary, options.seed)
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


@contextmanager
def _contenders(
    model: BenchModel,
    requests: list[BenchRequest],
    batch: int,
    draws: Draws | None,
    options: DecodeOptions,
) -> Iterator[dict[str, Contender]]:
    """The contenders asked for, in order; models are made when first used, and shared."""
    forms, special = ModelForms(model), model.checkpoint.special
    exact = any(name in _LAYOUTS for name in options.contenders)
    engine = cache(
        partial(build_engine, model, requests, batch, draws, exact=exact, compiled=options.compiled)
    )
    decodings = {
        "ar": DecodingOptions(1, Mode.AR),
        "threshold": DecodingOptions(1, Mode.THRESHOLD, options.threshold),
        **{
            name: DecodingOptions(1, Mode.EXACT, outcomes=outcomes)
            for name, outcomes in _LAYOUTS.items()
        },
    }
    makers: dict[str, Callable[[], Contender]] = {
        **{
            name: partial(EngineContender, engine, decoding, draws)
            for name, decoding in decodings.items()
        },
        "hf-generate": lambda: HfGenerate(forms.plain, special, batch),
        "hf-generate+packed": lambda: HfGenerate(forms.packed, special, batch),
        "hf-continuous": lambda: HfContinuous(forms.plain, special, batch, requests, model.device),
        "hf-continuous+packed": lambda: HfContinuous(
            forms.packed, special, batch, requests, model.device
        ),
        "block-sync": lambda: BlockSync(model, forms, batch, options.threshold, draws),
    }
    contenders = {name: makers[name]() for name in CONTENDERS if name in options.contenders}
    try:
        yield contenders
    finally:
        for contender in contenders.values():
            contender.close()


def _measure(
    contenders: dict[str, Contender],
    requests: list[BenchRequest],
    batch: int,
    options: DecodeOptions,
    display: ProgressDisplay,
) -> dict[str, Result]:
    title, total = f"batch {batch}", (options.rounds + 1) * len(contenders)
    results: dict[str, Result] = {}
    for done, (name, contender) in enumerate(contenders.items()):
        display.update(title, done, total, f"{name}: trying settings")
        results[name] = _prepare(contender, requests, batch, options.device)
    available = [name for name in contenders if results[name].unavailable is None]
    done = len(contenders) * (options.rounds + 1) - len(available) * options.rounds
    for index in range(options.rounds):
        first = index % max(len(available), 1)
        for name in available[first:] + available[:first]:
            display.update(title, done, total, f"{name}: round {index + 1}")
            contender, result = contenders[name], results[name]
            contender.configure(result.settings)
            timing, _ = _time(contender, requests, options.device)
            contender.close()  # threads of one that stays up slow the others down (measured)
            result.timings.append(timing)
            done += 1
    display.update(title, total, total)
    return results


def _prepare(contender: Contender, requests: list[BenchRequest], batch: int, device: str) -> Result:
    """Warm a contender up and find its fastest settings, one after the other."""
    result = Result()

    def try_out(settings: dict[str, Any]) -> float:
        try:
            contender.configure(settings)
            contender.run([_shortened(request) for request in requests[:batch]])  # warm-up
            timing, result.outputs = _time(contender, requests, device)
        except NotAvailable as error:
            reason = " ".join(str(error).split())[:300]
            result.trials.append({**settings, "unavailable": reason})
            return math.inf
        result.trials.append({**settings, "tokens_per_s": timing.tokens_per_s})
        return timing.seconds

    settings = {name: values[0] for name, values in contender.choices.items()}
    best_s = try_out(settings)
    for name, values in contender.choices.items():
        for value in values[1:]:
            seconds = try_out({**settings, name: value})
            if seconds < best_s:
                best_s, settings = seconds, {**settings, name: value}
    result.settings = settings
    if best_s == math.inf:
        result.unavailable = result.trials[0]["unavailable"]
    contender.close()
    return result


def _shortened(request: BenchRequest) -> BenchRequest:
    return replace(request, max_tokens=min(request.max_tokens, _WARM_UP_TOKENS))


def _time(
    contender: Contender, requests: list[BenchRequest], device: str
) -> tuple[Timing, list[list[int]]]:
    gc.collect()
    _synchronise(device)
    started = time.perf_counter()
    decoded = contender.run(requests)
    _synchronise(device)
    seconds = time.perf_counter() - started
    timing = Timing(seconds, decoded.num_tokens, decoded.num_passes, decoded.num_positions)
    return timing, decoded.outputs


def _synchronise(device: str) -> None:
    """Wait until the device has done all its work; a CPU has when a call returns."""
    if device == "cuda":
        torch.cuda.synchronize()
