"""Recipes of short runs, for all tests that train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mars_train.data.demo import write_demo_data
from mars_train.data.demo_tasks import draw_short

_RECIPE = Path(__file__).parents[1] / "recipe.yaml"


@pytest.fixture(scope="session")
def write_recipe() -> Callable[..., Path]:
    """Write a recipe of one stage, and its data, into a directory; see `_write_recipe`."""
    return _write_recipe


def _write_recipe(
    work: Path,
    *,
    every_steps: int,
    scaling: Mapping[str, Any],
    stage: int = 1,
    num_train: int = 500,
    train: str | None = None,
    **of_stage: Any,
) -> Path:
    """Write ``recipe.yaml`` and ``data/train.jsonl``; returns the recipe's path.

    Args:
        work: An existing directory; the run's output is ``out`` in it.
        every_steps: Steps between two checkpoints.
        scaling: The recipe's section ``scaling``.
        stage: Index of the stage in the recipe of all tests: 0 for AR, 1 for MARS.
        num_train: Number of conversations.
        train: Path of the data in the recipe; an absolute one by default.
        of_stage: Fields of the stage to change.
    """
    write_demo_data(work / "data", draw_short, num_train=num_train, num_eval=1, seed=1)
    recipe = yaml.safe_load(_RECIPE.read_text())
    recipe["data"]["train"] = [train or str(work / "data" / "train.jsonl")]
    recipe["stages"] = [{**recipe["stages"][stage], "epochs": 100, **of_stage}]
    recipe["scaling"] = {"threads_per_worker": 1, **scaling}
    recipe["checkpoints"] = {"every_steps": every_steps}
    recipe["output"] = str(work / "out")
    del recipe["evaluation"]
    path = work / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path
