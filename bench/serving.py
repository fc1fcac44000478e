"""Measures served decoding beside vLLM for CPUs, ``transformers serve`` and the bare engine.

    python -m bench.serving --dtype bfloat16 --vllm VENV/bin/vllm \\
        --transformers VENV/bin/transformers --out serving.json

A round starts each server alone, measures it with each number of clients and ends it. The next
round does the same in another order, and the table shows medians over the rounds. All servers get
the same prompts by ``/v1/completions`` and stream greedily. With ``--draws`` marsray's engines draw
how many tokens a pass accepts (`bench.draws`), for weights that are random. vLLM and transformers
need an environment of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil
import typer
from bench.bare_engine import Level
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
_ROOT = Path(__file__).parent.parent
_DRAWING = {"PYTHONPATH": f"{_ROOT / 'bench' / 'drawing_engines'}:{_ROOT}"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "DO_NOT_TRACK": "1"}
_ENGINE = "mars_serve.replica.engine_main"
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
class Server:
    """A server's command line, and the requests that it gets."""

    name: str
    command: list[str]
    ready_path: str
    model: str
    """Model that requests name."""
    modes: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    """Further fields of requests, by the mode that they choose."""
    environment: dict[str, str] = field(default_factory=dict)


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
            await self._send(session, fields, level.num_clients, level.num_clients)
            begin, cpu_s = time.perf_counter(), time.process_time()
            sent = await self._send(session, fields, level.num_clients, level.num_requests)
            seconds = time.perf_counter() - begin
        num_tokens = sum(each.num_tokens for each in sent)
        return {
            "tokens_per_s": num_tokens / seconds,
            "first_token_ms": 1e3 * statistics.median(each.first_s for each in sent),
            "client_cpu_share": (time.process_time() - cpu_s) / seconds,
            "output_tokens": num_tokens / len(sent),
        }

    async def _send(
        self,
        session: aiohttp.ClientSession,
        fields: dict[str, Any],
        num_clients: int,
        num_requests: int,
    ) -> list[_Answer]:
        waiting, answers = iter(range(num_requests)), list[_Answer]()

        async def client() -> None:
            for index in waiting:  # shared: each client takes the next one
                body = {"prompt": self.prompts[index % len(self.prompts)], **fields}
                answers.append(await _complete(session, body | {"max_tokens": self.max_tokens}))

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return answers


@dataclass(frozen=True)
class _Answer:
    first_s: float
    num_tokens: int


async def _complete(session: aiohttp.ClientSession, body: dict[str, Any]) -> _Answer:
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
    return _Answer(first_s, num_tokens)


class _CpuTime:
    """CPU time of a server's processes, without its engine's and from the start of the block."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = psutil.Process(process.pid)

    def __enter__(self) -> _CpuTime:
        self._before = self._by_process()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._by_process()
        self.seconds = sum(spent - self._before.get(pid, 0.0) for pid, spent in after.items())

    def _by_process(self) -> dict[int, float]:
        spent = {}
        for each in [self._process, *self._process.children(recursive=True)]:
            try:
                if _ENGINE not in each.cmdline():
                    times = each.cpu_times()
                    spent[each.pid] = times.user + times.system
            except psutil.NoSuchProcess:
                continue
        return spent


def _servers(
    model: Path,
    dtype: str,
    vllm: Path | None,
    transformers: Path | None,
    num_threads: int | None,
    *,
    modes: list[Mode],
    draws: bool,
) -> list[Server]:
    ours = [*SERVE, "--model", f"mars={model}", "--set", f"models.0.dtype={dtype}"]
    if num_threads is not None:
        ours += ["--set", f"models.0.num_threads={num_threads}"]
    fields = {str(mode): {"mode": str(mode)} for mode in modes}
    if Mode.THRESHOLD in modes:
        fields[Mode.THRESHOLD] |= {"confidence_threshold": 0.95}
    environment = _DRAWING if draws else {}
    servers = [Server("marsray", ours, "/ready", "mars", fields, environment)]
    theirs = [str(model), "--dtype", dtype, "--host", "127.0.0.1"]
    if vllm is not None:
        command = [str(vllm), "serve", *theirs, "--max-model-len", "2048"]
        servers.append(Server("vLLM", command, "/health", str(model), environment=_OFFLINE))
    if transformers is not None:
        command = [str(transformers), "serve", *theirs, "--device", "cpu"]
        served = Server("transformers", command, "/health", str(model), environment=_OFFLINE)
        servers.append(served)
    return servers


def _measure_server(
    server: Server, load: Load, levels: list[Level], log: Path
) -> list[dict[str, Any]]:
    port, runs = free_port(), []
    address = f"http://127.0.0.1:{port}"
    command = [*server.command, "--port", str(port)]
    with running(command, f"{address}{server.ready_path}", log, server.environment) as process:
        for mode, fields in server.modes.items():
            for level in levels:
                with _CpuTime(process) as cpu:
                    sending = load.run(address, {"model": server.model, **fields}, level)
                    figures = asyncio.run(sending)
                num_sent = level.num_clients + level.num_requests
                figures["other_cpu_ms_per_request"] = 1e3 * cpu.seconds / num_sent
                name = f"{server.name} {mode}".strip()
                runs.append({"name": name, "clients": level.num_clients, **figures})
    return runs


def _measure_bare(
    model: Path,
    dtype: str,
    levels: list[Level],
    max_tokens: int,
    num_threads: int,
    *,
    modes: list[Mode],
    draws: bool,
) -> list[dict[str, Any]]:
    """Measure the engine in a process of its own."""
    command = [sys.executable, "-m", "bench.bare_engine", str(model), "--dtype", dtype]
    command += [f"--max-tokens={max_tokens}", f"--threads={num_threads}", *["--draws"] * draws]
    command += [f"--mode={mode}" for mode in modes]
    for level in levels:
        command.append(f"--level={level.num_clients}:{level.num_requests}")
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _prompts(model: Path, num_tokens: int, count: int) -> list[str]:
    """Return texts of about so many tokens, each of which begins otherwise."""
    tokenizer = read_checkpoint(model).tokenizer
    source = random.Random(1)
    size = min(len(tokenizer), 10_000)
    return [
        tokenizer.decode([source.randrange(size // 2, size) for _ in range(num_tokens)])
        for _ in range(count)
    ]


def _medians(runs: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, float]]:
    groups = defaultdict(list)
    for run in runs:
        groups[run["name"], run["clients"]].append(run)
    return {
        key: {
            name: statistics.median(run[name] for run in group)
            for name, value in group[0].items()
            if isinstance(value, float)
        }
        for key, group in groups.items()
    }


def _table(medians: dict[tuple[str, int], dict[str, float]], levels: list[Level]) -> Table:
    """Draw tokens/s and, behind the stroke, milliseconds to the first token."""
    table = Table("", *(f"{level.num_clients} clients" for level in levels))
    for name in dict.fromkeys(name for name, _ in medians):
        cells = []
        for level in levels:
            row = medians.get((name, level.num_clients), {})
            first = f" / {row['first_token_ms']:.0f}" if "first_token_ms" in row else ""
            cells.append(f"{row['tokens_per_s']:,.1f}{first}" if row else "")
        table.add_row(name, *cells)
    return table


def main(
    model: Annotated[
        Path | None, typer.Argument(help="MARS checkpoint; by default 100M random weights.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number type of the weights.")] = "bfloat16",
    vllm: Annotated[Path | None, typer.Option(help="Program; without it, left out.")] = None,
    transformers: Annotated[
        Path | None, typer.Option(help="Program; without it, left out.")
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
            min=1,
            help="CPU threads of marsray's engines; by default all cores bare, and "
            "as many as it chooses served.",
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
        servers = _servers(model, dtype, vllm, transformers, threads, modes=modes, draws=draws)
        for number in range(rounds):
            num_bare = threads or os.cpu_count() or 1
            found = _measure_bare(
                model, dtype, levels, max_tokens, num_bare, modes=modes, draws=draws
            )
            turn = number % len(servers)
            for server in servers[turn:] + servers[:turn]:
                found += _measure_server(server, load, levels, log)
            runs += [{"round": number, **run} for run in found]
            console.print(f"round {number + 1} of {rounds}", _table(_medians(found), levels))
            if out is not None:
                out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    Console().print(_table(_medians(runs), levels))


if __name__ == "__main__":
    typer.run(main)
