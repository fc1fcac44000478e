"""Two engines in processes of their own share one GPU, without Ray."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench.gpu.setup import Setup

from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.checkpoint.weights import add_mask_token, save_checkpoint
from mars_platform.method.mode import Mode
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.ipc.client import EngineClient
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_serve.replica.engine_process import start_engine
from mars_train.run.scratch import train_tokenizer

_TEXTS = [f"What is {a} plus {b}? It is {a + b}, I think." for a in range(9) for b in range(9)]


def test_two_engines_share_the_gpu(
    setup: Setup, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    settings = _settings(setup, tmp_path)
    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as executor:
        started = [executor.submit(start_engine, settings, 1) for _ in range(2)]
        loops = [each.result() for each in started if each.exception() is None]
        record_property("start_s", time.perf_counter() - begin)
        try:
            for each in started:
                each.result()  # raises what kept an engine from starting
            serving = [executor.submit(asyncio.run, _serve(loop, setup)) for loop in loops]
            served = [each.result() for each in serving]
        finally:
            for loop in loops:
                loop.stop()
    record_property("engines", served)
    assert all(each["pages"] > 0 and each["out_of_memory"] == 0 for each in served)


def _settings(setup: Setup, path: Path) -> ModelSettings:
    """Store a model with random weights, and return its settings."""
    model = setup.model("0.5b").create()
    tokenizer = train_tokenizer(_TEXTS, 250 if setup.is_tiny else 300)
    mask, _ = add_mask_token(model, tokenizer)
    save_checkpoint(path, model, tokenizer, MarsMetadata(block_size=4, mask_token_id=mask))
    del model
    if setup.on_cuda:
        torch.cuda.empty_cache()  # the engines get the whole memory
    return ModelSettings(
        name="untrained",
        path=str(path),
        num_gpus=0.5 if setup.on_cuda else 0,
        engine=EngineSettings(
            max_num_seqs=2 if setup.is_tiny else 16,
            num_pages=None if setup.on_cuda else 64,
        ),
    )


async def _serve(loop: EngineClient, setup: Setup) -> dict[str, Any]:
    """Send requests in each mode, and return the speeds and what the engine reports."""
    batch, most = (2, 4) if setup.is_tiny else (16, 128)
    found: dict[str, Any] = {}

    async def take(request: Request) -> int:
        return sum([len(output.tokens) async for output in loop.stream(request)])

    for mode in (Mode.AR, Mode.THRESHOLD, Mode.EXACT):
        begin = time.perf_counter()
        options = DecodingOptions(most, mode, 0.95, ignore_eos=True)
        rows = [Request(f"{mode}{index}", [5, 6, 7 + index], options) for index in range(batch)]
        counts = await asyncio.gather(*map(take, rows))
        assert counts == [most] * batch, counts
        found[f"{mode} tokens/s"] = sum(counts) / (time.perf_counter() - begin)
    status = loop.status()
    return {**found, "pages": status.num_pages, "out_of_memory": status.num_out_of_memory}
