"""Replays a trace against ``marsray serve`` with an autoscaling policy, at another machine's pace.

The server, the load and the watch each run in a process of their own. The server has its own Ray
cluster, which a fresh token protects.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import httpx
import yaml
from bench.autoscaling import paced_engine
from bench.autoscaling.watch import Watched, read_watched, watching
from bench.servers import SERVE, own_ray_cluster, running

from mars_autoscale.model.capacity import linear_step_time
from mars_autoscale.model.frontier import Frontier, read_frontier, write_frontier
from mars_autoscale.traces.files import TraceRequest, write_trace
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.cluster.processes import free_port
from mars_platform.config import build_settings
from mars_platform.data.conversations import Conversation, parse_conversation
from mars_platform.tier import Tier
from mars_serve.config.settings import ModelSettings

NAME = "mars"
OBJECTIVE_TTFT_S = 1.0
_GRID = (1.0, 1024.0)
"""Positions at which a paced step table is given; it is extrapolated as a line."""
_ANY_STORED = (0.0, 1e6)
WARM_UP_REQUESTS = 8
_NUM_SIZED = 200
"""Number of conversations from which the mean output length is estimated."""
_TARGET_SHARE = 0.8
"""Share of a replica's capacity that Ray Serve's policy gets as ``target_ongoing_requests``."""


@dataclass(frozen=True)
class Pace:
    """Step times of another machine: ``t0 * (1 + positions / K)``; see `linear_step_time`."""

    t0_s: float
    positions_to_double: float
    prefill_tokens_per_s: float


@dataclass(frozen=True)
class Cluster:
    """The replicas that every policy may use."""

    max_num_seqs: int
    max_replicas: int
    cold_start_s: float


@dataclass(frozen=True)
class Contender:
    """A policy, and the τ of its requests."""

    name: str
    policy: Literal["joint", "ongoing_requests"]
    threshold: float
    """τ at the beginning; the joint policy changes it."""
    mode: Literal["threshold", "exact"] = "threshold"
    """Mode of the requests; the joint policy uses mode exact for a τ of 1 where it is faster."""


@dataclass(frozen=True)
class Bench:
    """Everything that is the same in all runs."""

    model: Path
    """Checkpoint that `paced_copy` made."""
    data: Path
    cluster: Cluster
    max_tokens: int
    log: Path
    """File to which the servers' output is appended."""

    def model_content(self, contender: Contender) -> dict[str, Any]:
        """Return the model's entry in the settings of ``marsray serve``."""
        cluster = self.cluster
        autoscaling: dict[str, Any] = {
            "policy": contender.policy,
            "min_replicas": 1,
            "max_replicas": cluster.max_replicas,
            "cold_start_s": cluster.cold_start_s,
            "objective_ttft_s": OBJECTIVE_TTFT_S,
            "target_ongoing_requests": _TARGET_SHARE * cluster.max_num_seqs,
        }
        return {
            "name": NAME,
            "path": str(self.model),
            "num_cpus": 0.1,
            "num_threads": 1,
            "mode": contender.mode,
            "confidence_threshold": contender.threshold,
            "engine": {"max_num_seqs": cluster.max_num_seqs, "num_pages": 512},
            "autoscaling": autoscaling,
        }

    def settings(self, contender: Contender) -> ModelSettings:
        """Return that entry as validated settings."""
        return build_settings(self.model_content(contender), ModelSettings, source="bench")


@dataclass(frozen=True)
class Request:
    """One request as its client saw it; times are in seconds since the load began."""

    sent_s: float
    ttft_s: float
    """Seconds to the first token; infinite if the request was not served."""
    e2e_s: float
    """Seconds to the last token; infinite if the request was not served."""
    prompt_tokens: int
    completion_tokens: int
    tier: Tier
    correct: bool | None
    status: int | None


@dataclass(frozen=True)
class Run:
    """The result of replaying a trace."""

    contender: str
    round: int
    load: dict[str, Any]
    """JSON report of ``marsray bench load``."""
    requests: list[Request]
    """Requests in the order of sending."""
    began_s: float
    """Unix time at which the load began, accurate to some tenths of a second."""
    is_too_slow: bool
    """Whether this machine was too slow for the pace, so that the run does not count."""
    watched: Watched


def paced_copy(model: Path, into: Path, pace: Pace, *, exact: bool) -> Frontier:
    """Copy a checkpoint and replace the step times of its frontier.

    Args:
        model: Directory of the checkpoint, with ``frontier.json``.
        into: Directory of the copy, which must not exist.
        pace: The new step times.
        exact: Whether the points of mode exact are kept.

    Raises:
        UserError: The frontier is missing or is refused.
    """
    content = read_frontier(model).model_dump(exclude_none=True)
    line = linear_step_time(pace.t0_s, pace.positions_to_double)
    content["hardware"] = f"made up: {pace}"
    content["prefill_tokens_per_s"] = pace.prefill_tokens_per_s
    content["step_seconds"] = {
        "positions": _GRID,
        "stored": _ANY_STORED,
        "seconds": [[line.at(point)] * len(_ANY_STORED) for point in _GRID],
    }
    content["points"] = [each for each in content["points"] if exact or each["mode"] != "exact"]
    frontier = build_settings(content, Frontier, source=str(into))
    shutil.copytree(model, into)
    write_frontier(into, frontier)
    return frontier


def mean_output_tokens(model: Path, data: Path) -> float:
    """Return the mean length in tokens of the data's answers, which a model trained on them has."""
    tokenizer = read_checkpoint(str(model)).tokenizer
    answers = [talk.messages[-1].content for talk in _conversations(data, _NUM_SIZED)]
    return fmean(len(tokenizer.encode(each, add_special_tokens=False)) + 1 for each in answers)


def run(
    bench: Bench, contender: Contender, trace: Sequence[TraceRequest], number: int, work: Path
) -> Run:
    """Start a server, warm it up, replay the trace and end the server.

    Args:
        bench: Everything that is the same in all runs.
        contender: The policy.
        trace: Times and tiers of the requests; their prompts come from the data.
        number: Number of the round, from 0.
        work: Directory for files.

    Raises:
        RuntimeError: The load test or the watch failed.
        CommandFailed: The server did not start.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    content = {"models": [bench.model_content(contender)], "port": port}
    content["telemetry"] = {"log_requests": False}
    config, file, watch = work / "serve.yaml", work / "trace.csv", work / "watch.json"
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    write_trace(file, trace)
    with tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as directory:
        environment = own_ray_cluster(directory)
        environment |= paced_engine.environment(bench.cluster.cold_start_s)
        command = [*SERVE, str(config)]
        with running(command, f"{url}/ready", bench.log, environment) as server:
            _warm_up(url, bench)
            with watching(server.pid, environment, url, NAME, watch):
                load, requests, began_s = _load(bench, url, file, work)
        is_too_slow = any(
            paced_engine.NOT_VALID in log.read_text(encoding="utf-8", errors="replace")
            for log in Path(directory).rglob("worker-*.err")
        )
    return Run(contender.name, number, load, requests, began_s, is_too_slow, read_watched(watch))


def _conversations(data: Path, most: int) -> list[Conversation]:
    with data.open(encoding="utf-8") as file:
        return [parse_conversation(line) for line in islice(file, most)]


def _warm_up(url: str, bench: Bench) -> None:
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        for talk in _conversations(bench.data, WARM_UP_REQUESTS):
            messages = [message.model_dump() for message in talk.messages[:-1]]
            body = {"model": NAME, "messages": messages, "max_tokens": bench.max_tokens}
            client.post("/v1/chat/completions", json=body).raise_for_status()


def _load(
    bench: Bench, url: str, trace: Path, work: Path
) -> tuple[dict[str, Any], list[Request], float]:
    told, rows = work / "load.json", work / "load.csv"
    command = [sys.executable, "-m", "mars_platform", "bench", "load", "--trace", str(trace)]
    command += ["--model", NAME, "--url", url, "--data", str(bench.data)]
    command += ["--max-tokens", str(bench.max_tokens), "--json", str(told), "--csv", str(rows)]
    command += ["--objective-ttft-s", str(OBJECTIVE_TTFT_S)]
    result = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 - no shell
    if result.returncode:
        raise RuntimeError(f"marsray bench load failed: {(result.stdout + result.stderr)[-2000:]}")
    load: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
    with rows.open(encoding="utf-8", newline="") as file:
        requests = [_request(row) for row in csv.DictReader(file)]
    # The report is written as soon as the last request has ended.
    return load, requests, told.stat().st_mtime - load["duration_s"]


def _request(row: dict[str, str]) -> Request:
    """Read a row of the load's CSV; an empty cell means unknown, or that the event never came."""
    return Request(
        sent_s=float(row["sent_s"]),
        ttft_s=float(row["ttft_s"] or "inf"),
        e2e_s=float(row["e2e_s"] or "inf"),
        prompt_tokens=int(row["prompt_tokens"]),
        completion_tokens=int(row["completion_tokens"]),
        tier=Tier(row["class"]),
        correct=row["correct"] == "True" if row["correct"] else None,
        status=int(row["status"]) if row["status"] else None,
    )
