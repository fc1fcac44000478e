"""Runs the manifests' commands, jobs and Serve configurations on a Ray cluster with a token.

One head stands for all nodes of Kubernetes, and a directory for the pods' volumes. Only sizes
differ from the manifests: replicas, CPUs, GPUs, and the amount that calibration measures.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from safetensors.torch import load_file, save_file

from clusters.pods import WAIT_S, WITH_TOKEN, Done, Pods, bearer, get, run
from clusters.ray_heads import SHELL, ray_head
from kustomized import needs_kubectl, rendered
from mars_platform.cluster.processes import free_port
from mars_train.data.demo import write_demo_data
from mars_train.data.demo_tasks import draw_short
from waiting import wait_until

pytestmark = [pytest.mark.full, needs_kubectl]
OVERLAYS = ["overlays/cpu-dev", "overlays/gpu", "overlays/ha"]
OPEN = ["/", "/favicon.ico", "/api/authentication_mode", "/api/gcs_healthz"]
CLOSED = ["/api/version", "/api/ray/version", "/api/jobs/", "/api/serve/applications/",
          "/nodes?view=summary", "/timezone"]  # fmt: skip
STRANGERS = [
    pytest.param({**SHELL, "RAY_AUTH_MODE": "disabled"}, 401, id="without"),
    pytest.param({**WITH_TOKEN, "RAY_AUTH_TOKEN": "wrong" * 8}, 403, id="wrong"),
]


def at_once(*calls: Callable[[], Done]) -> list[Done]:
    with ThreadPoolExecutor() as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    """The pods, on a head with the environment and the HAProxy of the service's pods."""
    root = Path(tempfile.mkdtemp(prefix="k-", dir="/tmp"))  # short, for sockets
    group = rendered(OVERLAYS[0]).cluster["headGroupSpec"]
    (container,) = group["template"]["spec"]["containers"]
    try:
        found = Pods(root)
        launched = found.init(group, "haproxy-launcher")
        assert launched.returncode == 0, launched.stderr
        environment = {
            **WITH_TOKEN,
            **found.environment(container),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),  # each pod has its own ports
        }
        with ray_head(environment, num_cpus=8, agent_port=found.agent_port) as found.address:
            yield found
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize(("stranger", "status"), STRANGERS)
def test_without_the_token_nothing_is_started_or_shown(pods, stranger, status):
    before = pods.get("/api/jobs/"), pods.get("/api/serve/applications/")
    config = pods.root / "refused.yaml"
    config.write_text(yaml.safe_dump(pods.serve_config(OVERLAYS[0])))
    at = ("--address", pods.address)
    commands = (
        ("serve", "deploy", str(config), *at),
        ("serve", "status", *at),
        ("ray", "job", "submit", *at, "--", "true"),
        ("marsray", "submit", "list", *at),
    )
    *rays, ours = at_once(*(partial(run, *each, environment=stranger) for each in commands))
    for refused in rays:
        assert refused.returncode == 1, refused.args
        assert ("Missing" if status == 401 else "Invalid") in refused.stderr, refused.stderr
    assert (ours.returncode, ours.stdout) == (2, "")
    assert "refuses the token, or its absence" in ours.stderr
    token = stranger.get("RAY_AUTH_TOKEN")
    found = {path: get(f"{pods.address}{path}", token).status_code for path in OPEN + CLOSED}
    assert found == dict.fromkeys(OPEN, 200) | dict.fromkeys(CLOSED, status)
    assert (pods.get("/api/jobs/"), pods.get("/api/serve/applications/")) == before


@pytest.mark.parametrize("manifests", [*OVERLAYS, "jobs/promote"])
def test_the_probes_of_heads_need_no_token(pods, manifests):
    head = rendered(manifests).cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    for name in ("readinessProbe", "livenessProbe"):
        probe = head[name]["httpGet"]
        assert probe["port"] == 52365  # the agent's port by default
        url = f"http://127.0.0.1:{pods.agent_port}{probe['path']}"
        wait_until(partial(answers, url), WAIT_S, partial(str, url))


def answers(url: str) -> bool:
    with suppress(httpx.TransportError):  # the agent starts after the dashboard
        return get(url, None).is_success
    return False


@pytest.fixture(scope="module")
def promoted(pods):
    """The first candidate's model after all jobs, and the output of the job that scores it."""
    write_demo_data(pods.root / "data", draw_short, num_train=3200, num_eval=24, seed=1)
    (pods.root / "data" / "eval.jsonl").rename(pods.root / "data" / "held-out.jsonl")
    names = ("overlays/cpu-dev-train", "jobs/calibrate", "jobs/evaluate", "jobs/promote")
    train, calibrate, evaluate, promote = (partial(pods.job, name, "first") for name in names)
    done = [train(), *at_once(calibrate, evaluate), promote()]
    assert [each.returncode for each in done] == [0] * 4, [each.stdout for each in done]
    model = pods.root / "models" / "candidates" / "first" / "model"
    return SimpleNamespace(model=model, scores=done[2].stdout)


def test_the_jobs_train_measure_and_promote_a_candidate(pods, promoted):
    current = pods.root / "models" / "current"
    assert current.is_symlink()
    assert current.resolve() == promoted.model
    assert "tok/fwd" in promoted.scores
    for overlay in OVERLAYS:
        checked = pods.init(rendered(overlay).workers, "weights")
        assert (checked.returncode, checked.stderr) == (0, "")
        assert f"{current} ({promoted.model}) matches its manifest" in checked.stdout
    listed = run("marsray", "submit", "list", "--address", pods.address, environment=WITH_TOKEN)
    assert listed.returncode == 0, listed.stderr


@pytest.fixture(scope="module")
def worse(pods, promoted):
    """A user's own model, stored as the README says; its last norm is negated."""
    incoming = pods.root / "models" / "incoming" / "mine"
    shutil.copytree(promoted.model, incoming)
    for name in ("calibration.json", "frontier.json"):
        (incoming / name).unlink()
    weights = load_file(incoming / "model.safetensors")
    weights["model.norm.weight"].neg_()
    save_file(weights, incoming / "model.safetensors", {"format": "pt"})
    command = (
        "python /etc/marsray/scripts/weights.py store /models/incoming/mine "
        "/models/candidates/mine/model"
    )
    stored = run(*pods.here(command).split())
    assert stored.returncode == 0, stored.stderr
    return "mine"


def test_a_worse_candidate_is_refused_and_the_current_one_stays(pods, promoted, worse):
    measured = pods.job("jobs/calibrate", worse)
    assert measured.returncode == 0, measured.stdout
    refused = pods.job("jobs/promote", worse)
    assert refused.returncode == 1
    assert re.search(r"is not promoted: mode ar: quality .* points below", refused.stdout)
    assert (pods.root / "models" / "current").resolve() == promoted.model


@pytest.fixture(scope="module")
def key(pods):
    made = json.loads(run("marsray", "key", "team-a", "--json").stdout)
    keys = pods.root / "marsray" / "keys" / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [made["entry"]]}))
    return made["key"]


@pytest.fixture(scope="module", params=OVERLAYS)
def service(request, pods, promoted, key):
    """An overlay's application, which replaces the one before."""
    config = pods.serve_config(request.param)
    file = pods.root / "serve-config.yaml"
    file.write_text(yaml.safe_dump(config))
    at = ("--address", pods.address)
    deployed = run("serve", "deploy", str(file), *at, environment=WITH_TOKEN)
    assert deployed.returncode == 0, deployed.stderr
    arguments = config["applications"][0]["args"]

    def application():
        return pods.get("/api/serve/applications/")["applications"]["marsray"]

    def is_running():
        found = application()
        assert found["status"] != "DEPLOY_FAILED", found["message"]
        return (found["status"], found["deployed_app_config"]["args"]) == ("RUNNING", arguments)

    wait_until(is_running, WAIT_S, lambda: json.dumps(application(), indent=1))
    (model,) = arguments["models"]
    url = f"http://127.0.0.1:{pods.port}/v1"

    def is_routed():
        answer = get(f"{url}/models", key)
        return answer.is_success and answer.json()["data"][0]["id"] == model["name"]

    wait_until(is_routed, WAIT_S, lambda: get(f"{url}/models", key).text)
    probe = rendered(request.param).worker_container["readinessProbe"]["httpGet"]
    return SimpleNamespace(model=model["name"], url=url, probe=probe)


def test_each_overlay_serves_the_promoted_model(pods, service, key):
    shown = run("serve", "status", "--address", pods.address, environment=WITH_TOKEN)
    application = yaml.safe_load(shown.stdout)["applications"]["marsray"]
    assert application["status"] == "RUNNING"
    deployments = application["deployments"]
    assert set(deployments) == {"ingress", f"model-0-{service.model}"}
    assert {each["status"] for each in deployments.values()} == {"HEALTHY"}
    probe = httpx.URL(service.url).copy_with(path=service.probe["path"])
    assert answers(str(probe))
    request = {"model": service.model, "prompt": "Count a box of 12 cups", "max_tokens": 8}
    refused, unknown, answer = (
        httpx.post(f"{service.url}/completions", json=request, headers=bearer(each), timeout=WAIT_S)
        for each in (None, "wrong", key)
    )
    assert (refused.status_code, unknown.status_code) == (401, 401)
    assert answer.status_code == 200, answer.text
    assert 1 <= answer.json()["usage"]["completion_tokens"] <= 8
