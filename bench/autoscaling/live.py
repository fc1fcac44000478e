"""Replays a trace against ``marsray serve`` with an autoscaling policy, at another machine's pace.

The server and the watch run in processes of their own. The server has its own Ray cluster, which a
fresh token protects.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import yaml
from bench.autoscaling import paced_engine
from bench.autoscaling.watch import Seen, watching
from bench.servers import SERVE, own_ray_cluster, running

from mars_autoscale.model.frontier import Frontier, read_frontier, write_frontier
from mars_autoscale.model.step_times import linear_step_time
from mars_autoscale.traces.files import TraceRequest, write_trace
from mars_platform.cluster.processes import free_port
from mars_platform.config import build_settings
from mars_serve.bench.load.plan import read_questions
from mars_serve.bench.load.run import LoadTest, run_load
from mars_serve.bench.options import LoadOptions
from mars_serve.config.settings import ModelSettings

NAME = "mars"
OBJECTIVE_TTFT_S = 1.0
NUM_WARM_UP = 8
"""Requests before the trace."""
_GRID = (1.0, 1024.0)
"""Positions at which a paced step table is given; it is extrapolated as a line."""
_ANY_STORED = (0.0, 1e6)
_TARGET_SHARE = 0.8
"""Share of a replica's capacity that Ray Serve's policy gets as ``target_ongoing_requests``."""


@dataclass(frozen=True)
class Pace:
    """Step times of another machine: ``t0 * (1 + positions / K)``; see `linear_step_time`."""

    t0_s: float
    positions_to_double: float
    prefill_tokens_per_s: float


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
    max_num_seqs: int
    max_replicas: int
    cold_start_s: float
    max_tokens: int
    log: Path
    """File to which the servers' output is appended."""

    def model_content(self, contender: Contender) -> dict[str, Any]:
        """Return the model's entry in the settings of ``marsray serve``."""
        autoscaling: dict[str, Any] = {
            "policy": contender.policy,
            "min_replicas": 1,
            "max_replicas": self.max_replicas,
            "cold_start_s": self.cold_start_s,
            "objective_ttft_s": OBJECTIVE_TTFT_S,
            "target_ongoing_requests": _TARGET_SHARE * self.max_num_seqs,
        }
        return {
            "name": NAME,
            "path": str(self.model),
            "num_cpus": 0.1,
            "num_threads": 1,
            "mode": contender.mode,
            "confidence_threshold": contender.threshold,
            "engine": {"max_num_seqs": self.max_num_seqs, "num_pages": 512},
            "autoscaling": autoscaling,
        }

    def settings(self, contender: Contender) -> ModelSettings:
        """Return that entry as validated settings."""
        return build_settings(self.model_content(contender), ModelSettings, source="bench")


@dataclass(frozen=True)
class Run:
    """The result of replaying a trace."""

    load: LoadTest
    began_s: float
    """Unix time at which the load began, accurate to some tenths of a second."""
    seen: list[Seen]
    is_too_slow: bool
    """Whether this machine was too slow for the pace, so that the run does not count."""


def paced_copy(model: Path, into: Path, pace: Pace, *, exact: bool) -> Frontier:
    """Copy a checkpoint to ``into``, which must not exist, with the step times of ``pace``.

    The frontier's points of mode exact are kept only if ``exact``.

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


def run(bench: Bench, contender: Contender, trace: Sequence[TraceRequest], work: Path) -> Run:
    """Start a server, warm it up, replay the trace and end the server.

    The trace gives times and tiers of the requests; their prompts come from the data.

    Raises:
        UserError: The load test failed.
        RuntimeError: The watch failed.
        CommandFailed: The server did not start.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    content = {"models": [bench.model_content(contender)], "port": port}
    content["telemetry"] = {"log_requests": False}
    config, file = work / "serve.yaml", work / "trace.csv"
    config.write_text(yaml.safe_dump(content), encoding="utf-8")
    write_trace(file, trace)
    options = LoadOptions(
        trace=file,
        model=NAME,
        url=url,
        data=bench.data,
        max_tokens=bench.max_tokens,
        objective_ttft_s=OBJECTIVE_TTFT_S,
    )
    with tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as directory:
        environment = own_ray_cluster(directory)
        environment |= paced_engine.environment(bench.cold_start_s)
        with running([*SERVE, str(config)], f"{url}/ready", bench.log, environment) as server:
            _warm_up(url, bench)
            with watching(server.pid, environment, work / "watch.jsonl") as seen:
                load = run_load(options, lambda *_: None)
                began_s = time.time() - load.figures.duration_s
        is_too_slow = any(
            paced_engine.NOT_VALID in log.read_text(encoding="utf-8", errors="replace")
            for log in Path(directory).rglob("worker-*.err")
        )
    return Run(load, began_s, seen, is_too_slow)


def _warm_up(url: str, bench: Bench) -> None:
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        for question in read_questions(bench.data, NUM_WARM_UP):
            body = {"model": NAME, "messages": question.messages, "max_tokens": bench.max_tokens}
            client.post("/v1/chat/completions", json=body).raise_for_status()
