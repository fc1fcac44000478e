"""Connecting to Ray: an existing cluster, or one started here and shut down again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray

from mars_platform.cluster.settings import ClusterSettings


@contextmanager
def ray_session(
    settings: ClusterSettings, *, min_cpus: int, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Connect to the cluster for the length of a ``with`` block.

    A local cluster gets at least ``min_cpus`` logical CPUs, whatever the machine has: on a small
    machine the parts of a run share its cores. It ends with the block, and its processes get the
    variables of ``environment`` that this process does not have itself. Where the process is
    connected already, that connection is used and left alone.
    """
    if ray.is_initialized():
        yield
        return
    _quieten_ray()
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, logging_level=logging.ERROR)
    else:
        with _added_to_environment(environment or {}):
            ray.init(
                address="local",  # also where another cluster runs on this machine
                num_cpus=max(min_cpus, os.cpu_count() or 1),
                object_store_memory=settings.object_store_mib * 2**20,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _added_to_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set what is not set; whatever is started within the block inherits it."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _quieten_ray() -> None:
    """Leave the terminal to marsray's own progress: Ray's libraries log every plan they run.

    Only their console handlers change; the log files under Ray's session directory stay whole.
    """
    for name in ("ray.data", "ray.serve"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setLevel(logging.ERROR)
