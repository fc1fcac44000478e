"""Measures served decoding, beside other servers.

    python -m bench.serving --dtype bfloat16 --out serving.json \\
        --other "vLLM=VENV/bin/vllm serve {model} --dtype bfloat16 --max-model-len 2048" \\
        --other "SGLang=VENV/bin/python -m sglang.launch_server --model {model} --device cpu"

A round starts each server alone, measures it with each number of clients and ends it. The next
round does the same in another order, and the table shows medians over the rounds. All servers get
the same prompts by ``/v1/completions`` and stream greedily. With ``--draws`` marsray's engines draw
how many tokens a pass accepts, for weights that are random; see `mars_serve.bench.decode.drawing`.
Other servers need an environment of their own; ``--port`` is added to their command, and they are
ready once ``/health`` answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
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
from mars_train.recipe import ScratchModel
from mars_train.run.scratch import create_model

_SIZES = ("vocab_size", "max_position_embeddings")
_BLOCK_SIZE, _VOCABULARY, _NUM_WORDS, _MAX_LENGTH = 4, 32_000, 60_000, 2048
_PYTHON_PATH = [str(Path(__file__).with_name("drawing_engines")), os.getenv("PYTHONPATH", "")]
_DRAWING = {"PYTHONPATH": os.pathsep.join(filter(None, _PYTHON_PATH))}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "DO_NOT_TRACK": "1"}
_MODES = [Mode.AR, Mode.THRESHOLD, Mode.EXACT]


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


@dataclass(frozen=True)
class Level:
    """A number of clients, each of which sends one request at a time, and of all requests."""

    num_clients: int
    num_requests: int

    @classmethod
    def parse(cls, text: str) -> Level:
        """Read ``CLIENTS:REQUESTS``."""
        num_clients, _, num_requests = text.partition(":")
        return cls(int(num_clients), int(num_requests or num_clients))


@dataclass(frozen=True)
class Server:
    """A server's command line, and the requests that it gets."""

    name: str
    command: list[str]
    ready_path: str
    model: str
    modes: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    """Further fields of requests, by the mode that they choose."""
    environment: dict[str, str] = field(default_factory=dict)

    def measure(self, load: Load, levels: Sequence[Level], log: Path) -> list[dict[str, Any]]:
        """Start the server, measure each mode with each number of clients, and end it."""
        port, runs = free_port(), []
        address = f"http://127.0.0.1:{port}"
        command = [*self.command, "--port", str(port)]
        with running(command, f"{address}{self.ready_path}", log, self.environment):
            for mode, fields in self.modes.items():
                for level in levels:
                    sending = load.run(address, {"model": self.model, **fields}, level)
                    name = f"{self.name} {mode}".strip()
                    figures = asyncio.run(sending)
                    runs.append({"name": name, "clients": level.num_clients, **figures})
        return runs


@dataclass(frozen=True)
class Load:
    """The requests of a run."""

    prompts: list[str]
    max_tokens: int

    async def run(self, address: str, fields: dict[str, Any], level: Level) -> dict[str, float]:
        """Send requests to a server, and as many before as there are clients, to warm it up.

        Raises:
            RuntimeError: a request failed.
        """
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=1200)
        async with aiohttp.ClientSession(address, connector=connector, timeout=timeout) as session:

            async def send(num_requests: int) -> list[tuple[float, int]]:
                waiting, answers = iter(range(num_requests)), list[tuple[float, int]]()

                async def client() -> None:
                    for index in waiting:  # shared: each client takes the next one
                        prompt = self.prompts[index % len(self.prompts)]
                        body = {"prompt": prompt, "max_tokens": self.max_tokens, **fields}
                        answers.append(await _complete(session, body))

                await asyncio.gather(*(client() for _ in range(level.num_clients)))
                return answers

            await send(level.num_clients)
            begin = time.perf_counter()
            answers = await send(level.num_requests)
            seconds = time.perf_counter() - begin
        num_tokens = sum(each for _, each in answers)
        return {
            "tokens_per_s": num_tokens / seconds,
            "first_token_ms": 1e3 * statistics.median(first_s for first_s, _ in answers),
            "output_tokens": num_tokens / len(answers),
        }


async def _complete(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[float, int]:
    """Stream a completion; return the seconds to its first token and the number of its tokens."""
    body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    begin, first_s, num_tokens = time.perf_counter(), 0.0, 0
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                first_s = first_s or time.perf_counter() - begin
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    return first_s, num_tokens


def _servers(
    model: Path, dtype: str, num_threads: int | None, modes: Sequence[Mode], others: Sequence[str],
    *, draws: bool,
) -> list[Server]:  # fmt: skip
    ours = [*SERVE, "--model", f"mars={model}", "--set", f"models.0.dtype={dtype}"]
    if num_threads is not None:
        ours += ["--set", f"models.0.num_threads={num_threads}"]
    fields: dict[str, dict[str, Any]] = {str(mode): {"mode": str(mode)} for mode in modes}
    if Mode.THRESHOLD in modes:
        fields[Mode.THRESHOLD] |= {"confidence_threshold": 0.95}
    servers = [Server("marsray", ours, "/ready", "mars", fields, _DRAWING if draws else {})]
    for other in others:
        name, _, command = other.partition("=")
        split = [part.format(model=model) for part in shlex.split(command)]
        servers.append(Server(name, split, "/health", str(model), environment=_OFFLINE))
    return servers


def _prompts(model: Path, num_tokens: int, count: int) -> list[str]:
    """Return texts of about so many tokens, each of which begins otherwise."""
    tokenizer = read_checkpoint(model).tokenizer
    source = random.Random(1)
    size = min(len(tokenizer), 10_000)
    return [
        tokenizer.decode([source.randrange(size // 2, size) for _ in range(num_tokens)])
        for _ in range(count)
    ]


def _table(runs: list[dict[str, Any]], levels: Sequence[Level]) -> Table:
    """Draw medians of tokens/s and, behind the stroke, of milliseconds to the first token."""
    groups = defaultdict(list)
    for run in runs:
        groups[run["name"], run["clients"]].append(run)
    table = Table("", *(f"{level.num_clients} clients" for level in levels))
    for name in dict.fromkeys(run["name"] for run in runs):
        cells = []
        for level in levels:
            found = groups[name, level.num_clients]
            speed, first_ms = (
                statistics.median(run[key] for run in found)
                for key in ("tokens_per_s", "first_token_ms")
            )
            cells.append(f"{speed:,.1f} / {first_ms:.0f}")
        table.add_row(name, *cells)
    return table


def main(
    model: Annotated[
        Path | None, typer.Argument(help="MARS checkpoint; by default 100M random weights.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number type of the weights.")] = "bfloat16",
    other: Annotated[
        list[str] | None, typer.Option(help="NAME=COMMAND of another server; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each server.")] = 3,
    level: Annotated[
        list[Level] | None,
        typer.Option(parser=Level.parse, help="CLIENTS:REQUESTS of a run; may be repeated."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="About so many in a prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 64,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="CPU threads of marsray's engines; by default as many as it chooses."
        ),
    ] = None,
    mode: Annotated[
        list[Mode] | None, typer.Option(help="Decoding mode; by default all of them.")
    ] = None,
    draws: Annotated[bool, typer.Option(help="Draw the accepted lengths.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file for every run.")] = None,
    log: Annotated[Path, typer.Option(help="File for the servers' output.")] = Path("serving.log"),
) -> None:
    """Print tokens/s and the time to the first token of each server with each number of clients."""
    levels = level or [Level(1, 8), Level(4, 16), Level(16, 64), Level(32, 96)]
    modes = mode or _MODES
    console, runs = Console(stderr=True), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            make_checkpoint(Path(folder))
            model = Path(folder) / "mars"
        model = model.resolve()
        prompts = _prompts(model, prompt_tokens, max(each.num_requests for each in levels))
        load = Load(prompts, max_tokens)
        servers = _servers(model, dtype, threads, modes, other or [], draws=draws)
        for number in range(rounds):
            found, turn = list[dict[str, Any]](), number % len(servers)
            for server in servers[turn:] + servers[:turn]:
                found += server.measure(load, levels, log)
            runs += [{"round": number, **run} for run in found]
            console.print(f"round {number + 1} of {rounds}", _table(found, levels))
            if out is not None:
                out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    Console().print(_table(runs, levels))


if __name__ == "__main__":
    typer.run(main)
