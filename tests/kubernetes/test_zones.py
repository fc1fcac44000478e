"""Measures what overlay `ha` loses, with three replicas, which may be in three zones, and Redis.

It replaces the service that the other steps leave running, so it comes last.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import time

import pytest
import yaml

from on_cluster import (
    ROOT,
    START_S,
    json_patch,
    kill_the_head,
    load,
    own_node_of_a_worker,
    wait_until,
)

CUT = shlex.split(os.environ.get("MARSRAY_CUT", ""))
ZONE = "topology.kubernetes.io/zone"
THREE = 3


def without_gpus() -> dict[str, object]:
    """Return the patch that gives each replica a CPU instead of a GPU, and stays at three."""
    generated = (ROOT / "k8s/overlays/ha/serve-config.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(yaml.safe_load(generated)["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    (model,) = application["args"]["models"]
    del model["dtype"]
    model.update(name="demo", num_cpus=1, num_gpus=0, num_threads=1)
    model["autoscaling"]["max_replicas"] = THREE
    application["deployments"].append({"name": "model-0-demo", "max_replicas_per_node": 1})
    path = "/spec/serveConfigV2"
    return json_patch(
        "RayService", {"op": "replace", "path": path, "value": yaml.safe_dump(config)}
    )


@pytest.fixture(autouse=True, scope="module")
def _three_replicas(cluster):
    cluster("delete", "rayservice", "marsray", "--ignore-not-found")
    # A cluster cleans up in Redis, so that one which another step has left goes last.
    cluster("wait", "--for=delete", "raycluster", "--all", "--timeout=120s", check=False)
    cluster("delete", "statefulset,secret", "marsray-redis", "--ignore-not-found")
    password = f"--from-literal=password={secrets.token_hex(24)}"
    cluster("create", "secret", "generic", "marsray-redis", password)
    cluster.apply("tests/kubernetes/load")
    cluster.apply("tests/kubernetes/ha", without_gpus())
    cluster("wait", "--for=condition=Ready", "pod/load")
    cluster("wait", "--for=condition=Ready", "rayservice/marsray", f"--timeout={START_S}s")
    wait_until(lambda: len(cluster.workers()) == THREE, "three workers")


def test_replicas_are_in_three_zones(cluster, says):
    nodes = cluster.get("nodes")["items"]
    zones = {node["metadata"]["name"]: node["metadata"]["labels"].get(ZONE) for node in nodes}
    if len({*zones.values()} - {None}) < THREE:
        pytest.skip("the nodes are in fewer than three zones")
    found = {zones[pod["spec"]["nodeName"]] for pod in cluster.ready("worker")}
    says(", ".join(sorted(found)))
    assert len(found) == THREE


def test_a_killed_head_loses_nothing(cluster, says):
    with load(cluster) as sent:
        sent.await_answers()
        before = set(cluster.workers())
        took = kill_the_head(cluster, sent)
    says(f"{sent}; new head after {took:.0f} s")
    assert not sent.lost
    assert before <= set(cluster.workers())


def test_a_lost_redis_ends_the_head_and_loses_nothing(cluster, says):
    with load(cluster) as sent:
        sent.await_answers()
        heads, workers = set(cluster.heads()), set(cluster.workers())
        cluster("exec", "marsray-redis-0", "--", "sh", "-c", "kill 1")
        took = wait_until(lambda: set(cluster.heads()) - heads, "another head")
        sent.await_answers()
    says(f"{sent}; another head after {took:.0f} s")
    assert not sent.lost
    assert workers <= set(cluster.workers())


@pytest.mark.skipif(not CUT, reason="MARSRAY_CUT names no command that cuts a node off")
def test_a_lost_zone_leaves_two_replicas(cluster, says):
    found = own_node_of_a_worker(cluster)
    if not found:
        pytest.skip("no worker has a node of its own")
    worker, node = found
    with load(cluster) as sent:
        sent.await_answers()
        subprocess.run([*CUT, node, "down"], check=True)
        try:
            noticed = wait_until(lambda: worker not in cluster.workers(), "the loss is noticed")
            sent.await_answers()
            left = len(cluster.workers())
        finally:
            subprocess.run([*CUT, node, "up"], check=True)
        start = time.monotonic()
        wait_until(lambda: len(cluster.workers()) == THREE, "three workers")
        took = time.monotonic() - start
    says(f"{sent}; noticed after {noticed:.0f} s, three replicas {took:.0f} s after its return")
    assert left == THREE - 1
