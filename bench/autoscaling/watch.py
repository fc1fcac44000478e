"""Watches a server that autoscales, once a second and from a process of its own.

Replicas are counted by Ray Serve's own states, so that one that starts counts whatever policy asked
for it. Knows nothing of what the server is asked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

_PERIOD_S = 1.0
_METRICS_EVERY = 5
"""Looks at the states for one at the metrics, which cost the server far more."""
_DECISIONS_EVERY = 60
"""The server keeps the latest hundred decisions, one each two seconds."""
_STOP_S = 60.0
_BEGUN = "begun"
_COMPUTE_SHARE = "marsray_rehearsal_compute_ratio"


@dataclass(frozen=True)
class Seen:
    """One look."""

    time_s: float
    """Since 1970."""
    num_ready: int
    num_starting: int
    num_stopping: int
    """Replicas that end what they have running."""

    @property
    def num_billed(self) -> int:
        return self.num_ready + self.num_starting + self.num_stopping


@dataclass(frozen=True)
class Watched:
    """All looks at a server."""

    seen: list[Seen]
    compute_shares: list[tuple[float, float]]
    """(time since 1970, real over paced seconds of the replica's latest minute, the highest)."""
    decisions: list[dict[str, Any]]
    """Of ``/admin/autoscaler``, the oldest first; empty where the policy is not the joint one."""


def ray_address(server: int) -> str:
    """Of the Ray cluster that a server has started.

    Args:
        server: its process.

    Raises:
        RuntimeError: it has none.
    """
    option = "--gcs-address="
    for process in psutil.Process(server).children(recursive=True):
        arguments: list[str] = process.cmdline()
        for argument in arguments:
            if argument.startswith(option):
                return argument.removeprefix(option)
    raise RuntimeError(f"process {server} has not started Ray; it must not use another's cluster")


@contextmanager
def watching(
    server: int, environment: Mapping[str, str], url: str, model: str, file: Path
) -> Iterator[None]:
    """Watch a server for the length of the block, then write the file.

    Args:
        server: its process.
        environment: with which it was started: its Ray cluster lets nobody else in.
        url: its address.
        model: the served model's name.
        file: for `read_watched`.

    Raises:
        RuntimeError: the watch cannot begin, or broke off.
    """
    command = [sys.executable, __file__, ray_address(server), url, model, str(file)]
    process = subprocess.Popen(  # noqa: S603 - this file, no shell
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None, "a pipe was asked for"
    try:
        if process.stdout.readline().strip() != _BEGUN:
            raise RuntimeError(f"{url} cannot be watched; what its process printed says why")
        yield
    finally:
        process.terminate()
        process.wait(_STOP_S)
    if process.returncode != 0:
        raise RuntimeError(f"the watch of {url} broke off; what its process printed says why")


def read_watched(file: Path) -> Watched:
    """What a watch has written."""
    content = json.loads(file.read_text(encoding="utf-8"))
    seen = [Seen(**each) for each in content["seen"]]
    shares = [(time_s, share) for time_s, share in content["compute_shares"]]
    return Watched(seen, shares, content["decisions"])


def _watch(address: str, url: str, model: str, file: Path) -> None:
    stop = threading.Event()
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # in place of Ray's
    seen, shares = [_look()], list[tuple[float, float]]()
    decisions = dict[float, dict[str, Any]]()
    print(_BEGUN, flush=True)
    number, due = 0, time.monotonic()
    with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
        while not stop.wait(max(0.0, due - time.monotonic())):
            seen.append(_look())
            with suppress(httpx.HTTPError):  # a server under load may be late with it
                if number % _METRICS_EVERY == 0:
                    shares += _compute_share(client)
                if number % _DECISIONS_EVERY == 0:
                    decisions |= _decisions(client, model)
            number, due = number + 1, max(due + _PERIOD_S, time.monotonic())
        decisions |= _decisions(client, model)
    watched = Watched(seen, shares, list(decisions.values()))
    file.write_text(json.dumps(asdict(watched)), encoding="utf-8")
    ray.shutdown()


def _look() -> Seen:
    states = [
        (state, count)
        for application in serve.status().applications.values()
        for name, deployment in application.deployments.items()
        if name.startswith("model-")
        for state, count in deployment.replica_states.items()
    ]
    ready = sum(count for state, count in states if state == "RUNNING")
    stopping = sum(count for state, count in states if state == "STOPPING")
    return Seen(time.time(), ready, sum(count for _, count in states) - ready - stopping, stopping)


def _compute_share(client: httpx.Client) -> list[tuple[float, float]]:
    """Of the replica that computes most; nothing before the first step."""
    text = client.get("/metrics").raise_for_status().text
    shares = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == _COMPUTE_SHARE
    ]
    return [(time.time(), max(shares))] if shares else []


def _decisions(client: httpx.Client, model: str) -> dict[float, dict[str, Any]]:
    """By time."""
    found = client.get("/admin/autoscaler").raise_for_status().json()["models"][model]
    return {each["time_s"]: each for each in (found or {"decisions": []})["decisions"]}


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
