"""Part 3: the engine in a process of its own, and two of them on one GPU, all without Ray."""

from __future__ import annotations

import asyncio
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from bench.gpu.models import bench_model
from bench.gpu.steps import Result, Setup, Step

from mars_platform.checkpoint.directory import add_mask_token, save_checkpoint
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.method.mode import Mode
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.attention.interface import KeyValueShape
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.ipc.loop import EngineLoop
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.replica.engine_process import start_engine
from mars_train.run.scratch import train_tokenizer

_TEXTS = [f"What is {a} plus {b}? It is {a + b}, I think." for a in range(9) for b in range(9)]


def steps(_setup: Setup) -> list[Step]:
    """Return the steps; the engines of one are ended before the next begins."""
    return [
        Step("engine process", one_process, 120, needs_s=40),
        Step("two engines on one GPU", two_processes, 150, needs_s=60),
    ]


def one_process(setup: Setup) -> Result:
    """Serve requests in each mode by an engine process, and end it."""
    settings = _settings(setup, share=1.0)
    begin = time.perf_counter()
    loop = _start(settings)
    try:
        return {"start_s": time.perf_counter() - begin, **_serve(loop, setup)}
    finally:
        loop.stop()


def two_processes(setup: Setup) -> Result:
    """Start two engines at once, each with half of the GPU, and let both serve at once."""
    settings = _settings(setup, share=0.5)
    with ThreadPoolExecutor(2) as executor:
        started = [executor.submit(_start, settings) for _ in range(2)]
        loops = [each.result() for each in started if each.exception() is None]
        try:
            for each in started:
                each.result()  # raises what kept an engine from starting
            served = list(executor.map(lambda loop: _serve(loop, setup), loops))
        finally:
            for loop in loops:
                loop.stop()
    found: Result = {"engines": served}
    if setup.device == "cuda":
        _, total = torch.cuda.mem_get_info()
        config = bench_model("0.5b", setup).checkpoint.config
        token_bytes = KeyValueShape.of(config).elements_per_token * 2
        page_bytes = token_bytes * settings.engine.page_size_on("cuda")
        shares = [each["pages"] * page_bytes / total for each in served]
        found["page_shares"] = shares
        assert all(0.2 < share < 0.5 for share in shares), shares
    return found


def _start(settings: ModelSettings) -> EngineLoop:
    return start_engine(settings, 1)


def _settings(setup: Setup, share: float) -> ModelSettings:
    """Return the settings of a model with random weights, which are stored once for all steps."""
    if "checkpoint" not in setup.shared:
        setup.shared["checkpoint"] = tempfile.TemporaryDirectory()
        _save(Path(setup.shared["checkpoint"].name), setup)
    return ModelSettings(
        name="untrained",
        path=setup.shared["checkpoint"].name,
        num_gpus=share if setup.device == "cuda" else 0,
        engine=EngineSettings(
            max_num_seqs=2 if setup.is_tiny else 16,
            num_pages=None if setup.device == "cuda" else 64,
        ),
    )


def _save(path: Path, setup: Setup) -> None:
    model = bench_model("0.5b", setup).create()
    tokenizer = train_tokenizer(_TEXTS, 300 if not setup.is_tiny else 250)
    mask, _ = add_mask_token(model, tokenizer)
    save_checkpoint(path, model, tokenizer, MarsMetadata(block_size=4, mask_token_id=mask))
    del model
    if setup.device == "cuda":
        torch.cuda.empty_cache()  # the engines get the whole memory


def _serve(loop: EngineLoop, setup: Setup) -> Result:
    return asyncio.run(_serve_all(loop, setup))


async def _serve_all(loop: EngineLoop, setup: Setup) -> Result:
    """Send requests in each mode, and return the speed and what the engine reports."""
    batch, most = (2, 4) if setup.is_tiny else (16, 128)
    speeds = {}
    for mode in (Mode.AR, Mode.THRESHOLD, Mode.EXACT):
        begin = time.perf_counter()
        options = DecodingOptions(most, mode, 0.95, ignore_eos=True)
        names = [f"{mode}{index}" for index in range(batch)]
        counts = await asyncio.gather(*[_take(loop, name, options) for name in names])
        assert counts == [most] * batch, counts
        speeds[str(mode)] = sum(counts) / (time.perf_counter() - begin)
    status = loop.status()
    return {
        "tokens_per_s": speeds,
        "pages": status.num_pages,
        "out_of_memory": status.num_out_of_memory,
    }


async def _take(loop: EngineLoop, name: str, options: DecodingOptions) -> int:
    request = Request(name, [5, 6, 7 + len(name)], options)
    return sum([len(output.tokens) async for output in loop.stream(request)])
