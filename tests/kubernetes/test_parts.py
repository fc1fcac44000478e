"""Runs the parts of `k8s/` that serving a model from nothing does not need.

No step needs the others: `make test-kubernetes TEST_ARGS="-k parts"` runs these alone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from on_cluster import (
    SERVICE,
    START_S,
    Cluster,
    forwarded,
    json_patch,
    load,
    make_key,
    wait_until,
)
from test_from_nothing import RECIPE

CUT = shlex.split(os.environ.get("MARSRAY_CUT", ""))
ANSWERS = 3
UNSEEN = {
    f"ray_marsray_{each}_total"
    for each in ("audited_diverged", "audited_tokens", "batch_lines", "moves", "rejections")
}
"""Counters that have no series before the first of their events."""
STARTED = int(time.time())
"""Makes names of runs and models that are new."""
NOTICED_S = 45
"""Seconds within which a head notices that a node is lost."""
JOB_WORKERS = "app.kubernetes.io/component=job,ray.io/node-type=worker"
GPU_PODS = {
    "k8s/jobs/gpu/evaluate": "rayjob/evaluate",
    "k8s/overlays/gpu-submit": "raycluster/submit",
    "k8s/overlays/gpu": "rayservice/marsray",
    "k8s/overlays/ha": "rayservice/marsray",
}
"""Manifests with their object, whose pods need GPUs that the nodes do not have."""
CRDS = ("gateways.gateway.networking.k8s.io", "podmonitors.monitoring.coreos.com")
"""Kinds of objects that the last two have."""


def name_candidate(cluster, name: str) -> None:
    patch = json.dumps({"data": {"CANDIDATE": name}})
    cluster("patch", "configmap", "marsray-candidate", "--patch", patch)


@contextmanager
def files(cluster, component: str | None = None):
    """Run commands in the pod that has the disks."""
    cluster.apply("k8s/files", component=component)
    try:
        cluster("wait", "--for=condition=Ready", "pod/marsray-files", f"--timeout={START_S}s")
        yield lambda *command, **options: cluster(
            "exec", "marsray-files", "--", *command, **options
        )
    finally:
        cluster("delete", "pod", "marsray-files", "--grace-period=0", "--force")


def recipe(steps: int, **changes: object) -> str:
    """Return the recipe of `cpu-dev-train` with one stage of some steps."""
    content = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    content["stages"] = [{**content["stages"][0], "max_steps": steps}]
    return yaml.safe_dump({**content, **changes})


def test_evaluate(cluster, says):
    output = cluster.run_job("evaluate", "k8s/jobs/evaluate")
    (score,) = (line for line in output.splitlines() if line.startswith("ar 1:"))
    says(score)


def test_submit(cluster, tmp_path, says):
    (tmp_path / "recipe.yaml").write_text(recipe(6))
    output = f"output=/models/candidates/submitted-{STARTED}"
    cluster.apply("k8s/overlays/submit")
    try:
        provisioned = "--for=condition=RayClusterProvisioned"
        cluster("wait", provisioned, "raycluster/submit", f"--timeout={START_S}s")
        token = cluster.secret("submit", "auth_token")
        with forwarded(cluster, "svc/submit-head-svc", 8265) as address:
            command = ["submit", "recipe.yaml", "--address", address, "--set", output, "--follow"]
            done = subprocess.run(
                [sys.executable, "-m", "mars_platform", *command],
                cwd=tmp_path,
                env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=START_S,
                check=False,
            )
    finally:
        cluster("delete", "raycluster", "submit")
    assert done.returncode == 0, done.stdout
    says([line for line in done.stdout.splitlines() if "checkpoint in" in line][-1])


def reached(run: Callable[..., str], host: str, port: int) -> bool:
    """Return whether a pod that runs commands can open a connection."""
    line = f"import socket\ntry: print(bool(socket.create_connection(({host!r}, {port}), 5)))"
    said = run("python", "-c", f"{line}\nexcept OSError: print(False)")
    assert ("True" in said) != ("False" in said), said
    return "True" in said


@pytest.fixture(scope="module")
def store(cluster) -> Iterator[Callable[[str], dict[str, object]]]:
    """Runs an object store, and returns the patch that opens a policy to it alone."""
    if "MARSRAY_S3_IMAGE" not in os.environ:
        pytest.skip("MARSRAY_S3_IMAGE names no store")

    def only_the_store(policy: str) -> dict[str, object]:
        value = [{"ipBlock": {"cidr": f"{address}/32"}}]
        operation = {"op": "replace", "path": "/spec/egress/0/to", "value": value}
        return json_patch("NetworkPolicy", operation, name=policy)

    cluster.apply("tests/kubernetes/store")
    cluster("wait", "--for=condition=Ready", "pod/store", f"--timeout={START_S}s")
    address = cluster.get("pod", "store")["status"]["podIP"]
    ask_store(cluster, "", method="PUT")
    values = (
        "AWS_ACCESS_KEY_ID=id",
        "AWS_SECRET_ACCESS_KEY=key",
        "AWS_ENDPOINT_URL=http://store:443",
    )
    literals = [f"--from-literal={each}" for each in values]
    secrets = ("marsray-job-object-store", "marsray-object-store")
    try:
        for name in secrets:
            cluster("create", "secret", "generic", name, *literals)
        yield only_the_store
    finally:
        cluster("delete", "secret", *secrets, "--ignore-not-found")
        # A test of a later run finds the network closed again.
        cluster("delete", "networkpolicy", "marsray-job-object-store", "--ignore-not-found")


def ask_store(cluster, query: str, method: str = "GET") -> str:
    request = f"Request('http://localhost:443/bucket{query}', method='{method}')"
    line = f"from urllib.request import *; print(urlopen({request}).read().decode())"
    return str(cluster("exec", "store", "--", "python3", "-c", line))


def test_a_model_from_an_object_store_is_served(cluster, says, store):
    url = f"s3://bucket/models/first-{STARTED}"
    cluster("create", "configmap", "marsray-weights", f"--from-literal=WEIGHTS_URL={url}")
    try:
        with files(cluster, "k8s/components/object-store-jobs") as run:
            assert not reached(run, "store", 443)
            cluster.apply("k8s/setup/object-store", store("marsray-job-object-store"))
            wait_until(lambda: reached(run, "store", 443), "the store")
            weights = ("python", "/etc/marsray/scripts/weights.py")
            run(*weights, "store", "/models/current", url)
        cluster("delete", "rayservice", "marsray", "--ignore-not-found")
        cluster("wait", "--for=delete", "service/marsray-serve-svc", f"--timeout={START_S}s")
        cluster.apply("tests/kubernetes/load")
        cluster("wait", "--for=condition=Ready", "pod/load", f"--timeout={START_S}s")
        served = store("marsray-object-store")
        cluster.apply(SERVICE, served, component="k8s/components/object-store")
        with load(cluster, users=1, tokens=8) as sent:
            wait_until(lambda: len(sent.ends()) > ANSWERS, "answers")
        says(cluster("logs", cluster.workers()[0], "--container=weights").strip())
    finally:
        cluster("delete", "configmap", "marsray-weights")


def test_training_resumes_from_an_object_store(cluster, says, store):
    def lose_the_worker() -> None:
        wait_until(lambda: "/step-" in ask_store(cluster, f"?prefix={runs}"), "a checkpoint")
        (worker,) = cluster.get("pods", "--selector", JOB_WORKERS)["items"]
        cluster("delete", "pod", worker["metadata"]["name"], "--grace-period=0", "--force")

    runs = f"runs-{STARTED}"
    text = recipe(60, checkpoints={"every_steps": 10, "storage": f"s3://bucket/{runs}"})
    settings = {"op": "replace", "path": "/data/recipe.yaml", "value": text}
    before = cluster.get("configmap", "marsray-candidate")["data"]["CANDIDATE"]
    cluster.apply("k8s/setup/object-store", store("marsray-job-object-store"))
    name_candidate(cluster, f"stored-{STARTED}")
    jobs = "k8s/components/object-store-jobs"
    train = ("train", "k8s/overlays/cpu-dev-train", json_patch("ConfigMap", settings))
    try:
        output = cluster.run_job(*train, meanwhile=lose_the_worker, component=jobs)
    finally:
        name_candidate(cluster, before)
    found = re.search(rf"resumed from s3://bucket/{runs}/\S+", output)
    assert found, output
    says(found[0])


@pytest.mark.skipif(not CUT, reason="MARSRAY_CUT names no command that cuts a node off")
@pytest.mark.timeout(1200)  # trains twice
def test_training_on_two_nodes_survives_the_loss_of_one(cluster, says):
    if len(cluster.get("nodes")["items"]) < 3:
        pytest.skip("there are fewer than three nodes")

    def lose_a_node() -> None:
        checkpoints = f"/models/candidates/disturbed-{STARTED}/checkpoints/ar"
        wait_until(lambda: "step-" in run("ls", checkpoints, check=False), "a checkpoint")
        workers = cluster.get("pods", "--selector", JOB_WORKERS)["items"]
        nodes = {each["spec"]["nodeName"] for each in workers}
        assert len(nodes) == 2
        says(f"cut after {run('ls', checkpoints).split()[-1]}")
        subprocess.run([*CUT, max(nodes), "down"], check=True)
        try:
            time.sleep(NOTICED_S)
        finally:
            subprocess.run([*CUT, max(nodes), "up"], check=True)

    text = recipe(60, checkpoints={"every_steps": 10})
    settings = {"op": "replace", "path": "/data/recipe.yaml", "value": text}
    before = cluster.get("configmap", "marsray-candidate")["data"]["CANDIDATE"]
    sums = []
    with files(cluster) as run:
        try:
            for name, meanwhile in (("undisturbed", bool), ("disturbed", lose_a_node)):
                start = time.monotonic()
                name_candidate(cluster, f"{name}-{STARTED}")
                train = ("train", "tests/kubernetes/two-nodes", json_patch("ConfigMap", settings))
                output = cluster.run_job(*train, meanwhile=meanwhile)
                assert ("resumed from" in output) == (name == "disturbed"), output
                says(f"{name} {time.monotonic() - start:.0f} s")
                weights = f"/models/candidates/{name}-{STARTED}/model/model.safetensors"
                sums.append(run("sha256sum", weights).split()[0])
        finally:
            name_candidate(cluster, before)
    assert sums[0] == sums[1]


def targets(cluster, monitor: dict[str, Any], endpoint: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the addresses of the pods that a monitor reads, with the labels that it gives them."""
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    selector = ",".join(f"{name}={value}" for name, value in wanted)
    for pod in cluster.get("pods", "--selector", selector)["items"]:
        labels = {re.sub(r"\W", "_", at): to for at, to in pod["metadata"]["labels"].items()}
        given = {
            each["targetLabel"]: labels[each["sourceLabels"][0].partition("_pod_label_")[2]]
            for each in endpoint.get("relabelings", [])
        }
        ports = [port for each in pod["spec"]["containers"] for port in each.get("ports", [])]
        (port,) = [each["containerPort"] for each in ports if each["name"] == endpoint["port"]]
        yield {"targets": [f"{pod['status']['podIP']}:{port}"], "labels": given}


def scrape(cluster, key: str) -> Iterator[dict[str, Any]]:
    """Yield what Prometheus' operator makes of the monitors, as far as ours use it."""
    for monitor in cluster.get("podmonitors")["items"]:
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            yield {
                "job_name": monitor["metadata"]["name"],
                "scrape_interval": endpoint["interval"],
                "metrics_path": endpoint.get("path", "/metrics"),
                "static_configs": list(targets(cluster, monitor, endpoint)),
                **({"authorization": {"credentials": key}} if "authorization" in endpoint else {}),
            }


@contextmanager
def prometheus(cluster, folder: Path) -> Iterator[Callable[[str], Any]]:
    """Run Prometheus with the files of a folder, and yield a function that asks its API."""
    other = Cluster(cluster.folder, "monitoring")
    other.apply("tests/kubernetes/prometheus")
    try:
        other("create", "secret", "generic", "prometheus", f"--from-file={folder}")
        other("wait", "--for=condition=Ready", "pod/prometheus", f"--timeout={START_S}s")
        with forwarded(other, "pod/prometheus", 9090) as address:
            yield lambda path: httpx.get(f"{address}/api/v1/{path}", timeout=30).json()["data"]
    finally:
        other("delete", "pod/prometheus", "secret/prometheus", "--ignore-not-found")


@pytest.mark.skipif(
    "MARSRAY_PROMETHEUS_IMAGE" not in os.environ, reason="MARSRAY_PROMETHEUS_IMAGE is not set"
)
def test_prometheus_reads_what_rules_and_dashboard_ask_for(cluster, tmp_path, says):
    def states() -> list[str]:
        return [each["health"] for each in ask("targets?state=active")["activeTargets"]]

    def rules() -> list[str]:
        return [rule["health"] for group in ask("rules")["groups"] for rule in group["rules"]]

    def missing() -> set[str]:
        return asked - set(ask("label/__name__/values")) - UNSEEN

    def outside(*command: str) -> str:
        options = (f"--image={cluster.image}:{cluster.tag}", "--restart=Never", "--rm", "--stdin")
        run = Cluster(cluster.folder, "default")
        return run("run", "outside", *options, "--command", "--", *command)

    made = make_key("prometheus")
    keys = yaml.safe_load(cluster.secret("marsray-keys", "keys.yaml"))["keys"]
    others = [each for each in keys if each["name"] != "prometheus"]
    content = yaml.safe_dump({"keys": [*others, made["entry"]]})
    patch = yaml.safe_dump({"stringData": {"keys.yaml": content}})
    cluster("patch", "secret", "marsray-keys", "--patch", patch)
    cluster.apply(component="k8s/components/monitoring")
    (rule,) = cluster.get("prometheusrules")["items"]
    dashboard = cluster.get("configmap", "marsray-dashboard")["data"]["dashboard.json"]
    asked = set(re.findall(r"\bray_marsray_\w+", json.dumps(rule) + dashboard))
    jobs = list(scrape(cluster, made["key"]))
    assert all(each["static_configs"] for each in jobs)
    count = sum(len(each["static_configs"]) for each in jobs)
    config = {"scrape_configs": jobs, "rule_files": ["/etc/prometheus/rules.yaml"]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    with load(cluster, users=1, tokens=8), prometheus(cluster, tmp_path) as ask:
        wait_until(lambda: states() == ["up"] * count, "all targets")
        wait_until(lambda: not missing(), "all metrics")
        wait_until(lambda: "unknown" not in rules(), "all rules")
        says(f"{len(states())} targets, {len(asked)} metrics, {len(rules())} rules")
        assert set(rules()) == {"ok"}
    (head,) = cluster.ready("head")
    assert not any(reached(outside, head["status"]["podIP"], port) for port in (8000, 8080))


@pytest.mark.parametrize("manifests", GPU_PODS)
def test_without_gpus_pods_wait_and_say_why(cluster, says, manifests):
    def reasons() -> list[str]:
        """Return why pods that are there fit no node, for want of one with a GPU."""
        pods = {each["metadata"]["name"] for each in cluster.get("pods")["items"]} - before
        events = cluster.get("events", "--field-selector", "reason=FailedScheduling")["items"]
        found = [x["message"] for x in events if x["involvedObject"]["name"] in pods]
        return [each for each in found if "affinity/selector" in each]

    is_service = GPU_PODS[manifests] == "rayservice/marsray"
    if is_service and not all(each in cluster("get", "crd", "--output", "name") for each in CRDS):
        pytest.skip("the cluster lacks the Gateway API or Prometheus' operator")
    before = {each["metadata"]["name"] for each in cluster.get("pods")["items"]}
    cluster.apply(manifests)
    try:
        wait_until(reasons, "the event")
        says(reasons()[-1].partition(". ")[0])
    finally:
        cluster("delete", GPU_PODS[manifests])
        # Clusters with Redis would wait for one that has never run.
        for each in cluster("get", "rayclusters", "--output", "name").split():
            cluster("patch", each, "--type=merge", '--patch={"metadata":{"finalizers":null}}')


def test_a_cluster_of_one_node_needs_no_shared_disk(cluster, says):
    classes = cluster("get", "storageclass", "--output", "name")
    volumes = [each["status"]["phase"] for each in cluster.get("persistentvolumes")["items"]]
    if not classes and volumes.count("Available") < 2:
        pytest.skip("no disk is free")
    single = Cluster(cluster.folder, f"{cluster.namespace}-single")
    single.apply("k8s/setup/single-node")
    try:
        single.apply("k8s/files")
        single("wait", "--for=condition=Ready", "pod/marsray-files", f"--timeout={START_S}s")
        claims = single.get("persistentvolumeclaims")["items"]
    finally:
        single("delete", "namespace", single.namespace)
    found = [(each["spec"]["accessModes"], each["status"]["phase"]) for each in claims]
    assert found == [(["ReadWriteOnce"], "Bound")] * 2
    says("two claims bound")
