"""Connects to an existing Ray cluster, or starts a local one and shuts it down again."""

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray

from mars_platform.cluster.processes import attempt
from mars_platform.cluster.ray_private import (
    busy_node_variables,
    clusters_on_loopback,
    clusters_without_helpers,
    signal_handler_kept,
)
from mars_platform.cluster.settings import ClusterSettings

_log = logging.getLogger(__name__)


@contextmanager
def ray_session(
    settings: ClusterSettings, *, min_cpus: int, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Connect to the cluster for the length of a ``with`` block.

    A process that is already connected keeps its connection, also after the block. Processes of a
    local cluster listen on loopback only, since no other machine has a part in it.

    Args:
        settings: the cluster to use.
        min_cpus: least number of logical CPUs of a local cluster, also on a smaller machine, whose
            cores the parts of a run then share.
        environment: variables for the processes of a local cluster; a variable that this process
            already has keeps its value.
    """
    if ray.is_initialized():
        yield
        return
    quieten_ray()
    with signal_handler_kept(signal.SIGTERM):
        _connect(settings, min_cpus, environment or {})
    try:
        yield
    finally:
        ray.shutdown()


def _connect(settings: ClusterSettings, min_cpus: int, environment: Mapping[str, str]) -> None:
    if address := _address(settings):
        ray.init(address=address, logging_level=logging.ERROR)
        return
    with (
        _added_to_environment({**busy_node_variables(), **environment}),
        clusters_on_loopback(),
        clusters_without_helpers(),
    ):
        attempt(
            lambda: _start_local(settings, min_cpus),
            name="a local Ray cluster",
            remedy="end other programs on this machine, or give cluster.address",
            tell=_log.warning,
        )


def starts_cluster(settings: ClusterSettings) -> bool:
    """Return whether `ray_session` would start a local cluster now."""
    return not (ray.is_initialized() or _address(settings))


def _address(settings: ClusterSettings) -> str | None:
    return settings.address or os.environ.get("RAY_ADDRESS")


def _start_local(settings: ClusterSettings, min_cpus: int) -> None:
    ray.init(
        address="local",  # also where another cluster runs on this machine
        num_cpus=max(min_cpus, os.cpu_count() or 1),
        object_store_memory=settings.object_store_mib * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


@contextmanager
def _added_to_environment(variables: Mapping[str, str]) -> Iterator[None]:
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def quieten_ray() -> None:
    """Keep Ray's libraries, which log every plan they run, from writing over marsray's progress.

    A library has no handlers before it is imported. Only its own ones for the console change: not
    the log files in Ray's session directory, nor handlers that the program has for all loggers.
    """
    for name in ("ray.data", "ray.serve"):
        for handler in logging.getLogger(name).handlers:
            is_own = handler not in logging.getLogger().handlers
            if is_own and isinstance(handler, logging.StreamHandler):
                handler.setLevel(logging.ERROR)
