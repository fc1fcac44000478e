"""How near to the bounds of the hardware does decoding come, and what do modes gain?

Weights are random and on the device only; caches are claimed and not computed, as zeros are read as
fast as numbers; the accepted lengths are drawn. So a measurement takes little more than its steps.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import count
from typing import Any

import pytest
import torch
from bench.gpu.setup import Setup, weight_bytes

from mars_platform.method.mode import Mode
from mars_serve.bench.decode.drawing import DrawingEngine
from mars_serve.bench.decode.workload import agreeing
from mars_serve.engine.decoding_options import DecodingOptions, Sampling
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.engine.settings import EngineSettings

Record = Callable[[str, Any], None]
CELLS = [
    ("7b", 1, 512, 0.0),
    ("7b", 8, 512, 0.0),
    ("7b", 32, 512, 0.0),
    ("7b", 8, 4096, 0.0),
    ("7b", 1, 512, 0.8),
    ("7b", 64, 512, 0.0),
    ("7b", 1, 32768 - 512, 0.0),
    ("7b", 64, 4096, 0.0),
    ("0.5b", 1, 512, 0.0),
    ("0.5b", 32, 512, 0.0),
]
"""Size of the model, number of streams, cached tokens of each and temperature, the most telling
first."""
_TINY = (2, 64)
"""Most streams and cached tokens of a tiny run."""
_WARM_STEPS, _MOST_S = 4, 1.5
WAYS = {
    "ar": (Mode.AR, 0.0),
    "exact .9": (Mode.EXACT, 0.9),
    "threshold 1.79": (Mode.THRESHOLD, 0.0),
    "exact .8": (Mode.EXACT, 0.8),
}
"""Modes, and the agreement of drafts in mode exact; mode threshold draws the paper's lengths."""
_PROFILED_WAYS = ("ar", "exact .9")


class Bench:
    """An engine with random weights, and the times of its steps."""

    def __init__(self, size: str, setup: Setup) -> None:
        model = setup.model(size)
        self.setup = setup
        settings = EngineSettings(
            max_num_seqs=4 if setup.is_tiny else 64,
            enable_prefix_caching=False,
            num_pages=64 if setup.is_tiny else None,
        )
        begin = time.perf_counter()
        weights = model.create()
        self.engine = DrawingEngine(model.checkpoint, settings, model=weights, device=model.device)
        made_s = time.perf_counter() - begin
        begin = time.perf_counter()
        self.times = self.engine.warm_up()
        setup.synchronise()
        warm_up_s = time.perf_counter() - begin
        large = torch.ones(2**22 if setup.is_tiny else 2**28, device=model.device)
        self.read_bytes_per_s = large.nbytes / setup.seconds_of(large.sum, 4)
        self.weight_bytes = weight_bytes(model)
        self.token_bytes = self.engine.token_elements * model.dtype.itemsize
        self._names = count()
        self.start = {
            "attention": type(self.engine.attention).__name__,
            "pages": self.engine.num_pages,
            "page_size": self.engine.page_size,
            "weights_gib": self.weight_bytes / 2**30,
            "read_gb_per_s": self.read_bytes_per_s / 1e9,
            "make_s": made_s,
            "warm_up_s": warm_up_s,
            "free_gib": torch.cuda.mem_get_info()[0] / 2**30 if setup.on_cuda else None,
        }
        """Figures of the engine's start."""

    def begin(self, way: str, batch: int, tokens: int, temperature: float) -> None:
        """Start requests that claim cached tokens, and let the engine know of no earlier ones."""
        engine, (mode, agreement) = self.engine, WAYS[way]
        engine.adapt_windows(self.times)
        engine.draws = replace(engine.draws, exact=agreeing(agreement or 0.8, 4))
        most = min(1000, engine.max_length - tokens - 1)
        sampling = Sampling(temperature=temperature)
        for index in range(batch):
            request = Request(
                f"{way}/{next(self._names)}",
                [4 + (7 * index + each) % 200 for each in range(tokens + 1)],
                DecodingOptions(most, mode, 0.95, sampling=sampling),
                num_cached=tokens,
            )
            row = ScheduledRow(request, 0, (0,), reads_logits=False)
            assert engine._memory.reserve(row), "the pool holds all requests"
            engine.add(request)

    def end(self) -> None:
        """Drop all requests."""
        for name in list(self.engine._requests):
            self.engine.cancel(name)
        self.engine.check_integrity()


@pytest.fixture(scope="module")
def benches(setup: Setup) -> Callable[[str], Bench]:
    """Return a function that makes the engine of a size once."""
    return cache(partial(Bench, setup=setup))


@pytest.mark.parametrize("size", ["7b", "0.5b"])
def test_an_engine_starts(
    setup: Setup, benches: Callable[[str], Bench], size: str, record_property: Record
) -> None:
    bench = benches(size)
    for name, value in bench.start.items():
        record_property(name, value)
    assert (bench.start["attention"] == "PagedAttention") is setup.on_cuda


@pytest.mark.parametrize(("size", "batch", "context", "temperature"), CELLS)
def test_steps_are_timed(
    setup: Setup,
    benches: Callable[[str], Bench],
    size: str,
    batch: int,
    context: int,
    temperature: float,
    record_property: Record,
) -> None:
    """Measures all ways of decoding with so many streams and cached tokens."""
    bench = benches(size)
    if setup.is_tiny:
        batch, context = min(batch, _TINY[0]), min(context, _TINY[1])
    floor_s = (bench.weight_bytes + batch * context * bench.token_bytes) / bench.read_bytes_per_s
    record_property("floor_ms", 1e3 * floor_s)
    base = None
    for way in list(WAYS)[: 3 if temperature else None]:
        bench.begin(way, batch, context, temperature)
        try:
            figures = _time_steps(bench, floor_s)
            if way in _PROFILED_WAYS and not temperature:
                figures |= _profile(bench, figures["step_ms"])
        finally:
            bench.end()
        base = base or figures["tokens_per_s"]
        record_property(way, figures | {"over_ar": figures["tokens_per_s"] / base})


def _time_steps(bench: Bench, floor_s: float) -> dict[str, float]:
    engine, setup = bench.engine, bench.setup
    least, most = (3, 3) if setup.is_tiny else (6, 60)
    for _ in range(_WARM_STEPS):
        engine.step()
    passes = engine.status().num_row_passes
    gc.collect()
    setup.synchronise()
    begin = time.perf_counter()
    num_steps = num_tokens = num_positions = 0
    while num_steps < least or (num_steps < most and time.perf_counter() - begin < _MOST_S):
        for output in engine.step():
            assert output.error is None, output.error
            num_tokens += len(output.tokens)
            num_positions += output.num_positions
        num_steps += 1
    setup.synchronise()
    seconds = time.perf_counter() - begin
    return {
        "steps": num_steps,
        "step_ms": 1e3 * seconds / num_steps,
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_pass": num_tokens / max(engine.status().num_row_passes - passes, 1),
        "positions_per_step": num_positions / num_steps,
        "floor_share": floor_s * num_steps / seconds,
    }


def _profile(bench: Bench, step_ms: float) -> dict[str, float]:
    """Return what runs on the device in a step, and for how much of the time nothing does.

    The profiler slows the host down, so the time is that of a step without it.
    """
    setup, activities = bench.setup, torch.profiler.ProfilerActivity
    on_cuda = setup.on_cuda
    num_steps = 2 if setup.is_tiny else 20
    with torch.profiler.profile(activities=[activities.CUDA if on_cuda else activities.CPU]) as run:
        setup.synchronise()
        for _ in range(num_steps):
            bench.engine.step()
        setup.synchronise()
    kind = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    seconds = [
        1e-6 * event.time_range.elapsed_us()
        for event in run.events()
        if event.device_type == kind and (on_cuda or event.cpu_parent is None)
    ]
    assert seconds, "the profiler saw nothing run on the device"
    busy_ms = 1e3 * sum(seconds) / num_steps
    return {
        "nodes_per_step": len(seconds) / num_steps,
        "busy_ms": busy_ms,
        "idle_share": max(0.0, 1 - busy_ms / step_ms),
    }
