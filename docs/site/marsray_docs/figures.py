"""Draws the figures of the concepts: ``make figures`` writes ``docs/figures``.

The data in ``docs/site/data`` come from the demo's model: ``frontier.json`` as ``marsray calibrate``
wrote it, and ``passes.json`` from ``marsray generate --json`` in each mode. All figures are readable in
greyscale and the same from run to run.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from mars_autoscale.policy.observe import Snapshot
from mars_autoscale.simulation.config import SimulationConfig, families
from mars_autoscale.simulation.policies import Joint, Target
from mars_autoscale.simulation.run import ClusterSample, Simulation
from mars_autoscale.traces.files import TraceRequest
from mars_autoscale.traces.synthetic import generate
from mars_platform.config import load_settings
from mars_platform.method.rules import visibility

ROOT = Path(__file__).resolve().parents[3]
FIGURES, DATA = ROOT / "docs" / "figures", ROOT / "docs" / "site" / "data"
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "marsray", "font.family": "sans-serif",
          "axes.spines.top": False, "axes.spines.right": False, "font.size": 10}  # fmt: skip
_DARK, _MIDDLE, _LIGHT = "#1c1c1c", "#b5482f", "#d9d9d9"
_BATCHES = (1, 2, 4, 8, 16, 32, 64)


def main(folder: Path = FIGURES) -> None:
    """Draw all figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        drawn = {
            "visibility": _visibility(),
            "passes": _passes(),
            "threshold": _threshold(),
            "windows": _windows(),
            "knobs": _knobs(),
            "pace": _pace(),
            "gains": _gains(),
        }
        for name, figure in drawn.items():
            figure.savefig(
                folder / f"{name}.svg",
                metadata={"Date": None},
                bbox_inches="tight",
                facecolor="white",
            )


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


def _passes() -> Figure:
    """The beginning of one answer in each mode, with a box for each forward pass."""
    found = json.loads((DATA / "passes.json").read_text())
    figure = Figure(figsize=(8.6, 1.9))
    axes = figure.subplots()
    titles = {"ar": "mode ar", "threshold": "τ = .9", "exact": "mode exact"}
    for row, (mode, title) in enumerate(titles.items()):
        axes.text(-1, row + 0.5, title, ha="right", va="center")
        _boxes(axes, row, found[mode])
        axes.text(74, row + 0.5, f"{len(found[mode])} passes", va="center")
    axes.set(xlim=(-13, 86), ylim=(3, 0))
    axes.axis("off")
    return figure


def _boxes(axes: Axes, row: int, passes: list[str]) -> None:
    begin = 0
    for number, text in enumerate(passes):
        end = begin + len(text)
        if end > 72:
            break
        shade = _LIGHT if number % 2 else "white"
        box = Rectangle((begin, row + 0.14), len(text), 0.72, fc=shade, ec=_DARK, lw=0.6)
        axes.add_patch(box)
        for place, letter in enumerate(text):
            middle = begin + place + 0.5
            axes.text(middle, row + 0.52, letter, ha="center", va="center", family="monospace",
                      fontsize=8)  # fmt: skip
        begin = end


def _threshold() -> Figure:
    """Tokens per forward pass and points lost for each τ."""
    points = _frontier()["points"]
    taus = [point for point in points if point["mode"] == "threshold"]
    x = range(len(taus) + 1)
    names = ["1", *(f"{point['threshold']:g}".lstrip("0") for point in taus)]
    figure = Figure(figsize=(8.2, 2.9))
    left, right = figure.subplots(1, 2)
    left.bar(x, [1, *(_most_tokens(point) for point in taus)], color=_LIGHT, ec=_DARK)
    exact = next(point for point in points if point["mode"] == "exact")
    left.axhline(_most_tokens(exact), color=_MIDDLE, ls="--")
    left.text(-0.4, _most_tokens(exact) + 0.08, "mode exact, without loss", color=_MIDDLE)
    left.set(ylabel="tokens per forward pass", xlabel="τ")
    losses = [point["loss"] for point in taus]
    middle = [0, *(loss["value"] for loss in losses)]
    below = [0, *(loss["value"] - loss["low"] for loss in losses)]
    above = [0, *(loss["high"] - loss["value"] for loss in losses)]
    right.errorbar(x, middle, yerr=[below, above], fmt="o", color=_DARK, capsize=3)
    right.set(ylabel="points of accuracy lost", xlabel="τ")
    for axes in (left, right):
        axes.set_xticks(x, names)
    figure.tight_layout()
    return figure


def _windows() -> Figure:
    """Speed of mode exact over mode ar by the number of masks, for several batches."""
    frontier = _frontier()
    exact = next(point for point in frontier["points"] if point["mode"] == "exact")
    steps = frontier["step_seconds"]
    seconds = [row[0] for row in steps["seconds"]]
    figure = Figure(figsize=(6.2, 3))
    axes = figure.subplots()
    for window, style in zip(exact["windows"], (":", "--", "-"), strict=True):
        gains = []
        for rows in _BATCHES:
            alone, with_masks = np.interp(
                [rows, rows * window["positions_per_row"]], steps["positions"], seconds
            )
            gains.append(window["tokens_per_forward"] * alone / with_masks)
        count = window["num_masks"]
        label = f"{count} mask{'s' * (count > 1)}: {window['tokens_per_forward']:.1f} tokens a pass"
        axes.plot(_BATCHES, gains, style, color=_DARK, label=label)
    axes.axhline(1, color=_MIDDLE, lw=1)
    axes.text(1, 1.03, "mode ar", color=_MIDDLE)
    axes.set_xscale("log", base=2)
    axes.set_xticks(_BATCHES, [str(rows) for rows in _BATCHES])
    axes.set(xlabel="requests that run at once", ylabel="speed over mode ar", ylim=(0, None))
    axes.legend(frameon=False)
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
    figure = Figure(figsize=(7.4, 5))
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


class _Believing(Joint):
    """The joint policy without any measured speed: neither a pace nor a queue counts."""

    def decide(self, snapshot: Snapshot, /) -> Target:
        loads = [replace(each, pace=0.0) for each in snapshot.replicas]
        return super().decide(replace(snapshot, replicas=loads))


def _pace() -> Figure:
    """Replicas that become slower, met with and without measuring it."""
    path = ROOT / "examples" / "autoscale" / "simulate.yaml"
    slower = [{"times": 0.4, "from_s": 150}]
    config = load_settings(path, SimulationConfig, [f"replicas.real_speed={json.dumps(slower)}"])
    assert config.synthetic is not None
    trace = generate(config.synthetic.model_copy(update={"spikes": ()}), 0)
    limits = {"max_replicas": config.replicas.max, "cold_start_s": config.replicas.cold_start_s}
    deaf = config.outer.model_copy(update={**limits, "objective_ttft_s": math.inf})
    believing = _Believing(config.capacity, deaf, config.inner)
    before = Simulation(trace, config.capacity, config.replicas, believing).run().samples
    courses = [_joint_course(config, trace), before]
    figure = Figure(figsize=(7.4, 4.2))
    tau, replicas, waiting = figure.subplots(3, 1, sharex=True)
    _course(tau, courses, "threshold", "τ")
    tau.set_ylim(0.75, 1.02)
    _course(replicas, courses, "num_ready", "replicas\nready")
    _course(waiting, courses, "num_waiting", "waiting\nrequests")
    replicas.set_ylim(0, 17)
    replicas.legend(
        ["with the measured pace", "by the frontier alone"], frameon=False, loc="upper left"
    )
    waiting.set(xlabel="seconds", xlim=(60, 600))
    figure.align_ylabels()
    return figure


def _gains() -> Figure:
    """Gain of τ = .9 over the fastest lossless decoding, by the rows of a step."""
    masks, tokens, positions, share = 3, 1.85, 5.0, np.linspace(0.0, 0.5, 201)
    lowered = tokens / (1 + (tokens + masks) * share)
    figure = Figure(figsize=(6.2, 3))
    axes = figure.subplots()
    for exact, style in ((1.0, "-"), (1.3, "--"), (1.6, "-."), (2.2, ":")):
        base = np.maximum(1 / (1 + share), exact / (1 + positions * share))
        label = "no mode exact" if exact == 1.0 else f"mode exact: {exact:g} tokens a pass"
        axes.plot(share, lowered / base, style, color=_DARK, label=label)
    axes.axhline(1, color=_MIDDLE, lw=1)
    axes.set(xlabel="rows of a step / positions that double its time",
             ylabel="speed of τ = .9 over\nthe fastest lossless", xlim=(0, 0.5))  # fmt: skip
    axes.legend(frameon=False)
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
