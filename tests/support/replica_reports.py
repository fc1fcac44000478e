"""Reports of replicas as tests make them."""

from __future__ import annotations

from typing import Any

from mars_autoscale.policy.inner_loop import InnerLoopDecision
from mars_autoscale.policy.reports import EngineStatus, ReplicaReport, RequestCounts
from mars_platform.method.mode import LiveDecoding


def report_of(
    replica: str,
    num_running: int = 4,
    num_waiting: int = 0,
    live: LiveDecoding | None = None,
    counts: RequestCounts | None = None,
    **decoding: Any,
) -> ReplicaReport:
    """Return the report of a replica with so many requests, and with such a decision."""
    return ReplicaReport(
        replica,
        engine=EngineStatus(num_running + num_waiting, num_running, num_waiting),
        requests=counts or RequestCounts(),
        decoding=InnerLoopDecision(live or LiveDecoding(1.0), **decoding),
    )
