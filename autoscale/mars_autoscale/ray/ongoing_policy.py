"""Ray Serve's own rule for the number of replicas, over the requests that the replicas report.

Serve counts the requests that pass through its handles. Requests to engines do not, and those that
wait in an ingress would not be counted, either.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Ray Serve takes a second to import
    from ray.serve.config import AutoscalingContext

NUM_REQUESTS = "num_requests"
"""Name of the number that each replica reports: the requests that run on it, and its part of those
that wait."""

_log = logging.getLogger("ray.serve")


def ongoing_requests(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas at which each has its target of requests, and an empty state.

    Serve averages the reports over ``look_back_period_s``, and applies its delays and factors to
    what is returned, as with its default policy. A policy that raises would harm all applications.
    """
    target = float(context.target_num_replicas)
    try:
        reported = (context.aggregated_metrics or {}).get(NUM_REQUESTS, {})
        running = [reported[name] for name in context.running_replicas if name in reported]
        if not running:
            return target, {}
        # a replica that has just started has not reported, and is taken for as busy as the others
        total = sum(running) / len(running) * len(context.running_replicas)
        return total / context.config.get_target_ongoing_requests(), {}
    except Exception:
        _log.exception("autoscaling of %s holds its replicas", context.deployment_name)
        return target, {}
