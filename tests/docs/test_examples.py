"""The examples that need no model, and the figures that the documentation shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mars_platform.config import load_settings
from mars_train.recipe import Recipe
from marsray_docs.diagrams import diagrams
from shell import run_script

ROOT = Path(__file__).resolve().parents[2]
SIMULATION = ROOT / "examples" / "autoscale" / "simulate.yaml"
FIGURES = ROOT / "docs" / "figures"


def simulate(directory: Path, options: str) -> dict[str, float]:
    """Run the example of autoscaling; returns by policy the share of requests in time."""
    run_script(f"marsray simulate {SIMULATION} --json figures.json {options}", directory)
    found = json.loads((directory / "figures.json").read_text())
    return {each["name"]: each["slo_attainment"] for each in found["policies"]}


@pytest.mark.full
def test_both_knobs_meet_a_spike_that_replicas_alone_do_not(tmp_path: Path) -> None:
    in_time = simulate(tmp_path, "--plot comparison.svg")
    floors = "--set outer.floor_threshold=1 --set outer.flex_floor_threshold=1"
    assert in_time["joint"] > simulate(tmp_path, floors)["joint"]
    assert (tmp_path / "comparison.svg").stat().st_size > 10_000


@pytest.mark.full
def test_the_figures_are_drawn_by_one_command(tmp_path: Path) -> None:
    source = ROOT / "docs" / "site"
    run_script(f"PYTHONPATH={source} python -m marsray_docs.figures drawn", tmp_path)
    drawn = {each.name for each in (tmp_path / "drawn").iterdir()}
    assert drawn == {each.name for each in FIGURES.glob("*.svg")}


def test_the_diagrams_show_todays_log() -> None:
    drawn = diagrams()
    assert len(drawn) > 5
    for name, svg in drawn.items():
        assert (FIGURES / f"{name}.svg").read_text(encoding="utf-8") == svg, "run make figures"


def test_the_data_of_the_example_of_training_are_checkable(tmp_path: Path) -> None:
    run_script(f"python {ROOT / 'examples' / 'fine_tune' / 'make_data.py'}", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "held-out.jsonl").read_text().splitlines()]
    assert len(rows) == 160
    assert all(row["messages"][-1]["content"].endswith(f"Answer: {row['answer']}") for row in rows)


def test_the_long_recipe_of_the_demo_is_valid() -> None:
    recipe = load_settings(ROOT / "examples" / "demo" / "recipe.yaml", Recipe)
    assert [stage.objective for stage in recipe.stages] == ["ar", "generate", "mars"]
