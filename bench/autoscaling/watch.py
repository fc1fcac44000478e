"""Watches an autoscaled server once a second, from a process of its own.

Replicas are counted by Ray Serve's own states, so starting ones count whatever policy ordered them.
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
from ray import serve

from mars_platform.cluster.ray_private import clusters_on_loopback

_PERIOD_S = 1.0
_DECISIONS_EVERY = 60
"""Number of looks between two reads of the decisions; the server keeps the latest hundred."""
_STOP_S = 60.0
_BEGUN = "begun"


@dataclass(frozen=True)
class Seen:
    """Numbers of replicas at one moment."""

    time_s: float
    """Unix time."""
    num_ready: int
    num_starting: int
    num_stopping: int
    """Replicas that finish their last requests."""

    @property
    def num_billed(self) -> int:
        return self.num_ready + self.num_starting + self.num_stopping


@dataclass(frozen=True)
class Watched:
    """Everything that was seen of a server."""

    seen: list[Seen]
    decisions: list[dict[str, Any]]
    """Records of ``/admin/autoscaler``, oldest first; empty unless the policy is the joint one."""


def ray_address(server: int) -> str:
    """Return the address of the Ray cluster that a server has started.

    Args:
        server: Process id of the server.

    Raises:
        RuntimeError: The server has not started a cluster.
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
        server: Process id of the server.
        environment: Variables with which the server was started; they open its Ray cluster.
        url: URL of the server.
        model: Name of the served model.
        file: File for `read_watched`.

    Raises:
        RuntimeError: The watch could not begin, or broke off.
    """
    command = [sys.executable, __file__, ray_address(server), url, model, str(file)]
    process = subprocess.Popen(  # noqa: S603 - this file, no shell
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None, "stdout is a pipe"
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
    """Read the file of a finished watch."""
    content = json.loads(file.read_text(encoding="utf-8"))
    seen = [Seen(**each) for each in content["seen"]]
    return Watched(seen, content["decisions"])


def _watch(address: str, url: str, model: str, file: Path) -> None:
    stop = threading.Event()
    with (
        clusters_on_loopback()
    ):  # where the server's cluster listens; Ray would replace the address
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # replaces Ray's handler
    seen = [_look()]
    decisions = dict[float, dict[str, Any]]()
    print(_BEGUN, flush=True)
    number, due = 0, time.monotonic()
    with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
        while not stop.wait(max(0.0, due - time.monotonic())):
            seen.append(_look())
            with suppress(httpx.HTTPError):  # a server under load may answer too late
                if number % _DECISIONS_EVERY == 0:
                    decisions |= _decisions(client, model)
            number, due = number + 1, max(due + _PERIOD_S, time.monotonic())
        decisions |= _decisions(client, model)
    watched = Watched(seen, list(decisions.values()))
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


def _decisions(client: httpx.Client, model: str) -> dict[float, dict[str, Any]]:
    """Return the latest decisions by their time."""
    found = client.get("/admin/autoscaler").raise_for_status().json()["models"][model]
    return {each["time_s"]: each for each in (found or {"decisions": []})["decisions"]}


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]))
