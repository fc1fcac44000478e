"""Draws the load of a server: a table on a terminal, a line for each model elsewhere.

Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mars_platform.cli.report import Column, table_of
from mars_platform.cli.shading import printable
from mars_serve.cli.top.load import ModelLoad
from mars_serve.cli.top.sample import Decision

_NOTHING = "-"


def picture(url: str, loads: Sequence[ModelLoad], *, is_admin: bool, problem: str = "") -> Group:
    """Return what is shown of a server on a terminal.

    Args:
        url: address of the server.
        loads: load of each model, the last known one while the server is away.
        is_admin: whether the key is an administrator's.
        problem: why there is no newer load; empty if there is one.
    """
    head = Text(f"{url}  {time.strftime('%H:%M:%S')}", style="bold")
    if problem:
        head.append(f"  {printable(problem)}; trying again", style="bold red")
    parts: list[RenderableType] = [head, _table(loads)]
    for load in loads:
        refused = ", ".join(f"{num} × {printable(name)}" for name, num in load.refused.items())
        if refused:
            parts.append(Text(f"{printable(load.model)}: refused since its start: {refused}"))
        if load.decisions:
            title = f"{printable(load.model)}: latest decisions"
            parts.append(_decisions(title, load.decisions))
    if not is_admin:
        parts.append(Text("τ's control and decisions need an administrator's key", style="dim"))
    parts.append(Text("Ctrl-C ends the view", style="dim"))
    return Group(*parts)


def _table(loads: Sequence[ModelLoad]) -> Table:
    """Return a table with a column for each model: loads have more figures than a line holds."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for load in loads:
        table.add_column(printable(load.model), justify="right")
    columns = [_rows_of(load) for load in loads]
    for index, (title, _) in enumerate(columns[0] if columns else []):
        table.add_row(title, *(rows[index][1] for rows in columns))
    return table


def _rows_of(load: ModelLoad) -> list[tuple[str, str]]:
    return [
        ("replicas", _replicas(load)),
        ("requests running", str(load.num_running)),
        ("requests waiting", str(load.num_waiting)),
        ("not begun, by tier", _queued(load)),
        ("KV cache, fullest replica", number(load.kv_share, ".0%")),
        ("τ of tier default", _threshold(load)),
        ("τ of tier flex", number(load.flex_threshold, ".3f")),
        ("output tokens/s", number(load.tokens_per_s, ",.0f")),
        ("prompt tokens/s", number(load.prompt_tokens_per_s, ",.0f")),
        ("tokens a pass, 30 s", number(load.tokens_per_forward, ".2f")),
        *(
            (f"first token {name}, 30 s", seconds(each))
            for name, each in load.first_token_s.items()
        ),
        ("requests ended/s", number(load.ended_per_s, ".1f")),
        ("requests refused/s", number(load.refused_per_s, ".1f")),
    ]


def _replicas(load: ModelLoad) -> str:
    text = str(load.num_replicas)
    if load.num_ordered is not None:
        text += f" of {load.num_ordered} ordered"
    if load.max_replicas is not None:
        text += f", at most {load.max_replicas}"
    if load.num_overdue:
        text += f", {load.num_overdue} overdue"
    return text


def _queued(load: ModelLoad) -> str:
    return ", ".join(f"{num} {printable(tier)}" for tier, num in load.queued.items()) or _NOTHING


def _threshold(load: ModelLoad) -> str:
    words = {True: "autoscaler", False: "by hand", None: ""}[load.is_automatic]
    return ", ".join(filter(None, [number(load.threshold, ".3f"), load.way, words]))


def _decisions(title: str, decisions: Sequence[Decision]) -> Table:
    columns = [
        Column("time", lambda each: time.strftime("%H:%M:%S", time.localtime(each.time_s))),
        Column("reason", lambda each: printable(each.reason)),
        Column("replicas", lambda each: f"{each.replicas_before} → {each.num_replicas}"),
        Column("ready", "num_ready"),
        Column("starting", "num_starting"),
        Column("τ", "threshold", ".3f"),
        Column("requests/s", "requests_per_s", ".1f"),
        Column("", lambda each: printable(each.problem or "saturated" * each.is_saturated)),
    ]
    return table_of(
        columns, decisions, missing=_NOTHING, title=title, title_justify="left", show_edge=False
    )


def line(load: ModelLoad) -> str:
    """Return a model's load as one line."""
    first = " ".join(f"{name} {seconds(each)}" for name, each in load.first_token_s.items())
    parts = [
        f"{time.strftime('%H:%M:%S')} {printable(load.model)}: replicas {_replicas(load)}",
        f"running {load.num_running}",
        f"waiting {load.num_waiting}",
        f"not begun {_queued(load)}",
        f"KV {number(load.kv_share, '.0%')}",
        f"τ {_threshold(load)}",
        f"{number(load.tokens_per_s, ',.0f')} tokens/s",
        f"{number(load.tokens_per_forward, '.2f')} a pass",
        f"first token {first}",
        f"{number(load.ended_per_s, '.1f')} ended/s",
        f"{number(load.refused_per_s, '.1f')} refused/s",
    ]
    if load.decisions:
        latest = load.decisions[0]
        parts.append(f"latest decision: {printable(latest.reason)}")
    return "; ".join(parts)


def number(value: float | None, spec: str) -> str:
    """Return a number in a format, and a dash for None."""
    return _NOTHING if value is None else format(value, spec)


def seconds(value: float | None) -> str:
    """Return a time with its unit."""
    if value is None or math.isinf(value):
        return _NOTHING if value is None else "over 160 s"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
