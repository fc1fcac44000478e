"""Draws the figures of the pages: ``make figures`` writes ``docs/figures``.

The data in ``docs/site/data`` come from the model of ``marsray demo --keep DIR`` of 2026-11-28: ``frontier.json`` as
``marsray calibrate`` wrote it, ``passes.json`` the texts of each forward pass by ``marsray generate --json``
on its first held-out prompt in each mode. ``calibration.png`` is the picture of the same calibration.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mars_autoscale.simulation.config import SimulationConfig, families
from mars_autoscale.simulation.run import ClusterSample, Simulation
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import generate
from mars_platform.config import load_settings
from mars_platform.method.rules import visibility
from marsray_docs.diagrams import DATA, diagrams
from marsray_docs.repository import ROOT

FIGURES = ROOT / "docs" / "figures"
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "marsray", "font.family": "sans-serif",
          "axes.spines.top": False, "axes.spines.right": False, "font.size": 11}  # fmt: skip
_DARK, _MIDDLE, _LIGHT = "#1c1c1c", "#b5482f", "#d9d9d9"
_ON_DARK = "@media (prefers-color-scheme: dark) { svg { filter: invert(.9) hue-rotate(180deg) } }"


def main(folder: Path = FIGURES) -> None:
    """Draw all figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, diagram in diagrams().items():
        (folder / f"{name}.svg").write_text(diagram, encoding="utf-8")
    with matplotlib.rc_context(_STYLE):
        drawn = {"visibility": _visibility(), "threshold": _threshold(), "knobs": _knobs()}
        for name, figure in drawn.items():
            text = io.StringIO()
            figure.savefig(
                text, format="svg", metadata={"Date": None}, bbox_inches="tight", transparent=True
            )
            svg = text.getvalue().replace("<defs>", f"<style>{_ON_DARK}</style>\n <defs>", 1)
            (folder / f"{name}.svg").write_text(svg, encoding="utf-8")


def _visibility() -> Figure:
    """Draw which slots of a packed row each slot sees, by the rule that training uses."""
    prompt, length, block = 3, 9, 3
    positions = torch.arange(length)
    slots = torch.cat([positions, positions[prompt:]])[None]
    noisy = torch.arange(slots.shape[1])[None] >= length
    seen = visibility(torch.zeros_like(slots), slots, slots // block, noisy)[0].numpy()
    names = [f"x{i}" for i in range(length)] + [f"m{i}" for i in range(prompt, length)]
    figure = Figure(figsize=(5.2, 4.8))
    axes = figure.subplots()
    shades = np.where(seen, np.where(noisy.numpy()[0][:, None], 0.35, 0.72), 1.0)
    axes.imshow(shades, cmap="gray", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="is seen: clean tokens x, masks m", ylabel="sees")
    for edge in range(len(names) + 1):
        axes.axhline(edge - 0.5, color="white", lw=0.8)
        axes.axvline(edge - 0.5, color="white", lw=0.8)
    axes.axhline(length - 0.5, color=_DARK, lw=1)
    axes.axvline(length - 0.5, color=_DARK, lw=1)
    return figure


def _threshold() -> Figure:
    """Tokens per forward pass and points lost for each τ."""
    points = _frontier()["points"]
    taus = [point for point in points if point["mode"] == "threshold"]
    x = range(len(taus) + 1)
    names = ["1", *(f"{point['threshold']:g}".lstrip("0") for point in taus)]
    figure = Figure(figsize=(4.6, 4.8))
    left, right = figure.subplots(2, 1)
    left.bar(x, [1, *(_most_tokens(point) for point in taus)], color=_LIGHT, ec=_DARK)
    exact = next(point for point in points if point["mode"] == "exact")
    left.axhline(_most_tokens(exact), color=_MIDDLE, ls="--")
    left.text(-0.4, _most_tokens(exact) + 0.25, "mode exact, without loss", color=_MIDDLE)
    left.set(ylabel="tokens per forward pass")
    losses = [point["loss"] for point in taus]
    middle = [0, *(loss["value"] for loss in losses)]
    below = [0, *(loss["value"] - loss["low"] for loss in losses)]
    above = [0, *(loss["high"] - loss["value"] for loss in losses)]
    right.errorbar(x, middle, yerr=[below, above], fmt="o", color=_DARK, capsize=3)
    right.set(ylabel="points lost", xlabel="τ")
    for axes in (left, right):
        axes.set_xticks(x, names)
    figure.tight_layout()
    return figure


def _knobs() -> Figure:
    """A spike of load, met by replicas alone and by both knobs."""
    path = ROOT / "examples" / "autoscale" / "simulate.yaml"
    config = load_settings(path, SimulationConfig)
    assert config.synthetic is not None
    trace = generate(config.synthetic, 0)
    no_loss = {"floor_threshold": 1.0, "flex_floor_threshold": 1.0}
    alone = config.model_copy(update={"outer": config.outer.model_copy(update=no_loss)})
    courses = [_joint_course(each, trace) for each in (config, alone)]
    figure = Figure(figsize=(4.8, 5))
    load, tau, replicas, waiting = figure.subplots(4, 1, sharex=True)
    _course(load, courses[:1], "requests_per_s", "requests/s")
    _course(tau, courses, "threshold", "τ")
    tau.set_ylim(0.75, 1.02)
    _course(replicas, courses, "num_ready", "replicas\nready")
    _course(waiting, courses, "num_waiting", "waiting\nrequests")
    waiting.legend(["τ and replicas", "replicas alone"], frameon=False, loc="upper right")
    waiting.set(xlabel="seconds", xlim=(60, 600))
    figure.align_ylabels()
    return figure


def _joint_course(config: SimulationConfig, trace: list[TraceRequest]) -> list[ClusterSample]:
    (_, [(_, joint)]), *_ = families(config)
    return Simulation(trace, config.capacity, config.replicas, joint()).run().samples


def _course(axes: Axes, courses: list[list[ClusterSample]], field: str, label: str) -> None:
    for samples, color, style in zip(courses, (_DARK, _MIDDLE), ("-", "--"), strict=False):
        times = [each.time_s for each in samples]
        values = [getattr(each, field) for each in samples]
        axes.plot(times, values, style, color=color, lw=1.3)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)


def _frontier() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "frontier.json").read_text())
    return found


def _most_tokens(point: dict[str, Any]) -> float:
    return max(float(window["tokens_per_forward"]) for window in point["windows"])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
