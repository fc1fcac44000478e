"""Starts the server on Ray, keeps it running until it is told to stop, and shuts it down."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ray import serve
from ray.exceptions import RayError
from rich.console import Console

from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.cluster.attempts import attempt
from mars_platform.cluster.ray_private import local_cluster_has_failed
from mars_platform.cluster.session import ray_session
from mars_platform.errors import UserError, one_line
from mars_serve.config.settings import ServeSettings
from mars_serve.control.governor_actor import end_governor
from mars_serve.deploy.app import build_application
from mars_serve.deploy.proxies import proxy_environment

_APPLICATION = "marsray"
_PROXY_S = 60.0
"""Longest wait in seconds for a proxy of Ray Serve, in each of several attempts."""
_POLL_S = 0.2
_WATCH_S = 1.0
"""Seconds between two looks at the processes of a cluster that was started here."""


def run_server(settings: ServeSettings, console: Console) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        UserError: a model cannot be read, the port is taken, the models do not start, or the
            cluster that was started for them fails.
    """
    stop = threading.Event()
    with _ending_on_signal(stop), serving(settings, console):
        while not stop.wait(_WATCH_S):
            if local_cluster_has_failed():
                raise UserError(
                    "cluster: Ray's own processes have ended; /tmp/ray/session_latest/logs may say "
                    "why; start the server again"
                )
        console.print("shutting down", highlight=False)


@contextmanager
def serving(settings: ServeSettings, console: Console) -> Iterator[None]:
    """Serve within the block."""
    for model in settings.models:
        checkpoint = read_checkpoint(model.path)
        if checkpoint.metadata is None:
            console.print(
                f"model {model.name}: {model.path} has no mars.json, so it is served as plain AR; "
                "threshold mode is refused",
                highlight=False,
            )
    _refuse_taken_port(settings.host, settings.port)
    min_cpus = sum(int(model.num_cpus * model.most_replicas) + 1 for model in settings.models)
    with (
        proxy_environment(settings) as environment,
        ray_session(settings.cluster, min_cpus=min_cpus, environment=environment),
    ):
        try:
            _deploy(settings, console)
            yield
        finally:
            if not local_cluster_has_failed():  # it would not answer
                serve.delete(_APPLICATION)  # other applications on a shared cluster keep running
                end_governor(_APPLICATION)


def _deploy(settings: ServeSettings, console: Console) -> None:
    _start_proxies(settings, console)
    with console.status("starting the models"):
        try:
            serve.run(build_application(settings), name=_APPLICATION, route_prefix="/")
        except TimeoutError:  # the models run, and the proxies do not know of them yet
            _start_proxies(settings, console)
        except (RuntimeError, RayError) as error:
            raise UserError(f"models: they did not start ({one_line(error)})") from error
    names = ", ".join(model.name for model in settings.models)
    console.print(f"serving {names} on http://{settings.host}:{settings.port}", highlight=False)


def _start_proxies(settings: ServeSettings, console: Console) -> None:
    """Start Ray Serve where it does not run, and wait until a proxy takes requests.

    Serve ends a proxy that is not ready in time and starts another; the first call then fails.

    Raises:
        UserError: no proxy becomes ready.
    """

    def start() -> None:
        serve.start(
            http_options={"host": settings.host, "port": settings.port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
        _await_proxy()  # where Serve runs already, the call above does not wait

    attempt(
        start,
        name="Ray Serve's proxy",
        remedy="end other programs on this machine, or look into the logs of Ray Serve",
        tell=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
        errors=(RayError, TimeoutError),
    )


def _await_proxy() -> None:
    end_s = time.monotonic() + _PROXY_S
    while (proxies := serve.status().proxies) and "HEALTHY" not in proxies.values():
        if time.monotonic() > end_s:
            raise TimeoutError(f"it was not ready within {_PROXY_S:g} s")
        time.sleep(_POLL_S)


def _refuse_taken_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"port: cannot listen on {host}:{port} ({error.strerror}); "
                "end what uses it or choose another with --port"
            ) from error


@contextmanager
def _ending_on_signal(stop: threading.Event) -> Iterator[None]:
    def end(_signal: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt  # a second signal ends at once
        stop.set()

    handled = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, end) for number in handled]
    try:
        yield
    finally:
        for number, handler in zip(handled, previous, strict=True):
            signal.signal(number, handler)
