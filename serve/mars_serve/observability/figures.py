"""The figures that replicas and ingress replicas report to the governor for the dashboard.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mars_autoscale.policy.inner_loop import Cause
from mars_platform.method.live import LiveDecoding
from mars_platform.tier import Tier


class ReplicaState(StrEnum):
    """A replica's own figures, which it reports once a second."""

    STARTING = "starting"
    """It loads the model and warms up."""
    READY = "ready"
    DRAINING = "draining"
    """It ends once its requests have."""
    OVERDUE = "overdue"
    """Its engine shows no sign of life."""


@dataclass(frozen=True)
class ReplicaCounts:
    """Counts of a replica since its start; see `EngineStatus` for the first ones."""

    arrived: int = 0
    """Requests that have arrived, those that wait before the engine included."""
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    row_passes: int = 0
    preemptions: int = 0
    first_token: tuple[int, ...] = ()
    """See `RequestTelemetry.first_token_counts`."""
    token_gap: tuple[int, ...] = ()
    """See `RequestTelemetry.token_gap_counts`."""


@dataclass(frozen=True)
class ReplicaFigures:
    """A replica's state, load and counts, which it reports once a second."""

    replica: str
    """Name of the replica, unique among all that ever ran."""
    node: str
    """Address of the replica's node."""
    state: ReplicaState
    num_running: int = 0
    num_waiting: int = 0
    """Requests that wait in the engine, and the replica's share of those that wait before it."""
    live: LiveDecoding = field(default_factory=lambda: LiveDecoding(1.0))
    cause: Cause = Cause.START
    """Why τ last changed, if the replica chooses it."""
    gain: float = 1.0
    """Speed as a multiple of the base's."""
    loss: float = 0.0
    """Points of quality that a token of tier default loses, beyond those at the target τ."""
    num_pages: int = 0
    num_free_pages: int = 0
    counts: ReplicaCounts = ReplicaCounts()


@dataclass(frozen=True)
class IngressFigures:
    """An ingress replica's figures of a model's requests, which it reports once a second."""

    ingress: str
    """Name of the ingress replica, unique among all that ever ran."""
    waiting: Mapping[Tier, int] = field(default_factory=dict)
    """Requests that no engine has begun, by tier."""
    ended: Mapping[str, int] = field(default_factory=dict)
    """Requests that have ended since its start, by outcome; see the metric
    ``marsray_requests_total``."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """Those that were refused, by HTTP status and error code such as "503 queue_full"."""
    moves: int = 0
    """Times that an output was sent to another replica."""
