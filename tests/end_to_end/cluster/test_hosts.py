"""Hosts that lose their power: a run that loses one goes on, and so does a service.

A host that is cut off closes no connection, so that nobody is told of its end.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest
import yaml

from clusters.hosts import Cluster, Host, Network, network, why_no_hosts
from clusters.outages import NUM_STREAMS, PROMPTS, READ_S, Outage, outage_of
from clusters.ray_heads import BIN
from mars_platform.checkpoint.directory import read_checkpoint
from mars_train.data.demo import write_demo_data
from mars_train.stage.history import read_history
from waiting import wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

K8S = Path(__file__).parents[3] / "k8s"
RECIPE = Path(__file__).parents[2] / "recipe.yaml"
NUM_STEPS, EVERY_STEPS = 240, 20
_WAIT_S = 120


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(net: Network) -> Cluster:
    """A head and two workers, which serve behind HAProxy."""
    return cluster_of(net, behind_haproxy)


def cluster_of(net: Network, environment: Callable[[Host], Mapping[str, str]]) -> Cluster:
    cluster = Cluster(net, environment, num_cpus=4)
    for _ in range(2):
        cluster.add_worker()
    return cluster


def of_manifests(host: Host) -> dict[str, str]:
    """What the manifests give Ray's containers; HAProxy's files are among the host's."""
    manifest = yaml.safe_load((K8S / "base" / "rayservice.yaml").read_text())
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    (container,) = head["containers"]
    return {
        each["name"]: each["value"].replace("/run/haproxy", str(host.files))
        for each in container["env"]
        if each["name"].startswith("RAY_")
    }


def behind_haproxy(host: Host) -> Mapping[str, str]:
    values = of_manifests(host)
    script = K8S / "setup" / "common" / "scripts" / "haproxy_launcher.py"
    launcher = values["RAY_SERVE_HAPROXY_BINARY_PATH"]
    subprocess.run([sys.executable, script, launcher], check=True)
    return values


def behind_python(host: Host) -> Mapping[str, str]:
    """As `marsray serve` does it where HAProxy is not installed."""
    values = of_manifests(host)
    rest = {name: value for name, value in values.items() if "HAPROXY" not in name}
    return {**rest, "RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


# --- a run ----------------------------------------------------------------------------------------


class Run:
    """``marsray submit --follow``, as its user sees it."""

    status: int
    step_of_cut: int
    spread: list[int]
    """Trainers on each of two hosts."""
    spread_again: list[int]
    """The same after the run was resumed."""

    def __init__(self, cluster: Cluster, work: Path) -> None:
        write_demo_data(work / "data", num_train=1000, num_eval=1, seed=1)
        recipe = yaml.safe_load(RECIPE.read_text())
        recipe["data"]["train"] = [str(work / "data" / "train.jsonl")]
        recipe["stages"] = [{**recipe["stages"][1], "epochs": 100, "max_steps": NUM_STEPS}]
        recipe["scaling"] = {
            "num_workers": 2,
            "threads_per_worker": 1,
            "placement": "STRICT_SPREAD",
            "max_failures": 3,
        }
        recipe["checkpoints"] = {"every_steps": EVERY_STEPS}
        recipe["output"] = str(work / "out")
        del recipe["evaluation"]
        (work / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        self.model = work / "out" / "model"
        self._checkpoints = work / "out" / "checkpoints" / "mars"
        self._log = work / "printed.txt"
        command = [BIN / "marsray", "submit", "recipe.yaml", "--follow"]
        command += ["--address", cluster.dashboard]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=work, env=cluster.shell, stdout=log, stderr=log
            )

    @property
    def printed(self) -> str:
        return self._log.read_text()

    @property
    def newest_step(self) -> int:
        """Of its checkpoints; 0 without any."""
        return max((int(path.name[5:]) for path in self._checkpoints.glob("step-*")), default=0)

    def wait_for(self, holds: Callable[[], object]) -> None:
        def holds_while_it_runs() -> object:
            assert self.process.poll() is None, self.printed
            return holds()

        wait_until(holds_while_it_runs, _WAIT_S, lambda: self.printed)


def trainers_on(*hosts: Host) -> list[int]:
    return [len(host.processes("ray::RayTrainWorker")) for host in hosts]


@pytest.fixture(scope="module")
def run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has lost a host on its way to the end."""
    first, second = cluster.workers
    run = Run(cluster, tmp_path_factory.mktemp("run"))
    try:
        run.wait_for(lambda: run.newest_step >= 2 * EVERY_STEPS)
        run.spread = trainers_on(first, second)
        run.step_of_cut = run.newest_step
        cluster.cut_power(second)
        third = cluster.add_worker()
        run.wait_for(lambda: "resumed from" in run.printed)
        run.spread_again = trainers_on(first, third)
        run.status = run.process.wait(_WAIT_S)
    finally:
        run.process.kill()
        run.process.wait()
    return run


def test_a_run_that_loses_a_host_goes_on_with_another(run):
    """Its workers reach each other through their hosts' own networks alone."""
    assert run.status == 0, run.printed
    assert run.spread == run.spread_again == [1, 1]
    resumed = re.search(r"resumed from .*/step-(\d+)", run.printed)
    assert run.step_of_cut <= int(resumed[1]) < NUM_STEPS
    assert len(read_history(run.model / "history.json").steps) == NUM_STEPS
    assert read_checkpoint(run.model).metadata.block_size == 4


# --- a service ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outage(cluster: Cluster, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """Of a service with the model of the run."""
    return outage_of(cluster, run.model, tmp_path_factory.mktemp("haproxy"))


@pytest.fixture(scope="module")
def outage_of_python(net: Network, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """Of the same behind Serve's own proxy, on a cluster of its own, after the other one's end."""
    for host in net.hosts:
        host.cut_power()
    cluster = cluster_of(net, behind_python)
    return outage_of(cluster, run.model, tmp_path_factory.mktemp("python"))


def assert_streams_are_right(outage: Outage) -> None:
    """What came is what comes alone, as far as it came."""
    for stream in outage.streams:
        expected = outage.alone[stream.prompt]
        assert stream.text == expected[: len(stream.text)]
        assert (stream.end == "whole") == (stream.text == expected)


def assert_requests_were_served(outage: Outage) -> None:
    """All the time, and through both proxies again once there were two hosts."""
    assert {status for status, _ in outage.asked} == {httpx.codes.OK}
    assert max(seconds for _, seconds in outage.asked) < READ_S
    assert len(outage.after) == 2 * len(PROMPTS)
    for prompt, (status, text) in outage.after:
        assert status == httpx.codes.OK
        assert outage.alone[prompt].startswith(text)


def test_streams_end_whole_where_they_can_and_with_an_error_else(outage):
    """Where proxy, ingress and replica survive, or only the replica is lost."""
    quarter = NUM_STREAMS // 4
    ends = outage.ends(outage.kept, has_ingress=True)
    assert ends == ["error not_ready"] * quarter + ["whole"] * quarter
    assert_streams_are_right(outage)


def test_streams_of_a_lost_ingress_break_off(outage):
    ends = outage.ends(outage.kept, has_ingress=False)
    assert ends == ["broken"] * (NUM_STREAMS // 2)


def test_clients_of_a_lost_proxy_hear_nothing(outage):
    streams = [stream for stream in outage.streams if stream.proxy is outage.lost]
    assert [stream.end for stream in streams] == ["silent"] * NUM_STREAMS


def test_the_service_goes_on(outage):
    assert_requests_were_served(outage)


def test_the_same_behind_serves_own_proxy(outage_of_python):
    """Which takes the ingress of its own host, so that none is lost."""
    half = NUM_STREAMS // 2
    ends = outage_of_python.ends(outage_of_python.kept, has_ingress=True)
    assert ends == ["error not_ready"] * half + ["whole"] * half
    assert_streams_are_right(outage_of_python)
    assert_requests_were_served(outage_of_python)
