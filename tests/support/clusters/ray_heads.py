"""Starts a Ray cluster's head that asks for a token, as `ray start` does it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from mars_platform.cluster.processes import free_port
from mars_platform.cluster.ray_private import busy_node_variables
from waiting import wait_until

BIN = Path(sys.executable).parent
SHELL = {
    "PATH": f"{BIN}:/usr/bin:/bin",
    "COLUMNS": "200",
    **{name: os.environ[name] for name in ("HOME", "TMPDIR", "PYTHONPATH") if name in os.environ},
}
"""Environment of a user's command that has no token."""
_START_TIMEOUT_S = 300


def new_token() -> dict[str, str]:
    """Return the variables that give a process a new token of Ray's."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}


@contextmanager
def ray_head(
    environment: Mapping[str, str], *, num_cpus: int, agent_port: int | None = None
) -> Iterator[str]:
    """Run a head on free ports for the length of the block.

    Args:
        environment: Variables of the head's processes, with those of `new_token`.
        num_cpus: Number of CPUs that Ray counts.
        agent_port: Port of the node's agent, which answers probes; a free one by default.

    Yields:
        The URL of the dashboard.
    """
    port, files = free_port(), tempfile.mkdtemp(prefix="ray-")  # a short path: it holds sockets
    options = {
        "port": free_port(),
        "dashboard-host": "127.0.0.1",
        "dashboard-port": port,
        "dashboard-agent-listen-port": agent_port or free_port(),
        "ray-client-server-port": free_port(),
        "node-ip-address": "127.0.0.1",
        "num-cpus": num_cpus,
        "object-store-memory": 100_000_000,
        "temp-dir": files,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [BIN / "ray", "start", "--head", "--block", "--disable-usage-stats", *arguments]
    variables = {**busy_node_variables(), **environment}
    with Path(files, "printed").open("wb") as printed:
        head = subprocess.Popen(command, env=variables, stdout=printed, stderr=printed)
    address, token = f"http://127.0.0.1:{port}", environment["RAY_AUTH_TOKEN"]
    try:
        printed_so_far = Path(files, "printed").read_text
        wait_until(lambda: _is_up(address, token), _START_TIMEOUT_S, printed_so_far)
        yield address
    finally:
        _end(head)
        shutil.rmtree(files, ignore_errors=True)


def _is_up(address: str, token: str) -> bool:
    with suppress(httpx.TransportError):
        authorization = {"Authorization": f"Bearer {token}"}
        response = httpx.get(f"{address}/api/jobs/", headers=authorization)
        return response.status_code == httpx.codes.OK
    return False


def _end(head: subprocess.Popen[bytes]) -> None:
    """End the head and every process that it has started."""
    started = psutil.Process(head.pid).children(recursive=True)
    head.kill()
    head.wait()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=10)
