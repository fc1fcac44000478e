"""Starts the server on Ray, keeps it running until it is told to stop, and shuts it down."""

import importlib
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console

from mars_platform.checkpoint.metadata import read_metadata_of
from mars_platform.cli.report import say
from mars_platform.cluster.ray_private import local_cluster_has_failed
from mars_platform.cluster.scheduling import children_wait_for_cores
from mars_platform.cluster.session import ray_session, starts_cluster
from mars_platform.errors import UserError
from mars_serve.config.settings import ServeSettings
from mars_serve.deploy.proxies import proxy_environment
from mars_serve.deploy.stages import Stages
from mars_serve.replica.engine_process import load_engine_ahead
from mars_serve.replica.engine_template import PLACE_VARIABLE

_SERVE_PART = "mars_serve.deploy.start"
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
        say(console, "shutting down")


@contextmanager
def serving(settings: ServeSettings, console: Console) -> Iterator[None]:
    """Serve within the block."""
    stages = Stages()
    settings = settings.pinned()
    _look_over_models(settings, console)
    _refuse_taken_port(settings.host, settings.port)
    min_cpus = sum(int(model.num_cpus * model.most_replicas) + 1 for model in settings.models)
    # Reading Ray Serve's modules takes as long as Ray's processes take to start.
    threading.Thread(target=importlib.import_module, args=[_SERVE_PART], daemon=True).start()
    place = secrets.token_hex()
    if starts_cluster(settings.cluster):
        for model in settings.models:
            if not model.num_gpus:
                order = (model, settings.share_of_cores, place)
                threading.Thread(target=load_engine_ahead, args=order, daemon=True).start()
    stages.end("command")
    with (
        proxy_environment(settings) as environment,
        children_wait_for_cores(),
        ray_session(
            settings.cluster,
            min_cpus=min_cpus,
            environment={**environment, PLACE_VARIABLE: place},
        ),
    ):
        from mars_serve.deploy.start import deploy, end

        stages.end("Ray")
        try:
            deploy(settings, console, stages)
            yield
        finally:
            if not local_cluster_has_failed():  # it would not answer
                end()


def _look_over_models(settings: ServeSettings, console: Console) -> None:
    """Refuse what the files' names and ``mars.json`` show; replicas read the rest.

    Adapters are looked over as a whole, since they are small and easily paired with another model.
    """
    for model in settings.models:
        path, metadata = read_metadata_of(model.path)
        if model.adapter is not None:
            from mars_platform.checkpoint.adapted import check_fit, read_model

            check_fit(read_model(path, model.adapter))  # importing it takes seconds
        elif metadata is None:
            say(
                console,
                f"model {model.name}: {path} has no mars.json, so it is served as plain AR; "
                "threshold mode is refused",
            )
        if model.loras:
            from mars_platform.checkpoint.adapted import read_model
            from mars_serve.engine.lora_cache import read_weights

            checkpoint = read_model(path, model.adapter)
            for lora in model.loras:
                read_weights(lora.name, lora.path, checkpoint, model.engine)


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
