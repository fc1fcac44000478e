"""Shows a load test in the columns and JSON fields that ``marsray simulate`` has for a policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from rich.table import Table

from mars_autoscale.simulation.figures import PolicyFigures, TierFigures, policy_columns
from mars_platform.cli.report import table_of
from mars_serve.bench.load.run import LoadTest

_TIER_FIELDS = [each.name for each in fields(TierFigures)]
_SERVER_FIELDS = ("replica_hours", "threshold_changes", "replica_changes")


def compared_table(test: LoadTest) -> Table:
    """Return a table with a row for the server, below a row for each tier if there are several.

    A dash stands for a figure that a client cannot know.
    """
    figures = test.figures
    no_server_fields = dict.fromkeys(_SERVER_FIELDS, "")
    tiers = [
        {"policy": tier, **vars(each), **no_server_fields} for tier, each in figures.classes.items()
    ]
    server = {"policy": test.options.model, **vars(figures.all), **vars(figures)}
    return table_of(
        policy_columns(test.options.objective_ttft_s, hours=".3f"),
        tiers if len(tiers) > 1 else [],
        [server],
        missing="-",
        infinite="never",
    )


def compared_notes(test: LoadTest) -> Iterable[str]:
    """Yield what the figures of the table are of, and why some of them are not known."""
    figures = test.figures
    if figures.all.quality_loss_mean is not None:
        yield (
            "loss: points below τ = 1, by the server's own frontier at the mean τ of each answer; "
            "between two rungs on the line."
        )
    elif figures.all.num_served:
        reason = test.losses.refusal or "an answer tells no τ, or one below the server's ladder"
        yield f"The loss of quality is not known: {reason}."
    if figures.replica_hours is not None:
        yield (
            "replica-hours: of ready replicas, until the last request was sent; those that start "
            "are not seen. Changes are between samples a second apart, of τ for tier default."
        )


def compared_json(test: LoadTest) -> dict[str, Any]:
    """Return the figures as ``policies`` has them in the JSON of ``marsray simulate``."""
    figures = test.figures
    everything = vars(figures.all) | vars(figures)
    names = [each.name for each in fields(PolicyFigures) if each.name != "by_class"]
    return {
        "name": test.options.model,
        "variant": "",
        **{name: everything.get(name) for name in names},  # hits of the cache are not known
        "by_class": {
            tier: {name: getattr(each, name) for name in _TIER_FIELDS}
            for tier, each in figures.classes.items()
        },
    }
