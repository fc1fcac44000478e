"""From nothing to a served model, and what losses cost it. Each step needs those before it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections import Counter

import httpx
import yaml

from on_cluster import ROOT, json_patch, load, wait_until

CANDIDATE = f"run-{int(time.time())}"
RECIPE = ROOT / "k8s" / "overlays" / "cpu-dev-train" / "recipe.yaml"
STEPS = {"ar": 80, "mars": 20}
SERVICE = "k8s/overlays/cpu-dev"
ROLLOUT = (
    "/spec/rayClusterConfig/workerGroupSpecs/0/template/metadata/annotations/marsray.dev~1rollout"
)
START_S = 600
ANSWERS = 10
"""Answers in a row that show that the service is there."""


def test_setup(cluster, tmp_path, says):
    cluster("delete", "namespace", cluster.namespace, "--ignore-not-found")
    nodes = len(cluster.get("nodes")["items"])
    cluster.apply("k8s/setup/single-node" if nodes == 1 else "k8s/setup/common")
    command = [sys.executable, "-m", "mars_platform", "key", "load", "--json"]
    made = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": [made["entry"]]}))
    files = f"--from-file={tmp_path / 'keys.yaml'}"
    cluster("create", "secret", "generic", "marsray-keys", files)
    cluster("create", "secret", "generic", "load", f"--from-literal=key={made['key']}")
    candidate = f"--from-literal=CANDIDATE={CANDIDATE}"
    cluster("create", "configmap", "marsray-candidate", candidate)
    says(f"{nodes} nodes")


def test_files(cluster):
    cluster.apply("k8s/files")
    cluster("wait", "--for=condition=Ready", "pod/marsray-files", "--timeout=20m")
    demo = "marsray data demo --task short --examples 4000 --eval-examples 24 --out demo"
    line = f"cd /data && rm -rf demo && {demo} && mv demo/train.jsonl . && mv demo/eval.jsonl"
    cluster("exec", "marsray-files", "--", "sh", "-c", f"{line} held-out.jsonl")
    cluster("delete", "pod", "marsray-files", "--wait=false")


def test_train(cluster, says):
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    for stage in recipe["stages"]:
        stage["max_steps"] = STEPS[stage["objective"]]
    text = {"op": "replace", "path": "/data/recipe.yaml", "value": yaml.safe_dump(recipe)}
    cluster.run_job("train", "k8s/overlays/cpu-dev-train", json_patch("ConfigMap", text))
    says(f"{sum(STEPS.values())} steps")


def test_calibrate(cluster):
    cluster.run_job("calibrate", "k8s/jobs/calibrate")


def test_promote(cluster):
    cluster.run_job("promote", "k8s/jobs/promote")


def test_service_starts(cluster, says):
    cluster.apply("tests/kubernetes/load")
    cluster("wait", "--for=condition=Ready", "pod/load", "--timeout=20m")
    cluster.apply(SERVICE)
    with load(cluster, users=1, tokens=8) as sent:
        took = wait_until(sent.ends, START_S, "the first answer")
    says(f"first answer {took:.0f} s after apply")


def test_a_chat_streams_through_a_port_forward(cluster, says):
    command = [*cluster.command, "port-forward", "svc/marsray-serve-svc", ":8000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
        try:
            address = "http://" + forward.stdout.readline().split()[2]
            body = {"model": "demo", "messages": [{"role": "user", "content": "Count 3 pens"}]}
            options = {"json": {**body, "max_tokens": 20, "stream": True}, "timeout": 60}
            secret = cluster.get("secret", "load")["data"]["key"]
            headers = {"Authorization": f"Bearer {base64.b64decode(secret).decode()}"}
            url = f"{address}/v1/chat/completions"
            assert httpx.post(url, **options).status_code == httpx.codes.UNAUTHORIZED
            with httpx.stream("POST", url, headers=headers, **options) as answer:
                lines = [each for each in answer.iter_lines() if each]
        finally:
            forward.kill()
    assert lines[-1] == "data: [DONE]"
    says(f"{len(lines)} events")


def test_the_governor_adds_a_replica_in_a_burst(cluster, says):
    with load(cluster, users=12, tokens=80) as sent:
        took = wait_until(lambda: len(cluster.pods()) == 2, START_S, "a second worker")
    says(f"second worker ready after {took:.0f} s; {sent}")
    assert not sent.lost


def test_a_drained_worker_loses_nothing(cluster, says):
    with load(cluster, users=12, tokens=80) as sent:
        wait_until(lambda: len(cluster.pods()) == 2, START_S, "a second worker")
        wait_until(lambda: len(sent.ends()) > ANSWERS, START_S, "answers")
        start = time.monotonic()
        cluster("delete", "pod", cluster.pods()[0])
        ended = time.monotonic() - start
        wait_until(lambda: len(cluster.pods()) == 2, START_S, "a new worker")
    took = time.monotonic() - start
    says(f"ended after {ended:.0f} s; full strength after {took:.0f} s; {sent}")
    assert not sent.lost


def test_a_killed_worker_is_replaced(cluster, says):
    with load(cluster, users=4) as sent:
        wait_until(lambda: len(sent.ends()) > ANSWERS, START_S, "answers")
        before = cluster.pods()
        killed, start = time.time(), time.monotonic()
        cluster("delete", "pod", before[0], "--grace-period=0", "--force")
        wait_until(lambda: len(cluster.pods()) >= len(before), START_S, "a new worker")
        took = time.monotonic() - start
        wait_until(lambda: len(sent.ends(killed)) > ANSWERS, START_S, "answers")
    says(f"full strength after {took:.0f} s; {sent}")


def test_a_killed_head_costs_a_restart(cluster, says):
    with load(cluster, users=4) as sent:
        wait_until(lambda: len(sent.ends()) > ANSWERS, START_S, "answers")
        (head,), workers = cluster.pods("head"), cluster.pods()
        start = time.monotonic()
        cluster("delete", "pod", head, "--grace-period=0", "--force")
        new = lambda: set(cluster.pods()) - set(workers) and cluster.pods("head")  # noqa: E731
        wait_until(new, START_S, "a new head and worker")
        took, back = time.monotonic() - start, time.time()
        wait_until(lambda: len(sent.ends(back)) > ANSWERS, START_S, "answers")
    says(f"new cluster after {took:.0f} s; {sent}")


def test_an_upgrade_loses_nothing(cluster, says):
    with load(cluster, users=4) as sent:
        wait_until(lambda: len(sent.ends()) > ANSWERS, START_S, "answers")
        name = ("rayservice", "marsray")
        before = cluster.get(*name)["status"]["activeServiceStatus"]["rayClusterName"]
        cluster.apply(
            SERVICE, json_patch("RayService", {"op": "replace", "path": ROLLOUT, "value": "2"})
        )

        def active():
            return cluster.get(*name)["status"]["activeServiceStatus"]["rayClusterName"]

        took = wait_until(lambda: active() != before, START_S, "the new cluster")
        switched = time.time()
        wait_until(lambda: len(sent.ends(switched)) > ANSWERS, START_S, "answers")
    says(f"switched after {took:.0f} s; {sent}")
    assert not sent.lost


def test_events_are_clean(cluster, says):
    events = cluster.get("events", "--field-selector", "type=Warning")["items"]
    found = Counter()
    for each in events:
        found[each["reason"]] += each.get("count") or 1
    says(", ".join(f"{count} x {reason}" for reason, count in found.most_common()) or "none")
    assert "FailedPreStopHook" not in found
