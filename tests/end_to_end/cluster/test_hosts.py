"""A run and a service both survive a host that loses its power.

Such a host closes no connection, so the other hosts get no notice of its end.
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
from mars_train.stage.history import read_history
from waiting import wait_until

WHY_NOT = why_no_hosts()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
pytestmark = [pytest.mark.full, needs_hosts]

K8S = Path(__file__).parents[3] / "k8s"
NUM_STEPS, EVERY_STEPS = 240, 20
_WAIT_S = 120


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(net: Network) -> Cluster:
    """A head and two workers that serve behind HAProxy."""
    return cluster_of(net, behind_haproxy)


def cluster_of(net: Network, environment: Callable[[Host], Mapping[str, str]]) -> Cluster:
    cluster = Cluster(net, environment, num_cpus=4)
    for _ in range(2):
        cluster.add_worker()
    return cluster


def of_manifests(host: Host) -> dict[str, str]:
    """Return the variables of Ray's containers, with HAProxy's files among the host's."""
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
    """Return the variables that `marsray serve` sets where HAProxy is not installed."""
    values = of_manifests(host)
    rest = {name: value for name, value in values.items() if "HAPROXY" not in name}
    return {**rest, "RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}


# --- a run ----------------------------------------------------------------------------------------


class Run:
    """The command ``marsray submit --follow`` and the run that it follows."""

    status: int
    step_of_cut: int
    spread: list[int]
    """Number of workers on each of the two hosts."""
    spread_again: list[int]
    """Number of workers on each host after the run was resumed."""

    def __init__(self, cluster: Cluster, work: Path) -> None:
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
        """Step of the newest checkpoint; 0 if there is none."""
        return max((int(path.name[5:]) for path in self._checkpoints.glob("step-*")), default=0)

    def wait_for(self, holds: Callable[[], object]) -> None:
        def holds_while_it_runs() -> object:
            assert self.process.poll() is None, self.printed
            return holds()

        wait_until(holds_while_it_runs, _WAIT_S, lambda: self.printed)


def trainers_on(*hosts: Host) -> list[int]:
    return [len(host.processes("ray::RayTrainWorker")) for host in hosts]


@pytest.fixture(scope="module")
def run(
    cluster: Cluster, write_recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """A finished run that lost a host on its way."""
    first, second = cluster.workers
    work = tmp_path_factory.mktemp("run")
    write_recipe(
        work,
        every_steps=EVERY_STEPS,
        scaling={"num_workers": 2, "placement": "STRICT_SPREAD", "max_failures": 3},
        num_train=1000,
        max_steps=NUM_STEPS,
    )
    run = Run(cluster, work)
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


def test_a_run_that_loses_a_host_continues_with_another(run):
    """The workers reach each other through their hosts' networks only."""
    assert run.status == 0, run.printed
    assert run.spread == run.spread_again == [1, 1]
    resumed = re.search(r"resumed from .*/step-(\d+)", run.printed)
    assert run.step_of_cut <= int(resumed[1]) < NUM_STEPS
    assert len(read_history(run.model / "history.json").steps) == NUM_STEPS
    assert read_checkpoint(run.model).metadata.block_size == 4


# --- a service ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outage(cluster: Cluster, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """The outage of a service behind HAProxy that serves the run's model."""
    return outage_of(cluster, run.model, tmp_path_factory.mktemp("haproxy"))


@pytest.fixture(scope="module")
def outage_of_python(net: Network, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """The same outage behind Serve's own proxy; its cluster replaces the other one."""
    for host in net.hosts:
        host.cut_power()
    cluster = cluster_of(net, behind_python)
    return outage_of(cluster, run.model, tmp_path_factory.mktemp("python"))


def assert_streams_are_right(outage: Outage) -> None:
    """Every stream is a beginning of its prompt's output alone, and a whole one if it ended so."""
    for stream in outage.streams:
        expected = outage.alone[stream.prompt]
        assert stream.text == expected[: len(stream.text)]
        assert (stream.end == "whole") == (stream.text == expected)


def assert_requests_were_served(outage: Outage) -> None:
    """Requests were served all the time, and finally through both proxies."""
    assert {status for status, _ in outage.asked} == {httpx.codes.OK}
    assert max(seconds for _, seconds in outage.asked) < READ_S
    assert len(outage.after) == 2 * len(PROMPTS)
    for prompt, (status, text) in outage.after:
        assert status == httpx.codes.OK
        assert outage.alone[prompt].startswith(text)


def test_streams_of_surviving_replicas_end_whole_and_others_with_an_error(outage):
    """The proxy and the ingress of these streams survived; half of the replicas did not."""
    quarter = NUM_STREAMS // 4
    ends = outage.ends(outage.kept, has_ingress=True)
    assert ends == ["error not_ready"] * quarter + ["whole"] * quarter
    assert_streams_are_right(outage)


def test_streams_of_a_lost_ingress_are_broken(outage):
    ends = outage.ends(outage.kept, has_ingress=False)
    assert ends == ["broken"] * (NUM_STREAMS // 2)


def test_clients_of_a_lost_proxy_receive_nothing(outage):
    streams = [stream for stream in outage.streams if stream.proxy is outage.lost]
    assert [stream.end for stream in streams] == ["silent"] * NUM_STREAMS


def test_the_service_continues_without_the_host(outage):
    assert_requests_were_served(outage)


def test_streams_behind_serves_own_proxy_lose_replicas_only(outage_of_python):
    """This proxy uses the ingress of its own host, so no stream loses its ingress."""
    half = NUM_STREAMS // 2
    ends = outage_of_python.ends(outage_of_python.kept, has_ingress=True)
    assert ends == ["error not_ready"] * half + ["whole"] * half
    assert_streams_are_right(outage_of_python)
    assert_requests_were_served(outage_of_python)
