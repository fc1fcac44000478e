"""Measures served latency and throughput beside ``transformers serve``, with aiperf.

    python -m bench.serving MODEL --data eval.jsonl --aiperf .venv-clients/bin/aiperf \\
        --transformers OTHER_VENV/bin/transformers --out serving.json

A round starts each server alone, measures it at every concurrency and ends it. The next round does
the same in another order, and the table shows medians over the rounds. All servers stream the same
chats, greedily, with the same limit of tokens. aiperf counts the tokens with the model's tokenizer,
because one event may hold several; the time to the first token is that of the first event with
text. ``transformers`` needs an environment of its own with ``transformers[serving]``. Set
OMP_NUM_THREADS=1 where the load shares the server's cores: more threads wait for each other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from bench.servers import SERVE, running
from rich.console import Console
from rich.table import Table

from mars_platform.cluster.processes import free_port

_NAME = "mars"
_WARM_UP_REQUESTS = 8
_METRICS = {
    "ttft_ms": ("time_to_first_token", "p50"),
    "inter_token_ms": ("inter_token_latency", "p50"),
    "latency_ms": ("request_latency", "p50"),
    "tokens_per_s": ("output_token_throughput", "avg"),
    "output_tokens": ("output_sequence_length", "avg"),
    "num_requests": ("request_count", "avg"),
}
"""Each figure's name here, its name in aiperf, and the statistic over a run's requests."""
_MODES: dict[str, dict[str, Any]] = {
    "marsray ar": {"mode": "ar"},
    "marsray threshold .95": {"mode": "threshold", "confidence_threshold": 0.95},
    "marsray exact": {"mode": "exact"},
}


@dataclass(frozen=True)
class Contender:
    """A model as requests name it, with the fields that choose how it decodes."""

    name: str
    model: str
    """Model that requests name."""
    extra: dict[str, Any]
    """Fields that its requests have beside the common ones."""


@dataclass(frozen=True)
class Server:
    """A server's command line, and the contenders that it serves."""

    command: list[str]
    ready_url: str
    address: str
    contenders: list[Contender]


@dataclass(frozen=True)
class Load:
    """The load that aiperf sends in every run."""

    aiperf: Path
    tokenizer: Path
    prompts: Path
    num_requests: int
    max_tokens: int

    def run(self, server: Server, contender: Contender, concurrency: int) -> dict[str, float]:
        """Send the load once and return the run's figures by name.

        Raises:
            RuntimeError: aiperf or one of its requests failed.
        """
        extra = {"temperature": 0, "max_tokens": self.max_tokens, **contender.extra}
        with tempfile.TemporaryDirectory() as folder:
            command = [str(self.aiperf), "profile", "--model", contender.model]
            command += ["--url", server.address, "--endpoint-type", "chat", "--streaming"]
            command += ["--input-file", str(self.prompts), "--custom-dataset-type", "single_turn"]
            command += ["--tokenizer", str(self.tokenizer), "--extra-inputs", json.dumps(extra)]
            command += ["--concurrency", str(concurrency), "--ui", "none"]
            command += ["--request-count", str(self.num_requests)]
            command += ["--warmup-request-count", str(max(_WARM_UP_REQUESTS, concurrency))]
            command += ["--output-artifact-dir", folder, "--no-gpu-telemetry"]
            command += ["--no-server-metrics"]
            result = subprocess.run(  # noqa: S603 - the caller's own program, no shell
                command, capture_output=True, text=True, env={**os.environ, "DO_NOT_TRACK": "1"}
            )
            if result.returncode:
                raise RuntimeError(f"aiperf failed: {(result.stdout + result.stderr)[-2000:]}")
            found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        if found.get("error_request_count", {"avg": 0})["avg"]:
            raise RuntimeError(f"{contender.name}: requests failed: {found['error_summary']}")
        return {name: found[theirs][statistic] for name, (theirs, statistic) in _METRICS.items()}


def _servers(model: Path, transformers: Path | None, port: int | None) -> list[Server]:
    port = port or free_port()
    address = f"http://127.0.0.1:{port}"
    servers = []
    for suffix, options in (("", []), (", compiled", ["--set", "models.0.engine.compile=true"])):
        contenders = [Contender(name + suffix, _NAME, extra) for name, extra in _MODES.items()]
        command = [*SERVE, "--port", str(port), "--model", f"{_NAME}={model}", *options]
        servers.append(Server(command, f"{address}/ready", address, contenders))
    if transformers is None:
        return servers
    for name, options in (
        ("transformers serve", []),
        ("transformers serve, continuous batching", ["--continuous-batching"]),
    ):
        command = [str(transformers), "serve", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--device", "cpu", "--dtype", "float32", *options, str(model)]
        contender = Contender(name, str(model), {})
        servers.append(Server(command, f"{address}/health", address, [contender]))
    return servers


@contextmanager
def _prompts(data: Path, count: int) -> Iterator[Path]:
    """Write the first questions of a file as aiperf reads them; yields the new file."""
    lines = data.read_text(encoding="utf-8").splitlines()[:count]
    texts = [json.loads(line)["messages"][0]["content"] for line in lines]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts))
        file.flush()
        yield Path(file.name)


def _measure(
    servers: list[Server], load: Load, rounds: int, concurrencies: list[int], log: Path
) -> list[dict[str, Any]]:
    console, runs = Console(stderr=True), []
    for number in range(rounds):
        start = number % len(servers)
        for server in servers[start:] + servers[:start]:
            with running(server.command, server.ready_url, log):
                for concurrency in concurrencies:
                    for contender in server.contenders:
                        figures = load.run(server, contender, concurrency)
                        run = {"round": number, "concurrency": concurrency, **figures}
                        runs.append({"contender": contender.name, **run})
                        console.print(f"round {number + 1}/{rounds}: {runs[-1]}")
    return runs


def _medians(runs: list[dict[str, Any]]) -> dict[tuple[int, str], dict[str, float]]:
    groups = defaultdict(list)
    for run in runs:
        groups[run["concurrency"], run["contender"]].append(run)
    return {
        key: {name: statistics.median(run[name] for run in group) for name in _METRICS}
        for key, group in sorted(groups.items(), key=lambda item: item[0][0])
    }


def _table(medians: dict[tuple[int, str], dict[str, float]], title: str) -> Table:
    columns = ("concurrency", "server", "first token, ms", "between tokens, ms", "request, ms")
    table = Table(*columns, "tokens/s", "tokens a request", title=title)
    previous = None
    for (concurrency, name), row in medians.items():
        if previous not in (None, concurrency):
            table.add_section()
        previous = concurrency
        table.add_row(
            str(concurrency),
            name,
            f"{row['ttft_ms']:.1f}",
            f"{row['inter_token_ms']:.2f}",
            f"{row['latency_ms']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['output_tokens']:.1f}",
        )
    return table


def main(
    model: Annotated[Path, typer.Argument(help="Checkpoint directory.")],
    data: Annotated[Path, typer.Option(help="Conversations, JSONL; their first turns are sent.")],
    aiperf: Annotated[Path, typer.Option(help="Program.")] = Path(".venv-clients/bin/aiperf"),
    transformers: Annotated[
        Path | None, typer.Option(help="Program; without it, only marsray is measured.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each server.")] = 5,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Concurrent requests; may be repeated; 1, 4 and 16.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests in each run.")] = 96,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 64,
    port: Annotated[int | None, typer.Option(help="Port of the servers; a free one.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for every run.")] = None,
    log: Annotated[Path, typer.Option(help="File for the servers' output.")] = Path("serving.log"),
) -> None:
    """Print latency and throughput of each server at each concurrency."""
    levels = concurrency or [1, 4, 16]
    servers = _servers(model.resolve(), transformers, port)
    with _prompts(data, requests) as prompts:
        load = Load(aiperf, model.resolve(), prompts, requests, max_tokens)
        runs = _measure(servers, load, rounds, levels, log)
    medians = _medians(runs)
    if out is not None:
        rows = [
            {"concurrency": level, "contender": name, **row}
            for (level, name), row in medians.items()
        ]
        told = {key: str(value) for key, value in asdict(load).items()}
        content = {"load": told, "rounds": rounds, "medians": rows, "runs": runs}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    title = f"{requests} streamed chats a run, at most {max_tokens} tokens, medians of {rounds}"
    Console().print(_table(medians, title))


if __name__ == "__main__":
    typer.run(main)
