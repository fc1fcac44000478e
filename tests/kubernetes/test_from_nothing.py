"""From nothing to a served model, and its upgrade. Each step needs those before it."""

from __future__ import annotations

import time
from collections import Counter

import httpx
import yaml

from on_cluster import (
    ROOT,
    SERVICE,
    forwarded,
    json_patch,
    load,
    make_key,
    rollout,
    wait_until,
)

CANDIDATE = f"run-{int(time.time())}"
RECIPE = ROOT / "k8s" / "overlays" / "cpu-dev-train" / "recipe.yaml"
STEPS = {"ar": 80, "mars": 20}


def test_setup(cluster, tmp_path, says):
    cluster("delete", "namespace", cluster.namespace, "--ignore-not-found")
    nodes = len(cluster.get("nodes")["items"])
    cluster.apply("k8s/setup/single-node" if nodes == 1 else "k8s/setup/common")
    made = make_key("load")
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": [made["entry"]]}))
    files = f"--from-file={tmp_path / 'keys.yaml'}"
    cluster("create", "secret", "generic", "marsray-keys", files)
    cluster("create", "secret", "generic", "load", f"--from-literal=key={made['key']}")
    candidate = f"--from-literal=CANDIDATE={CANDIDATE}"
    cluster("create", "configmap", "marsray-candidate", candidate)
    says(f"{nodes} nodes")


def test_files(cluster):
    cluster.apply("k8s/files")
    cluster("wait", "--for=condition=Ready", "pod/marsray-files", "--timeout=5m")
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
    cluster("wait", "--for=condition=Ready", "pod/load", "--timeout=5m")
    cluster.apply(SERVICE)
    with load(cluster, users=1, tokens=8) as sent:
        took = wait_until(sent.ends, "the first answer")
    says(f"first answer {took:.0f} s after apply")


def test_a_chat_streams_through_a_port_forward(cluster, says):
    with forwarded(cluster, "svc/marsray-serve-svc", 8000) as address:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Count 3 pens"}]}
        options = {"json": {**body, "max_tokens": 20, "stream": True}, "timeout": 60}
        headers = {"Authorization": f"Bearer {cluster.secret('load', 'key')}"}
        url = f"{address}/v1/chat/completions"
        assert httpx.post(url, **options).status_code == httpx.codes.UNAUTHORIZED
        with httpx.stream("POST", url, headers=headers, **options) as answer:
            lines = [each for each in answer.iter_lines() if each]
    assert lines[-1] == "data: [DONE]"
    says(f"{len(lines)} events")


def test_the_governor_adds_a_replica_in_a_burst(cluster, says):
    with load(cluster, users=12, tokens=80) as sent:
        took = wait_until(lambda: len(cluster.workers()) == 2, "a second worker")
    says(f"second worker ready after {took:.0f} s; {sent}")
    assert not sent.lost


def test_the_governor_removes_the_replica_again(cluster, says):
    with load(cluster, users=1) as sent:
        took = wait_until(lambda: len(cluster.workers()) == 1, "one worker")
        sent.await_answers()
    says(f"one worker after {took:.0f} s; {sent}")
    assert not sent.lost


def test_an_upgrade_loses_nothing(cluster, says):
    with load(cluster, users=4) as sent:
        sent.await_answers()
        before = cluster.active()
        cluster.apply(SERVICE, rollout("2"))
        took = wait_until(lambda: cluster.active() != before, "the new cluster")
        sent.await_answers()
    says(f"switched after {took:.0f} s; {sent}")
    assert not sent.lost


def test_events_are_clean(cluster, says):
    events = cluster.get("events", "--field-selector", "type=Warning")["items"]
    found = Counter()
    for each in events:
        found[each["reason"]] += each.get("count") or 1
    says(", ".join(f"{count} x {reason}" for reason, count in found.most_common()) or "none")
    assert "FailedPreStopHook" not in found
