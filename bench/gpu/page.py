"""Writes the page of an acceptance run: goals met, missed or not measured, and the figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.gpu.steps import DONE, Result

Steps = dict[str, Result]


@dataclass(frozen=True)
class Goal:
    """A bound on a figure."""

    name: str
    bound: float
    is_least: bool
    """Whether the figure must be at least the bound; otherwise at most."""
    figure: Callable[[Steps], float | None]
    """Takes the figure from the steps' results; None if it was not measured."""

    def verdict(self, steps: Steps) -> tuple[str, str]:
        """Return the figure and whether the goal is met, in words."""
        value = self.figure(steps)
        if value is None:
            return "", "not measured"
        is_met = value >= self.bound if self.is_least else value <= self.bound
        return f"{value:.3g}", "met" if is_met else "**missed**"


def _result(steps: Steps, name: str) -> Result | None:
    step = steps.get(name, {})
    return step["result"] if step.get("state") == DONE else None


def _way(batch: int, way: str, field: str) -> Callable[[Steps], float | None]:
    def figure(steps: Steps) -> float | None:
        found = _result(steps, f"7b batch {batch} context 512")
        return None if found is None else float(found["ways"][way][field])

    return figure


def _field(name: str, field: str) -> Callable[[Steps], float | None]:
    def figure(steps: Steps) -> float | None:
        value = (_result(steps, name) or {}).get(field)
        return None if value is None else float(value)

    return figure


def _num_failed(words: tuple[str, ...]) -> Callable[[Steps], float | None]:
    def figure(steps: Steps) -> float | None:
        about = [step for name, step in steps.items() if name.startswith(words)]
        settled = [step["state"] for step in about if step["state"] in (DONE, "failed")]
        return float(settled.count("failed")) if settled else None

    return figure


_CHECKS = ("attention", "kernels", "greedy", "GPU tests")
GOALS = [
    Goal("checks that failed", 0, False, _num_failed(_CHECKS)),
    Goal(
        "7B, 1 stream, ar: share of the bandwidth floor", 0.65, True, _way(1, "ar", "floor_share")
    ),
    Goal("the same, aim", 0.80, True, _way(1, "ar", "floor_share")),
    *[
        Goal(
            f"7B, {batch} streams, exact with agreement .9 over ar",
            bound,
            True,
            _way(batch, "exact .9", "over_ar"),
        )
        for batch, bound in ((1, 2.3), (8, 2.0), (32, 1.6))
    ],
    *[
        Goal(
            f"7B, {batch} streams, threshold with mean 1.79 over ar",
            1.6,
            True,
            _way(batch, "threshold 1.79", "over_ar"),
        )
        for batch in (1, 8, 16)
    ],
    Goal("7B: seconds to capture graphs", 20, False, _field("7b load", "capture_s")),
    Goal("0.5B: time of MARS training over AR", 1.5, False, _field("training", "time")),
    Goal("the same, compiled", 1.5, False, _field("training compiled", "time")),
]


def page(parts: list[Result]) -> str:
    """Return the page of all parts' results, as Markdown."""
    steps: Steps = {name: step for part in parts for name, step in part["steps"].items()}
    lines = ["# GPU acceptance", ""]
    identity = _identity(parts)
    lines += [f"- {name}: {value}" for name, value in identity.items()]
    if identity["sizes"] != "full":
        lines += ["", "Sizes are tiny: the program was tried, and no figure says anything."]
    lines += [
        "",
        "## Goals",
        "",
        "| goal | bound | figure | verdict |",
        "| --- | --- | --- | --- |",
    ]
    for goal in GOALS:
        value, verdict = goal.verdict(steps if identity["sizes"] == "full" else {})
        sign = ">=" if goal.is_least else "<="
        lines.append(f"| {goal.name} | {sign} {goal.bound:g} | {value} | {verdict} |")
    lines += ["", *_decoding(steps)]
    lines += [
        "",
        "## Steps",
        "",
        "| step | state | seconds | figures |",
        "| --- | --- | --- | --- |",
    ]
    for name, step in steps.items():
        seconds = f"{step['seconds']:.1f}" if "seconds" in step else ""
        lines.append(f"| {name} | {step['state']} | {seconds} | {_summary(step)} |")
    for name, step in steps.items():
        if "error" in step:
            lines += [
                "",
                f"### {name} failed",
                "",
                "```text",
                step["error"].rstrip()[-4000:],
                "```",
            ]
    return "\n".join(lines) + "\n"


def _identity(parts: list[Result]) -> dict[str, str]:
    """Return what the parts ran with; where they differ, the values of all in turn."""
    names = dict.fromkeys(name for part in parts for name in part["identity"])
    values = {
        name: dict.fromkeys(str(part["identity"].get(name)) for part in parts) for name in names
    }
    return {name: " / ".join(each) for name, each in values.items()}


def _decoding(steps: Steps) -> list[str]:
    columns = ["streams and context", "way", "ms a step", "floor", "tokens/s", "tokens a pass"]
    columns += ["over ar", "nodes a step", "idle"]
    lines = ["## Decoding", "", *_head(columns)]
    for name, step in steps.items():
        if step["state"] != DONE or "ways" not in step["result"]:
            continue
        for way, figures in step["result"]["ways"].items():
            nodes, idle = figures.get("nodes_per_step"), figures.get("idle_share")
            lines.append(
                _line(
                    [
                        name,
                        way,
                        f"{figures['step_ms']:.2f}",
                        f"{figures['floor_share']:.0%}",
                        f"{figures['tokens_per_s']:,.0f}",
                        f"{figures['tokens_per_pass']:.2f}",
                        f"{figures['over_ar']:.2f}",
                        "" if nodes is None else f"{nodes:.0f}",
                        "" if idle is None else f"{idle:.0%}",
                    ]
                )
            )
    return lines


def _head(columns: list[str]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns))]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _summary(step: Result) -> str:
    """Return the plain numbers and words of a step's result, or why it was left out."""
    if "reason" in step:
        return str(step["reason"])
    return ", ".join(f"{name} {_short(value)}" for name, value in _plain(step.get("result", {})))


def _plain(result: Result, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in result.items():
        if isinstance(value, dict) and name in ("ar", "exact", "tokens_per_s", "memory"):
            yield from _plain(value, f"{name}.")
        elif isinstance(value, int | float | str):
            yield f"{prefix}{name}", value


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
