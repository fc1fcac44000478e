"""Measures throughput over HTTP as a share of the bare engine's.

    python -m bench.served_share --rounds 5

The same requests go in turn to an engine in this process and to ``marsray serve``, 64 at a time,
streamed and unstreamed. Both engines have the same settings and number of threads; the server's
HTTP processes and this client share the machine with the server's engine, as they do in use. The
model has about 100 million random weights unless one is named. Greedy output is the same on every
path.
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
from bench.engine_runs import decode, warm_engine
from bench.servers import SERVE, running
from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.directory import (
    add_mask_token,
    load_model,
    read_checkpoint,
    save_checkpoint,
)
from mars_platform.checkpoint.metadata import MarsMetadata
from mars_platform.cluster.processes import free_port
from mars_platform.method.mode import Mode
from mars_serve.bench.decode.models import PRESETS
from mars_serve.bench.decode.workload import (
    BenchRequest,
    RaggedShape,
    generated_requests,
)
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import create_model

_THRESHOLD = 0.95
_SIZES = ("vocab_size", "max_position_embeddings")
_BLOCK_SIZE, _VOCABULARY, _NUM_WORDS, _MAX_LENGTH = 4, 32_000, 60_000, 2048


@dataclass(frozen=True)
class Measured:
    """Output tokens of all requests of a run, and the seconds that it took."""

    num_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def make_checkpoint(path: Path) -> None:
    """Write a MARS checkpoint of about 100 million random weights to ``path / "mars"``.

    Its tokenizer is trained on made-up words.
    """
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
    """Decode all requests at once in this process."""
    run = decode(
        engine,
        [
            Request(each.id, list(each.prompt), DecodingOptions(each.max_tokens, mode, _THRESHOLD))
            for each in requests
        ],
    )
    return Measured(run.num_tokens, run.seconds)


async def run_served(
    address: str, requests: list[BenchRequest], mode: Mode, concurrency: int, *, stream: bool
) -> Measured:
    """Send all requests to the server with ``concurrency`` clients, one request each at a time."""
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
    """Send one request and return its number of output tokens, as the server counts them."""
    body: dict[str, Any] = {"model": "mars", "prompt": list(request.prompt), "mode": mode}
    body |= {"max_tokens": request.max_tokens, "stream": stream}
    if mode is Mode.THRESHOLD:
        body["confidence_threshold"] = _THRESHOLD
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
        Path | None, typer.Option(help="Checkpoint; by default 100 million random weights.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of each path.")] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests in each run.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 64,
    mode: Annotated[Mode, typer.Option(help="Decoding mode.")] = Mode.AR,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each engine.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for all shares.")] = None,
    log: Annotated[Path, typer.Option(help="File for the server's output.")] = Path(
        "served_share.log"
    ),
) -> None:
    """Print the throughput of each path and its share of the engine's."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            make_checkpoint(Path(folder))
            model = Path(folder) / "mars"
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        command = [*SERVE, str(_config(Path(folder), model, threads, port))]
        with running(command, f"{address}/ready", log):
            shape = RaggedShape((prompt_tokens, prompt_tokens), (output_tokens, output_tokens))
            vocabulary = range(4, read_checkpoint(model).config.vocab_size - 65)
            prompts = generated_requests(requests, shape, list(vocabulary), seed=0)
            settings = EngineSettings(enable_prefix_caching=False)
            engine = warm_engine(read_checkpoint(model), settings)
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


def _config(folder: Path, model: Path, threads: int, port: int) -> Path:
    """Write the server's settings, with the bare engine's settings for its engine."""
    engine = {"enable_prefix_caching": False}
    entry = {"name": "mars", "path": str(model), "num_threads": threads, "engine": engine}
    path = folder / "serve.json"
    path.write_text(json.dumps({"models": [entry], "port": port}), encoding="utf-8")
    return path


def _alternate(paths: dict[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Run every path once per round; the first round warms up and is left out."""
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
