"""What serving costs: throughput over HTTP as a share of the bare engine's.

    python bench/served_share.py --rounds 5

The same requests go to an engine in this process and, 64 at a time, to ``marsray serve``, streamed
and not, in alternation. Both have the same settings and threads; the server has the cores that its
HTTP processes and this client need to itself with the engine, as it would in use. The model is of
about 100 million random weights unless one is named; greedy output is the same on every path.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when the kernels are loaded

import aiohttp
import torch
import typer
from rich.console import Console
from rich.table import Table
from servers import marsray_command, running

from mars_platform.checkpoint.directory import (
    MarsMetadata,
    add_mask_token,
    load_model,
    read_checkpoint,
    save_checkpoint,
)
from mars_platform.cluster.processes import free_port
from mars_platform.method.mode import Mode
from mars_serve.bench.decode.models import PRESETS
from mars_serve.bench.decode.workload import (
    BenchRequest,
    RaggedShape,
    generated_requests,
)
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import DecodingOptions, Request
from mars_serve.engine.settings import EngineSettings
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import create_model

_SIZES = ("vocab_size", "max_position_embeddings")
_BLOCK_SIZE, _VOCABULARY, _NUM_WORDS, _MAX_LENGTH = 4, 32_000, 60_000, 2048


@dataclass(frozen=True)
class Measured:
    """One run."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def make_checkpoint(path: Path) -> None:
    """About 100 million random weights, with a tokenizer of made-up words."""
    source = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(source.choices(letters, k=source.randint(3, 9))) for _ in range(_NUM_WORDS)]
    texts = [" ".join(words[start : start + 20]) for start in range(0, _NUM_WORDS, 20)]
    config = {key: value for key, value in PRESETS["qwen2-100m"].items() if key not in _SIZES}
    scratch = ScratchModel(config=config, vocabulary_size=_VOCABULARY)
    plain = path / "plain"
    create_model(scratch, texts, max_length=_MAX_LENGTH // 2, path=plain, seed=0)
    model, tokenizer = load_model(plain), read_checkpoint(plain).tokenizer
    mask, _ = add_mask_token(model, tokenizer)
    metadata = MarsMetadata(block_size=_BLOCK_SIZE, mask_token_id=mask)
    save_checkpoint(path / "mars", model, tokenizer, metadata)


def run_bare(engine: Engine, requests: list[BenchRequest], mode: Mode) -> Measured:
    """All requests at once, in this process."""
    running_requests = [
        Request(each.id, list(each.prompt), DecodingOptions(each.max_tokens, mode, 0.95))
        for each in requests
    ]
    begin = time.perf_counter()
    for request in running_requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - begin
    return Measured(sum(request.num_output for request in running_requests), seconds)


async def run_served(
    address: str, requests: list[BenchRequest], mode: Mode, concurrency: int, *, stream: bool
) -> Measured:
    """As many requests at a time as there are clients."""
    waiting, counts = iter(requests), {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(address, connector=connector) as session:

        async def client() -> None:
            for request in waiting:  # shared: each client takes the next one
                counts[request.id] = await _complete(session, request, mode, stream)

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        seconds = time.perf_counter() - begin
    return Measured(sum(counts.values()), seconds)


async def _complete(
    session: aiohttp.ClientSession, request: BenchRequest, mode: Mode, stream: bool
) -> int:
    """Output tokens, as the server counts them."""
    body: dict[str, Any] = {"model": "mars", "prompt": list(request.prompt), "mode": mode}
    body |= {"max_tokens": request.max_tokens, "stream": stream}
    if mode is Mode.THRESHOLD:
        body["confidence_threshold"] = 0.95
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        if not stream:
            return int((await response.json())["usage"]["completion_tokens"])
        last = b""
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = line
        return int(json.loads(last[6:])["usage"]["completion_tokens"])


def _bare_engine(model: Path, settings: EngineSettings) -> Engine:
    engine = Engine(read_checkpoint(model), settings)
    engine.warm_up()
    return engine


def _report(
    measured: dict[str, list[Measured]], title: str, console: Console
) -> list[dict[str, Any]]:
    table = Table("path", "tokens/s", "share of the engine's", "least", "most", title=title)
    bare, rows = measured["engine"], []
    for name, runs in measured.items():
        shares = [
            run.tokens_per_s / base.tokens_per_s for run, base in zip(runs, bare, strict=True)
        ]
        speed = statistics.median(run.tokens_per_s for run in runs)
        share = statistics.median(shares)
        rows.append({"path": name, "tokens_per_s": speed, "share": share, "shares": shares})
        spread = (f"{min(shares):.1%}", f"{max(shares):.1%}")
        table.add_row(name, f"{speed:,.0f}", f"{share:.1%}", *spread)
    console.print(table)
    return rows


def main(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint; else 100 million random weights.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Of each run.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1)] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 32,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    mode: Annotated[Mode, typer.Option()] = Mode.AR,
    threads: Annotated[int, typer.Option(min=1, help="Of the kernels, on both sides.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON with all shares.")] = None,
    log: Annotated[Path, typer.Option(help="What the server prints.")] = Path("served_share.log"),
) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            make_checkpoint(Path(folder))
            model = Path(folder) / "mars"
        config = _config(Path(folder), model, threads)
        port = free_port()
        command = [*marsray_command({}, port, []), str(config)]
        with running(command, f"http://127.0.0.1:{port}/ready", log):
            address = f"http://127.0.0.1:{port}"
            shape = RaggedShape((prompt_tokens, prompt_tokens), (output_tokens, output_tokens))
            vocabulary = range(4, read_checkpoint(model).config.vocab_size - 65)
            prompts = generated_requests(requests, shape, list(vocabulary), seed=0)
            engine = _bare_engine(model, EngineSettings(enable_prefix_caching=False))
            paths: dict[str, Callable[[], Measured]] = {
                "engine": lambda: run_bare(engine, prompts, mode),
                "served": lambda: asyncio.run(
                    run_served(address, prompts, mode, concurrency, stream=False)
                ),
                "served, streamed": lambda: asyncio.run(
                    run_served(address, prompts, mode, concurrency, stream=True)
                ),
            }
            measured = _alternate(paths, rounds)
    title = f"{requests} requests, {concurrency} at once, mode {mode}, medians of {rounds} rounds"
    rows = _report(measured, title, Console())
    if out is not None:
        out.write_text(json.dumps({"title": title, "rows": rows}, indent=1) + "\n")


def _config(folder: Path, model: Path, threads: int) -> Path:
    """The server's settings: the engine's are those of the bare one."""
    engine = {"enable_prefix_caching": False}
    entry = {"name": "mars", "path": str(model), "num_threads": threads, "engine": engine}
    path = folder / "serve.json"
    path.write_text(json.dumps({"models": [entry]}), encoding="utf-8")
    return path


def _alternate(paths: dict[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Runs of every path, one round after another; a first round warms up."""
    measured: dict[str, list[Measured]] = {name: [] for name in paths}
    for number in range(rounds + 1):
        found = {name: run() for name, run in paths.items()}
        totals = {run.num_tokens for run in found.values()}
        assert len(totals) == 1, f"all paths give the same tokens, not {totals}"
        for name, run in found.items() if number else ():
            measured[name].append(run)
    return measured


if __name__ == "__main__":
    typer.run(main)
