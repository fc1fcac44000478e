"""Counts the replicas of a server once a second, from a process of its own.

They are counted by Ray Serve's own states, so starting ones count whatever policy ordered them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
import ray
from ray import serve

from mars_platform.cluster.ray_private import clusters_on_loopback

_PERIOD_S = 1.0


class Seen(NamedTuple):
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


def replica_s(seen: list[Seen], numbers: list[int], begin_s: float, end_s: float) -> float:
    """Integrate a number of replicas over a time; each value lasts until the next look."""
    return sum(
        number * max(0.0, min(after.time_s, end_s) - max(before.time_s, begin_s))
        for (before, after), number in zip(pairwise(seen), numbers, strict=False)
    )


@contextmanager
def watching(server: int, environment: Mapping[str, str], file: Path) -> Iterator[list[Seen]]:
    """Watch a server for the length of the block, behind which the list is filled.

    ``environment`` has the variables that the server was started with, which open its Ray cluster.

    Raises:
        RuntimeError: The server has started no cluster of its own, or the watch broke off.
    """
    seen = list[Seen]()
    with file.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(  # noqa: S603 - this file, no shell
            [sys.executable, __file__, _ray_address(server)],
            env={**os.environ, **environment},
            stdout=output,
        )
        try:
            yield seen
            if process.poll() is not None:
                raise RuntimeError("the watch broke off; what its process printed says why")
        finally:
            process.terminate()
            process.wait(60.0)
    seen += [Seen(*json.loads(line)) for line in file.read_text("utf-8").splitlines()]


def _ray_address(server: int) -> str:
    """Return the address of the Ray cluster that a server has started."""
    option = "--gcs-address="
    for process in psutil.Process(server).children(recursive=True):
        for argument in process.cmdline():
            if argument.startswith(option):
                return str(argument.removeprefix(option))
    raise RuntimeError(f"process {server} has not started Ray; it must not use another's cluster")


def _watch(address: str) -> None:
    with clusters_on_loopback():  # where the server's is; Ray would replace the address
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # Ray's handler prints its stack
    while True:
        print(json.dumps(_look()), flush=True)
        time.sleep(_PERIOD_S)


def _look() -> Seen:
    counts = {"RUNNING": 0, "STOPPING": 0}
    for application in serve.status().applications.values():
        for name, deployment in application.deployments.items():
            for state, count in deployment.replica_states.items() if "model-" in name else ():
                counts[state] = counts.get(state, 0) + count
    ready, stopping = counts["RUNNING"], counts["STOPPING"]
    return Seen(time.time(), ready, sum(counts.values()) - ready - stopping, stopping)


if __name__ == "__main__":
    _watch(sys.argv[1])
