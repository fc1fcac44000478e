"""Counts of audited outputs as metric families. Imports no Ray, torch or HTTP library."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from mars_autoscale.audit.counts import AuditTally, of_all_groups
from mars_serve.observability.metric_families import MetricDefinition

AUDIT_COUNTERS = {
    "num_outputs": MetricDefinition(
        "marsray_audited_outputs_total",
        "Outputs with tokens served at this threshold that were decoded again in mode exact.",
    ),
    "num_tokens": MetricDefinition(
        "marsray_audited_tokens_total",
        "Tokens of those that were compared: all up to an output's first difference.",
    ),
    "num_diverged": MetricDefinition(
        "marsray_audited_diverged_total",
        "Outputs whose first token that mode exact chooses otherwise was served at this threshold.",
    ),
}
"""Counters by the field of `AuditCounts` that holds the count."""


def audit_families(tally: AuditTally, labels: tuple[str, str]) -> Iterator[Metric]:
    """Yield the counts as counters by tier, τ and kind of sampling; nothing before any audit."""
    if not tally:
        return
    for field, definition in AUDIT_COUNTERS.items():
        samples = [
            (
                (
                    *labels,
                    key.tier.value,
                    f"{key.threshold:g}",
                    "plain" if key.is_plain else "other",
                ),
                getattr(counts, field),
            )
            for key, counts in of_all_groups(tally).items()
        ]
        yield definition.counter(samples, "tier", "confidence_threshold", "sampling")
