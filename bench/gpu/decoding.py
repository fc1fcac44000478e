"""Part 2: how near to the bounds of the hardware does decoding come, and what do modes gain?

Weights are random and on the device only; caches are claimed and not computed, as zeros are read as
fast as numbers; the accepted lengths are drawn. So a measurement takes little more than its steps.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from bench.draws import DrawingEngine
from bench.gpu.models import bench_model, memory_facts, seconds_of, synchronise, weight_bytes
from bench.gpu.steps import Result, Setup, Step

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.models import BenchModel
from mars_serve.bench.decode.workload import PAPER_ACCEPTANCE, agreeing, read_acceptance
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.attention.interface import KeyValueShape
from mars_serve.engine.decoding_options import DecodingOptions, Sampling
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings

SHORT, MIDDLE, LONG = 512, 4096, 32768 - 512
CELLS = [
    *[(batch, SHORT) for batch in (1, 8, 32)],
    *[(batch, MIDDLE) for batch in (1, 8)],
    (64, SHORT),
    (16, SHORT),
    (1, LONG),
    (32, MIDDLE),
    (8, LONG),
    (64, MIDDLE),
]
"""Numbers of streams and cached tokens of each, the most telling first."""
_TINY_CELLS = [(1, 16), (2, 64)]
_WARM_STEPS, _STEPS, _MOST_S, _PROFILED = 8, 60, 1.5, 20
_HIGH_MEAN = 2.4
_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Way:
    """One way of decoding, with the lengths that are drawn."""

    name: str
    mode: Mode
    length: float = 0.0
    """Mean tokens of a pass in mode threshold, agreement of drafts in mode exact."""
    is_profiled: bool = False


WAYS = [
    Way("ar", Mode.AR, is_profiled=True),
    Way("exact .9", Mode.EXACT, 0.9, is_profiled=True),
    Way("threshold 1.79", Mode.THRESHOLD, 1.79),
    Way("exact .8", Mode.EXACT, 0.8),
    Way("threshold 2.4", Mode.THRESHOLD, _HIGH_MEAN),
]


def steps(setup: Setup, size: str) -> list[Step]:
    """Return the steps with a model of a size: load it, then each number of streams and tokens."""
    cells = CELLS
    if setup.is_tiny:
        cells = _TINY_CELLS if size == "7b" else _TINY_CELLS[:1]
    sampled = [(batch, tokens) for batch, tokens in cells if batch in (1, 2, 32)][:2]
    return [
        Step(f"{size} load", partial(load, size=size), 150, needs_s=20),
        *[_step(size, *cell, temperature=0.0) for cell in cells],
        *[_step(size, *cell, temperature=_TEMPERATURE) for cell in sampled],
    ]


def _step(size: str, batch: int, tokens: int, temperature: float) -> Step:
    name = f"{size} batch {batch} context {tokens}"
    if temperature:
        name += f" temperature {temperature:g}"
    run = partial(measure, size=size, batch=batch, tokens=tokens, temperature=temperature)
    return Step(name, run, 90, needs_s=12)


class Bench:
    """An engine with random weights, and the times of its steps."""

    def __init__(self, model: BenchModel, setup: Setup) -> None:
        self.model, self.setup = model, setup
        most = 4 if setup.is_tiny else 64
        settings = EngineSettings(
            max_num_seqs=most,
            enable_prefix_caching=False,
            num_pages=64 if setup.is_tiny else None,
        )
        begin = time.perf_counter()
        weights = model.create()
        self.make_s = time.perf_counter() - begin
        self.engine = DrawingEngine(model.checkpoint, settings, model=weights, device=model.device)
        self.load_s = time.perf_counter() - begin - self.make_s
        self.before_warm_up = memory_facts(setup)
        self._total = 0
        self.captures: list[float] = []
        """Seconds from the start of the warm-up to the end of each capture."""
        begin = time.perf_counter()
        self.times: StepTimes = self.engine.warm_up(partial(self._note, begin))
        synchronise(setup)
        self.warm_up_s = time.perf_counter() - begin
        large = torch.ones(2**22 if setup.is_tiny else 2**28, device=model.device)
        self.read_bytes_per_s = large.nbytes / seconds_of(large.sum, setup, 4)
        self.weight_bytes = weight_bytes(model)
        shape = KeyValueShape.of(model.checkpoint.config)
        self.token_bytes = shape.elements_per_token * model.dtype.itemsize
        self._names = count()

    def _note(self, begin: float, done: int, total: int) -> None:
        """Note the progress of captures, which come before steps are timed."""
        self._total = self._total or total
        if self.setup.device == "cuda" and total == self._total and done > len(self.captures):
            self.captures.append(time.perf_counter() - begin)

    def begin(self, way: Way, batch: int, tokens: int, temperature: float) -> None:
        """Start requests that claim cached tokens, and let the engine know of no earlier ones."""
        engine = self.engine
        engine.adapt_windows(self.times)
        engine.exact_lengths = agreeing(way.length if way.mode is Mode.EXACT else 0.8, 4)
        engine.threshold_lengths = lengths_of_mean(way.length)
        sampling = Sampling(temperature=temperature)
        most = min(1000, engine.max_length - tokens - 1)
        for index in range(batch):
            request = Request(
                f"{way.name}/{next(self._names)}",
                [4 + (7 * index + each) % 200 for each in range(tokens + 1)],
                DecodingOptions(most, way.mode, 0.95, sampling=sampling),
                num_cached=tokens,
                pages=engine._pool.allocate(engine._pool.pages_for(tokens)),
            )
            engine.add(request)

    def end(self) -> None:
        """Drop all requests."""
        for name in list(self.engine._requests):
            self.engine.cancel(name)
        self.engine.check_integrity()


def lengths_of_mean(mean: float) -> Any:
    """Return a distribution of accepted lengths with a mean, the paper's own for 1.79."""
    if mean < _HIGH_MEAN:
        return read_acceptance(PAPER_ACCEPTANCE)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if agreeing(middle, 4).mean < mean else (low, middle)
    return agreeing(low, 4)


def _bench(setup: Setup, size: str) -> Bench:
    if size not in setup.shared:
        setup.shared[size] = Bench(bench_model(size, setup), setup)
    bench: Bench = setup.shared[size]
    return bench


def load(setup: Setup, size: str) -> Result:
    """Make the model and its engine, and return what that took."""
    bench = _bench(setup, size)
    engine = bench.engine
    return {
        "attention": type(engine.attention).__name__,
        "pages": engine.num_pages,
        "page_size": engine.page_size,
        "weights_gib": bench.weight_bytes / 2**30,
        "read_gb_per_s": bench.read_bytes_per_s / 1e9,
        "make_weights_s": bench.make_s,
        "make_engine_s": bench.load_s,
        "warm_up_s": bench.warm_up_s,
        "capture_s": bench.captures[-1] if bench.captures else None,
        "captures": len(bench.captures),
        "memory_before_warm_up": bench.before_warm_up,
        "memory": memory_facts(setup),
    }


def measure(setup: Setup, size: str, batch: int, tokens: int, temperature: float) -> Result:
    """Measure all ways of decoding with so many streams and cached tokens."""
    bench = _bench(setup, size)
    ways = WAYS[:3] if temperature else WAYS
    floor_s = (bench.weight_bytes + batch * tokens * bench.token_bytes) / bench.read_bytes_per_s
    found: Result = {"batch": batch, "context": tokens, "floor_ms": 1e3 * floor_s, "ways": {}}
    for way in ways:
        bench.begin(way, batch, tokens, temperature)
        try:
            figures = _time_steps(bench, floor_s)
            if way.is_profiled and not temperature:
                figures |= _profile(bench, figures["step_ms"])
        finally:
            bench.end()
        found["ways"][way.name] = figures
    base = found["ways"]["ar"]["tokens_per_s"]
    for figures in found["ways"].values():
        figures["over_ar"] = figures["tokens_per_s"] / base
    return found


def _time_steps(bench: Bench, floor_s: float) -> dict[str, float]:
    engine, setup = bench.engine, bench.setup
    few = 2 if setup.is_tiny else 1
    _run(engine, _WARM_STEPS // (2 * few))
    passes = engine.status().num_row_passes
    gc.collect()
    synchronise(setup)
    begin = time.perf_counter()
    num_steps = num_tokens = num_positions = 0
    while num_steps < _STEPS // (10 * few) or (
        num_steps < _STEPS and time.perf_counter() - begin < _MOST_S and not setup.is_tiny
    ):
        for output in engine.step():
            assert output.error is None, output.error
            num_tokens += len(output.tokens)
            num_positions += output.num_positions
        num_steps += 1
    synchronise(setup)
    seconds = time.perf_counter() - begin
    step_s = seconds / num_steps
    return {
        "steps": num_steps,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_pass": num_tokens / max(engine.status().num_row_passes - passes, 1),
        "positions_per_step": num_positions / num_steps,
        "floor_share": floor_s / step_s,
    }


def _run(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def _profile(bench: Bench, step_ms: float) -> dict[str, float]:
    """Return what runs on the device in a step, and for how much of the time nothing does.

    The profiler slows the host down, so the time is that of a step without it.
    """
    setup, activities = bench.setup, torch.profiler.ProfilerActivity
    on_cuda = setup.device == "cuda"
    num_steps = _PROFILED // (10 if setup.is_tiny else 1)
    with torch.profiler.profile(activities=[activities.CUDA if on_cuda else activities.CPU]) as run:
        synchronise(setup)
        _run(bench.engine, num_steps)
        synchronise(setup)
    kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in run.events()
        if event.device_type == kind and (on_cuda or event.cpu_parent is None)
    ]
    assert spans, "the profiler saw nothing run on the device"
    busy_ms = covered(spans) / 1e3 / num_steps
    return {
        "nodes_per_step": len(spans) / num_steps,
        "busy_ms": busy_ms,
        "idle_share": max(0.0, 1 - busy_ms / step_ms),
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of some spans of time."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
