"""A head of a Ray cluster of its own, which asks for a token, and the shell to reach it from."""

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
from waiting import wait_until

BIN = Path(sys.executable).parent
SHELL = {
    "PATH": f"{BIN}:/usr/bin:/bin",
    "COLUMNS": "200",
    **{name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ},
}
"""Environment of a command that knows of no token."""
_START_TIMEOUT_S = 60


def new_token() -> dict[str, str]:
    """The variables that give a process a token of Ray's, drawn for this call."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex()}


@contextmanager
def ray_head(
    environment: Mapping[str, str], *, num_cpus: int, agent_port: int | None = None
) -> Iterator[str]:
    """A head on free ports, for the length of a block.

    Args:
        environment: of its processes, with what `new_token` made.
        num_cpus: CPUs that it claims to have.
        agent_port: the port of its node's agent, which answers probes; a free one by default.

    Yields:
        The URL of its dashboard.
    """
    port, files = free_port(), tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets' paths
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
    with Path(files, "printed").open("wb") as printed:
        head = subprocess.Popen(command, env=dict(environment), stdout=printed, stderr=printed)
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
    """End the head and every process that it has started, and no other."""
    started = psutil.Process(head.pid).children(recursive=True)
    head.kill()
    head.wait()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=10)
