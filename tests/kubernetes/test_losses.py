"""Measures what losses and changes cost the service that `test_from_nothing.py` leaves running.

No step needs the others: `make test-kubernetes TEST_ARGS="-k losses"` runs these alone.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from on_cluster import (
    SERVICE,
    START_S,
    Load,
    kill_the_head,
    load,
    make_key,
    own_node_of_a_worker,
    rollout,
    two_workers,
    wait_until,
)

OPERATOR = (
    "--namespace=kuberay-system",
    "--selector=app.kubernetes.io/component=kuberay-operator",
)
KEYS_S = 150
"""Seconds within which keys are read, which the README gives as two minutes."""
CUT = shlex.split(os.environ.get("MARSRAY_CUT", ""))
API = shlex.split(os.environ.get("MARSRAY_API", ""))
AWAY_S = 60
SHORT_S = 1
"""Grace period that ends before answers of 230 tokens do, which are the model's longest."""
SMALL_DISK_KIB = 2**20
GPU_JOBS = {"calibrate": "k8s/jobs/gpu/calibrate", "train": "k8s/overlays/gpu-multi-node-train"}


def two(value: str) -> tuple[dict[str, object], ...]:
    """Return the patches that give the service two workers and start an upgrade."""
    return two_workers(), rollout(value)


@pytest.fixture(autouse=True, scope="module")
def _two_workers(cluster):
    """Give the service two workers at little load, as the machine's cores are for what starts."""
    cluster.apply("tests/kubernetes/load")
    cluster.apply(SERVICE, *two("two"))
    wait_until(lambda: cluster.rollout() == "two", "the new cluster")
    cluster("wait", "--for=condition=Ready", "pod/load")
    wait_until(lambda: len(cluster.workers()) == 2, "two workers")


def at_full_strength(cluster, sent: Load, start: float) -> str:
    """Wait until two workers are ready and answer, and return the figures for the table."""
    wait_until(lambda: len(cluster.workers()) == 2, "two workers")
    took = time.monotonic() - start
    sent.await_answers()
    return f"full strength after {took:.0f} s"


def test_a_drained_node_loses_nothing(cluster, says):
    if len(cluster.get("nodes")["items"]) == 1:
        pytest.skip("there is one node only")
    with load(cluster) as sent:
        node = cluster.ready("worker")[0]["spec"]["nodeName"]
        start = time.monotonic()
        try:
            workers = "--pod-selector=ray.io/node-type=worker"
            cluster("drain", node, workers, "--delete-emptydir-data", f"--timeout={START_S}s")
            ended = time.monotonic() - start
            figures = at_full_strength(cluster, sent, start)
        finally:
            cluster("uncordon", node)
    says(f"{sent}; drained after {ended:.0f} s, {figures}")
    assert not sent.lost


def test_a_killed_worker_is_replaced(cluster, says):
    with load(cluster) as sent:
        start = time.monotonic()
        cluster("delete", "pod", cluster.workers()[0], "--grace-period=0", "--force")
        figures = at_full_strength(cluster, sent, start)
    says(f"{sent}; {figures}")


def test_streams_longer_than_the_grace_period_are_lost_alone(cluster, says):
    with load(cluster, users=8, tokens=230) as sent:  # as many as one replica decodes at once
        sent.await_answers()
        start = time.monotonic()
        cluster("delete", "pod", cluster.workers()[0], f"--grace-period={SHORT_S}")
        gone = time.time()
        figures = at_full_strength(cluster, sent, start)
    says(f"{sent}; {figures}")
    assert not [each for each in sent.chats if each["wrong"] and each["start"] > gone]


def test_requests_do_not_need_the_operator(cluster, says):
    with load(cluster) as sent:
        before = cluster.active()
        start = time.monotonic()
        cluster("delete", "pod", *OPERATOR)
        cluster("wait", "--for=condition=Ready", "pod", *OPERATOR, f"--timeout={START_S}s")
        took = time.monotonic() - start
        sent.await_answers()
    says(f"{sent}; ready again after {took:.0f} s")
    assert not sent.lost
    assert cluster.active() == before


@pytest.mark.skipif(not API, reason="MARSRAY_API names no command that stops the API server")
def test_requests_do_not_need_the_api_server(cluster, says):
    with load(cluster) as sent:
        sent.await_answers()
        before = cluster.active(), set(cluster.workers())
        subprocess.run([*API, "down"], check=True)
        try:
            time.sleep(AWAY_S)
        finally:
            subprocess.run([*API, "up"], check=True)
        figures = at_full_strength(cluster, sent, time.monotonic())
    says(f"{sent}; {figures} of its return")
    assert not sent.lost
    assert before == (cluster.active(), set(cluster.workers()))


@pytest.mark.skipif(not CUT, reason="MARSRAY_CUT names no command that cuts a node off")
def test_a_lost_node_loses_its_streams(cluster, says):
    found = own_node_of_a_worker(cluster)
    if not found:
        pytest.skip("no worker has a node of its own")
    worker, node = found
    with load(cluster) as sent:
        subprocess.run([*CUT, node, "down"], check=True)
        try:
            noticed = wait_until(lambda: worker not in cluster.workers(), "the loss is noticed")
            sent.await_answers()
        finally:
            subprocess.run([*CUT, node, "up"], check=True)
        figures = at_full_strength(cluster, sent, time.monotonic())
    says(f"{sent}; noticed after {noticed:.0f} s, {figures} of the node's return")


def test_keys_are_read_without_a_restart(cluster, says):
    def write(*added):
        content = yaml.safe_dump({"keys": [*kept, *added]})
        patch = yaml.safe_dump({"stringData": {"keys.yaml": content}})
        cluster("patch", "secret", "marsray-keys", "--patch", patch)

    def status() -> str:
        header = f"Authorization: Bearer {new['key']}"
        ask = ("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}")
        models = f"http://{address}:8000/v1/models"
        return cluster("exec", "load", "--", *ask, "--header", header, models, check=False)

    address = cluster.get("service", "marsray-serve-svc")["spec"]["clusterIP"]
    keys = yaml.safe_load(cluster.secret("marsray-keys", "keys.yaml"))["keys"]
    kept = [each for each in keys if each["name"] != "new"]  # a run that failed left it
    new = make_key("new")
    with load(cluster) as sent:
        sent.await_answers()
        write(new["entry"])
        accepted = wait_until(lambda: status() == "200", "the new key is accepted", KEYS_S)
        write()
        refused = wait_until(lambda: status() == "401", "the removed key is refused", KEYS_S)
    says(f"{sent}; accepted after {accepted:.0f} s, refused {refused:.0f} s after its removal")
    assert not sent.lost


def test_a_version_whose_image_is_missing_is_rolled_back_without_loss(cluster, says):
    def waits_for_its_image() -> bool:
        pods = cluster.get("pods", "--selector", "ray.io/node-type=head")["items"]
        states = [
            each["state"].get("waiting", {}).get("reason")
            for pod in pods
            for kind in ("initContainerStatuses", "containerStatuses")
            for each in pod["status"].get(kind, [])
        ]
        return bool({"ErrImagePull", "ImagePullBackOff"} & set(states))

    with load(cluster) as sent:
        sent.await_answers()
        before, last = cluster.active(), cluster.rollout()
        cluster.apply(SERVICE, *two("missing"), tag="missing")
        wait_until(waits_for_its_image, "the image is missing")
        sent.await_answers()
        assert cluster.active() == before
        cluster.apply(SERVICE, *two(last))
        took = wait_until(lambda: cluster.active() != before, "the rollback")
        sent.await_answers()
    says(f"{sent}; rolled back after {took:.0f} s")
    assert not sent.lost


def test_a_killed_head_costs_a_restart(cluster, says):
    def runs() -> set[tuple[str, int]]:
        """Return the ready workers with the number of times that each was started again."""
        found = ((each["metadata"], each["status"]) for each in cluster.ready("worker"))
        return {(pod["name"], at["containerStatuses"][0]["restartCount"]) for pod, at in found}

    with load(cluster) as sent:
        sent.await_answers()
        before, start = runs(), time.monotonic()
        took = kill_the_head(cluster, sent)
        # Workers that have lost their head serve for another minute before they end.
        wait_until(lambda: len(runs() - before) == 2, "two workers of the new head")
        figures = at_full_strength(cluster, sent, start)
    says(f"{sent}; new head after {took:.0f} s, {figures}")


@pytest.fixture
def small_disk(cluster) -> Iterator[Callable[[str], str]]:
    """Runs commands in the files pod, which shares a models' disk that is small enough to fill."""
    cluster.apply("k8s/files")
    cluster("wait", "--for=condition=Ready", "pod/marsray-files", "--timeout=5m")

    def inside(line: str) -> str:
        return cluster("exec", "marsray-files", "--", "sh", "-c", line)

    try:
        if int(inside("df --output=avail /models | tail -1")) > SMALL_DISK_KIB:
            pytest.skip("the models' disk has more than 1 GiB of room")
        yield inside
        inside("rm -f /models/full")
    finally:
        cluster("delete", "rayjob", "calibrate", "--ignore-not-found")
        cluster("delete", "pod", "marsray-files", "--grace-period=0", "--force")


@pytest.mark.timeout(1200)  # waits for a job that fails, and for its next attempt
def test_a_full_disk_fails_a_job_and_no_request(cluster, says, small_disk):
    def job() -> dict[str, Any]:
        return cluster.get("rayjob", "calibrate").get("status", {})

    def output() -> str:
        return cluster("logs", "job/calibrate", "--tail=-1", check=False)

    demo = "marsray data demo --task short --examples 8 --eval-examples 24 --out demo"
    small_disk(f"cd /data && rm -rf demo && {demo} && mv demo/eval.jsonl held-out.jsonl")
    model = "cd /models/current/ && pwd -P && cat *.json | sha256sum"
    before = small_disk(model)
    with load(cluster) as sent:
        sent.await_answers()
        small_disk("cat /dev/zero > /models/full || true")
        cluster.apply("k8s/jobs/calibrate")
        failed = wait_until(lambda: "No space left" in output(), "the job's failure", 500)
        (message,) = [line for line in output().splitlines() if "No space left" in line][-1:]
        assert small_disk(model) == before
        small_disk("rm /models/full")
        ended = ("Complete", "Failed")
        took = wait_until(lambda: job().get("jobDeploymentStatus") in ended, "the job", 500)
        assert job()["jobStatus"] == "SUCCEEDED"
        sent.await_answers()
    says(f"{sent}; failed after {failed:.0f} s, succeeded {took:.0f} s after room was made")
    says(message)
    assert not sent.lost


@pytest.mark.parametrize("name", GPU_JOBS)
def test_without_gpus_a_job_waits_and_says_why(cluster, says, name):
    def reasons() -> list[str]:
        """Return why pods that are there wait; events of earlier ones may still be there, too."""
        pods = {each["metadata"]["name"] for each in cluster.get("pods")["items"]}
        events = cluster.get("events", "--field-selector", "reason=FailedScheduling")["items"]
        found = [(each["involvedObject"]["name"], each.get("message", "")) for each in events]
        return [why for pod, why in found if pod in pods and pod.startswith(f"{name}-")]

    cluster.apply(GPU_JOBS[name])
    try:
        wait_until(lambda: any("affinity/selector" in each for each in reasons()), "the event")
        says(reasons()[-1].partition(". preemption")[0])
    finally:
        cluster("delete", "rayjob", name)
