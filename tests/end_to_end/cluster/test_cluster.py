"""Training runs on two Ray nodes of this machine, and runs that lose the second node."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
from rich.console import Console

from mars_platform.config import load_settings
from mars_train.recipe import Recipe
from mars_train.run.recipe_run import run_recipe
from mars_train.stage.history import read_history

EVERY_STEPS = 50
NODE = {"resources": {"place": 1}, "object_store_memory": 100 * 2**20}
TIMEOUT_S = 200


@pytest.fixture(scope="module")
def cluster():
    with (
        tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as short,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
        patch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
        # Ray's view of free resources lags up to 20 s; workers on a lost node wait this long.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")
        head = {**NODE, "num_cpus": 2, "include_dashboard": False, "temp_dir": short}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            ray.init(address=made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def second_node(cluster):
    node = cluster.add_node(**NODE, num_cpus=1)
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def recipe_file(write_recipe, tmp_path_factory):
    return write_recipe(
        tmp_path_factory.mktemp("nodes"),
        every_steps=EVERY_STEPS,
        scaling={"num_workers": 2},
        max_steps=20,
        batch_size=16,
        micro_batch_size=8,
    )


class Run:
    """A run of the recipe in another thread."""

    def __init__(self, executor, recipe_file, output, overrides):
        self.output = output
        self._log = output.with_suffix(".txt")
        recipe = load_settings(recipe_file, Recipe, [f"output={output}", *overrides])
        self._done = executor.submit(self._run, recipe)

    def _run(self, recipe):
        with self._log.open("w", buffering=1) as printed:
            run_recipe(recipe, Console(file=printed, width=200))

    @property
    def printed(self):
        return self._log.read_text()

    @property
    def steps(self):
        directory = self.output / "checkpoints" / "mars"
        return sorted(int(path.name[5:]) for path in directory.glob("step-*"))

    def wait_until(self, condition):
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert not self._done.done(), self._done.result() or self.printed
            assert time.monotonic() < deadline, self.printed
            time.sleep(0.02)

    def finish(self):
        self._done.result(TIMEOUT_S)


@contextmanager
def started(recipe_file, output, *overrides):
    with ThreadPoolExecutor(1) as executor:
        yield Run(executor, recipe_file, output, overrides)


def count(name, *nodes):
    """Count the processes of a class of Ray actors on some nodes."""
    raylets = [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in nodes]
    processes = [process for raylet in raylets for process in raylet.children(recursive=True)]
    return sum(title(process).startswith(f"ray::{name}") for process in processes)


def title(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return ""


def count_workers(nodes):
    return [count("RayTrainWorker", node) for node in nodes]


def result(output):
    model = output / "model"
    return read_history(model / "history.json"), (model / "model.safetensors").read_bytes()


@pytest.mark.full
def test_a_run_on_two_nodes_equals_a_run_on_one(cluster, second_node, recipe_file, tmp_path):
    nodes = [cluster.head_node, second_node]
    with started(recipe_file, tmp_path / "two", "scaling.placement=STRICT_SPREAD") as run:
        run.wait_until(lambda: count_workers(nodes) == [1, 1])
        run.finish()
    with started(recipe_file, tmp_path / "one", "scaling.placement=STRICT_PACK") as run:
        run.wait_until(lambda: count_workers(nodes) == [2, 0])
        run.finish()
    assert result(tmp_path / "two") == result(tmp_path / "one")


def elastic(num_steps):
    """Return overrides for one worker per node, on as many nodes as there are."""
    return [
        f"stages.0.max_steps={num_steps}",
        "scaling.num_workers=[1, 2]",
        "scaling.resources_per_worker={place: 1}",
    ]


@pytest.mark.full
def test_a_run_that_loses_a_node_continues_with_fewer_workers(
    cluster, second_node, recipe_file, tmp_path
):
    with started(recipe_file, tmp_path / "out", *elastic(400)) as run:
        run.wait_until(lambda: run.steps)
        assert count_workers([cluster.head_node, second_node]) == [1, 1]
        cluster.remove_node(second_node, allow_graceful=False)
        run.wait_until(lambda: "resumed from" in run.printed)
        assert count_workers([cluster.head_node]) == [1]
        run.finish()
    history, _ = result(tmp_path / "out")
    assert len(history.steps) == 400
    assert history.steps[-1].loss < 0.5 * history.steps[0].loss


@pytest.mark.full
def test_a_notice_of_preemption_saves_a_checkpoint_at_once(
    cluster, second_node, recipe_file, tmp_path
):
    # The run must last until Ray Train's watcher has started and seen the notice.
    overrides = [*elastic(900), "stages.0.batch_size=32", "checkpoints.every_steps=1000"]
    with started(recipe_file, tmp_path / "out", *overrides) as run:
        run.wait_until(lambda: count("PreemptionWatcher", cluster.head_node, second_node))
        run.wait_until(lambda: "/900 loss" in run.printed)
        assert not run.steps
        drain(second_node)
        run.wait_until(lambda: "about to be taken away: saving a checkpoint" in run.printed)
        run.wait_until(lambda: run.steps)
        cluster.remove_node(second_node, allow_graceful=False)
        run.wait_until(lambda: "resumed from" in run.printed)
        run.finish()
    history, _ = result(tmp_path / "out")
    assert len(history.steps) == 900


def drain(node):
    """Tell Ray that a node will be gone in 20 seconds, as a cloud's agent does."""
    deadline_ms = time.time_ns() // 10**6 + 20_000
    accepted, _ = ray._private.worker.global_worker.gcs_client.drain_node(
        node.node_id, DRAIN_NODE_REASON_PREEMPTION, "test", deadline_ms
    )
    assert accepted
