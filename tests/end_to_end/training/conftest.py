"""One Ray cluster for all runs of this folder, and a recipe as a user writes it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import ray
import yaml
from rich.console import Console

from mars_platform.cluster.ray_private import busy_node_variables, clusters_without_helpers
from mars_platform.config import load_settings
from mars_train.recipe import Recipe
from mars_train.run.recipe_run import run_recipe

_MAX_STEPS = 80


@pytest.fixture(scope="package", autouse=True)
def address() -> Iterator[str]:
    """Start a Ray cluster that runs in this process use, and that commands can join.

    Yields:
        The cluster's address.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as short,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Ray Train takes the workers' reports at this interval; they save faster than its default.
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        # An actor for each run less; the cluster's tests take nodes away, and need it.
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        for name, value in busy_node_variables().items():
            patch.setenv(name, value)
        with clusters_without_helpers():
            context = ray.init(
                address="local",
                num_cpus=3,  # two workers, and one for Ray Data
                object_store_memory=200 * 2**20,
                include_dashboard=False,
                log_to_driver=False,
                _temp_dir=short,
            )
        yield context.address_info["gcs_address"]
        ray.shutdown()


@pytest.fixture(scope="package")
def recipe_file(trained, tmp_path_factory) -> Path:
    """A recipe that gives an existing AR model a MARS stage.

    Its data is a JSONL file with bad rows in lines 11 and 34, and a Parquet file.
    """
    work = tmp_path_factory.mktemp("own")
    rows = (trained.data / "train.jsonl").read_text().splitlines()[:64]
    lines = [*rows[:10], '{"messages": []}', *rows[10:32], "not JSON"]
    (work / "data").mkdir()
    (work / "data" / "a.jsonl").write_text("\n".join(lines) + "\n")
    table = pa.Table.from_pylist([json.loads(row) for row in rows[32:]])
    pa.parquet.write_table(table, work / "data" / "b.parquet")
    stage = {"objective": "mars", "block_size": 8, "batch_size": 8, "micro_batch_size": 4}
    content = {
        "model": {"base": str(trained.ar_model)},
        "data": {"train": [str(work / "data")], "max_length": 128, "max_bad_rows": 2},
        "stages": [{**stage, "epochs": 1000, "max_steps": _MAX_STEPS}],
        "checkpoints": {"every_steps": 5},
        "scaling": {"threads_per_worker": 1, "max_failures": 1},
        "output": str(work / "uninterrupted"),
    }
    (work / "recipe.yaml").write_text(yaml.safe_dump(content))
    return work / "recipe.yaml"


@pytest.fixture(scope="package")
def uninterrupted(address, recipe_file) -> Path:
    """The output directory of the recipe's run without any interruption."""
    recipe = load_settings(recipe_file, Recipe)
    run_recipe(recipe, Console(quiet=True))
    return recipe.output
