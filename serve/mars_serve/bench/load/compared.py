"""A load test beside the policies of ``marsray simulate``: the same columns, and JSON fields."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from rich.table import Table

from mars_autoscale.simulation import figures as simulated
from mars_serve.bench.load.figures import ClassFigures
from mars_serve.bench.load.run import LoadTest

_OF_CLASS = [each.name for each in fields(simulated.ClassFigures)]
_OF_ALL = [each.name for each in fields(simulated.Figures) if each.name != "by_class"]


def compared_table(test: LoadTest) -> Table:
    """One row for the server; before it, where the trace has several classes, one for each."""
    figures = test.figures
    table = Table(*simulated.titles(test.options.objective_ttft_s))
    if len(figures.classes) > 1:
        for name, each in figures.classes.items():
            table.add_row(name, *_cells(each), "", "", "", str(each.rejected))
        table.add_section()
    table.add_row(
        test.options.model,
        *_cells(figures.all),
        _cell(figures.replica_hours, ".3f"),
        _cell(figures.threshold_changes, "d"),
        _cell(figures.replica_changes, "d"),
        str(figures.all.rejected),
    )
    return table


def _cells(figures: ClassFigures) -> list[str]:
    return [
        _cell(figures.slo_attainment, ".1%"),
        _cell(figures.ttft_p50_s, ".2f"),
        _cell(figures.ttft_p99_s, ".1f"),
        _cell(figures.quality_loss_mean, ".2f"),
        _cell(figures.quality_loss_p99, ".1f"),
    ]


def _cell(value: float | None, spec: str) -> str:
    """A dash for what cannot be known."""
    if value is None:
        return "-"
    return format(value, spec) if math.isfinite(value) else "never"


def compared_notes(test: LoadTest) -> Iterable[str]:
    """What the table's figures are of, and why some are not known."""
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
    """As an item of ``policies`` in the JSON of ``marsray simulate``; null for what is not known
    and for a time that never came.
    """
    figures = test.figures
    whole = vars(figures.all) | vars(figures)
    return {
        "name": test.options.model,
        "variant": "",
        **{key: whole[key] for key in _OF_ALL},
        "by_class": {
            name: {key: getattr(each, key) for key in _OF_CLASS}
            for name, each in figures.classes.items()
        },
    }
