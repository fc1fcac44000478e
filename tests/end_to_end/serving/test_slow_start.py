"""A server starts on a slow machine, or says why not; it ends once its cluster has failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from mars_platform.cluster.processes import free_port, wait_until_ready

_LIMIT_S = 900

pytestmark = pytest.mark.full


@contextmanager
def _starting(model: Path, log: Path, **variables: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run ``marsray serve`` with some variables, and yield the process and its address."""
    port = str(free_port())
    command = [sys.executable, "-m", "mars_platform", "serve", "--port", port]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--model", f"m={model}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(_LIMIT_S)


def test_a_proxy_that_ray_serve_ends_is_waited_for_again(trained, tmp_path):
    log = tmp_path / "log"
    # no proxy is ready so soon; Serve waits longer for each one that it starts after another
    impatient = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "0.3"}
    with _starting(trained.model, log, **impatient) as (process, address):
        wait_until_ready(process, f"{address}/ready", name="marsray serve", timeout_s=_LIMIT_S)
    assert process.returncode == 0
    text = log.read_text()
    assert text.count("Ray Serve's proxy did not start (") in (1, 2)
    assert "; attempt 2 of 3 begins\n" in text
    assert "Traceback" not in text


def test_a_cluster_that_never_starts_ends_in_one_clear_error(trained, tmp_path):
    log = tmp_path / "log"
    with _starting(trained.model, log, RAY_gcs_server_port_wait_time_s="0") as (process, _):
        assert process.wait(_LIMIT_S) == 2
    lines = log.read_text().splitlines()
    assert [line.rpartition("; ")[2] for line in lines[:2]] == [
        "attempt 2 of 3 begins",
        "attempt 3 of 3 begins",
    ]
    assert lines[2].startswith("error: a local Ray cluster did not start in 3 attempts (")
    assert "end other programs on this machine" in " ".join(lines[2:])
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_the_command_ends_with_an_error_once_its_cluster_has_failed(trained, tmp_path, part):
    log = tmp_path / "log"
    with _starting(trained.model, log) as (process, address):
        wait_until_ready(process, f"{address}/ready", name="marsray serve", timeout_s=_LIMIT_S)
        (central,) = [
            each for each in psutil.Process(process.pid).children() if each.name() == part
        ]
        central.kill()
        assert process.wait(_LIMIT_S) == 2
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{address}/health")
    assert log.read_text().count("error: cluster: Ray's own processes have ended;") == 1
