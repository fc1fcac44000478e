"""The cluster that kubectl talks to, and requests that a pod there sends."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "kubernetes"
"""Folder with the logs and events of tests that failed."""
SERVICE = "k8s/overlays/cpu-dev"
START_S = 240
"""Seconds within which everything has to come up."""
_ANSWERS = 10
"""Answers that show that the service is there."""
_CONTAINER = "template/spec/containers/0"
_REQUESTS = {
    "RayJob": (
        "/spec/submitterPodTemplate/spec/containers/0",
        f"/spec/rayClusterSpec/headGroupSpec/{_CONTAINER}",
    ),
    "RayCluster": (
        f"/spec/headGroupSpec/{_CONTAINER}",
        f"/spec/workerGroupSpecs/0/{_CONTAINER}",
    ),
    "RayService": (
        "/spec/rayClusterConfig/autoscalerOptions",
        f"/spec/rayClusterConfig/headGroupSpec/{_CONTAINER}",
        f"/spec/rayClusterConfig/workerGroupSpecs/0/{_CONTAINER}",
    ),
}
"""Parts of each kind of object whose requests are made smaller."""
_OTHER_IMAGES = {
    "redis": "MARSRAY_REDIS_IMAGE",
    "moto": "MARSRAY_S3_IMAGE",
    "prometheus": "MARSRAY_PROMETHEUS_IMAGE",
}
"""Variables that name the images of other programs."""
_SECRET = re.compile(r"(--from-literal=[^=]*=|Bearer ).*", re.DOTALL)
"""Values among kubectl's arguments that are not shown."""


def json_patch(kind: str, *operations: dict[str, Any], **target: str) -> dict[str, Any]:
    """Return a patch of kustomize for all objects of a kind."""
    return {"target": {"kind": kind, **target}, "patch": json.dumps(operations)}


def _smaller(*places: str) -> Iterator[dict[str, Any]]:
    small = {"cpu": "100m", "memory": "256Mi"}
    return ({"op": "replace", "path": f"{at}/resources/requests", "value": small} for at in places)


_SMALLER = [
    *(json_patch(kind, *_smaller(*places)) for kind, places in _REQUESTS.items()),
    json_patch(
        "RayJob",
        *_smaller(f"/spec/rayClusterSpec/workerGroupSpecs/0/{_CONTAINER}"),
        labelSelector="marsray.dev/pods!=single",
    ),
]


_WORKERS = "/spec/rayClusterConfig/workerGroupSpecs/0"
_BESIDE_THE_LOAD = {
    "labelSelector": {"matchLabels": {"gateway.networking.k8s.io/gateway-name": "marsray"}},
    "topologyKey": "kubernetes.io/hostname",
}
_QUICKER = json_patch(
    "RayService",
    {"op": "replace", "path": "/spec/rayClusterDeletionDelaySeconds", "value": 30},
    # Then there is a node that has a worker, and nothing else that is needed.
    {
        "op": "add",
        "path": "/spec/rayClusterConfig/headGroupSpec/template/spec/affinity",
        "value": {
            "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_BESIDE_THE_LOAD]}
        },
    },
)


def rollout(value: str) -> dict[str, Any]:
    """Return the patch that starts an upgrade."""
    path = f"{_WORKERS}/template/metadata/annotations/marsray.dev~1rollout"
    return json_patch("RayService", {"op": "replace", "path": path, "value": value})


def two_workers() -> dict[str, Any]:
    """Return the patch for two replicas at any load, so that a loss leaves one."""
    generated = yaml.safe_load((ROOT / SERVICE / "serve-config.yaml").read_text(encoding="utf-8"))
    text = generated["spec"]["serveConfigV2"]
    assert text.count("min_replicas: 1") == 1
    config = text.replace("min_replicas: 1", "min_replicas: 2")
    values = {
        "/spec/serveConfigV2": config,
        f"{_WORKERS}/replicas": 2,
        f"{_WORKERS}/minReplicas": 2,
    }
    operations = ({"op": "replace", "path": at, "value": value} for at, value in values.items())
    return json_patch("RayService", *operations)


def make_key(name: str) -> dict[str, Any]:
    """Return an API key and its entry in a file of keys."""
    command = [sys.executable, "-m", "mars_platform", "key", name, "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    made: dict[str, Any] = json.loads(done.stdout)
    return made


class Cluster:
    """The cluster, through kubectl."""

    def __init__(self, folder: Path, namespace: str | None = None) -> None:
        self.folder = folder
        self.namespace = namespace or os.environ.get("MARSRAY_NAMESPACE", "marsray-test")
        self.image, _, self.tag = os.environ["MARSRAY_IMAGE"].rpartition(":")
        kubectl = shlex.split(os.environ.get("KUBECTL", "kubectl"))
        self.command = [*kubectl, "--namespace", self.namespace]

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Run kubectl in the namespace and return what it printed."""
        __tracebackhide__ = True  # pytest would print the arguments, which may hold a key
        command = [*self.command, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        shown = [_SECRET.sub(r"\1...", each) for each in command]
        assert done.returncode == 0 or not check, f"{shown}: {done.stderr}"
        return done.stdout

    def get(self, *what: str) -> Any:
        return json.loads(self("get", *what, "--output", "json"))

    def apply(
        self,
        manifests: str | None = None,
        *patches: dict[str, Any],
        tag: str | None = None,
        component: str | None = None,
    ) -> None:
        """Apply a directory through an overlay that names the image and shrinks requests."""
        images = [
            {"name": "ghcr.io/EXAMPLE/marsray", "newName": self.image, "newTag": tag or self.tag}
        ]
        for image, variable in _OTHER_IMAGES.items():
            name, _, version = os.environ.get(variable, "").rpartition(":")
            if name:
                images.append({"name": image, "newName": name, "newTag": version})
        with tempfile.TemporaryDirectory(dir=self.folder) as overlay:
            here = os.path.realpath(overlay)
            content = {
                "namespace": self.namespace,
                "resources": [os.path.relpath(ROOT / manifests, here)] if manifests else [],
                "components": [os.path.relpath(ROOT / component, here)] if component else [],
                "patches": [*_SMALLER, _QUICKER, *patches],
                "images": images,
            }
            Path(overlay, "kustomization.yaml").write_text(yaml.safe_dump(content))
            self("apply", "--kustomize", overlay)

    def run_job(
        self,
        name: str,
        manifests: str,
        *patches: dict[str, Any],
        meanwhile: Callable[[], object] = bool,
        component: str | None = None,
    ) -> str:
        """Run a RayJob to its end and return its output; it has to succeed at the first attempt."""
        self.apply(manifests, *patches, component=component)
        meanwhile()

        def status() -> dict[str, Any]:
            found: dict[str, Any] = self.get("rayjob", name).get("status", {})
            return found

        ended = ("Complete", "Failed")
        wait_until(lambda: status().get("jobDeploymentStatus") in ended, name, 500)
        output = self("logs", f"job/{name}", "--tail=-1", check=False)
        found = status()
        assert (found["jobStatus"], found.get("failed", 0)) == ("SUCCEEDED", 0), output
        self("delete", "rayjob", name)
        return output

    def secret(self, name: str, key: str) -> str:
        return base64.b64decode(self.get("secret", name)["data"][key]).decode()

    def active(self) -> str:
        """Return the name of the Ray cluster that serves."""
        status = self.get("rayservice", "marsray")["status"]
        return str(status["activeServiceStatus"]["rayClusterName"])

    def rollout(self) -> str:
        """Return the value of the serving cluster that an upgrade changes."""
        (workers,) = self.get("raycluster", self.active())["spec"]["workerGroupSpecs"]
        return str(workers["template"]["metadata"]["annotations"]["marsray.dev/rollout"])

    def ready(self, role: str) -> list[dict[str, Any]]:
        """Return the serving cluster's pods of one kind that are ready and stay, oldest first."""
        labels = f"ray.io/cluster={self.active()},ray.io/node-type={role}"
        order = "--sort-by=.metadata.creationTimestamp"
        return [
            each
            for each in self.get("pods", "--selector", labels, order)["items"]
            if "deletionTimestamp" not in each["metadata"]
            for condition in each["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        ]

    def workers(self) -> list[str]:
        """Return the names of the ready workers, first the one with the ingress."""
        return [each["metadata"]["name"] for each in self.ready("worker")]

    def heads(self) -> list[str]:
        return [each["metadata"]["name"] for each in self.ready("head")]

    def keep(self, test: str, failure: str) -> None:
        """Write down what explains a failure."""
        folder = KEPT / test
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "failure.txt").write_text(failure)
        kinds = "pods,jobs,services,rayjobs,rayservices,rayclusters"
        for what in (("get", f"{kinds},events", "--output", "wide"), ("describe", kinds)):
            (folder / f"{what[0]}.txt").write_text(self(*what, check=False))
        for pod in self("get", "pods", "--output", "name", check=False).split():
            logs = self("logs", pod, "--all-containers", "--prefix", "--tail=2000", check=False)
            (folder / f"{Path(pod).name}.log").write_text(logs)


class Load:
    """Chats that ``load/load.py`` has ended so far in its pod, which needs nobody to go on."""

    def __init__(self, cluster: Cluster, users: int, tokens: int) -> None:
        self._cluster = cluster
        self._file = f"/tmp/{time.time()}"  # noqa: S108 - in the pod
        line = f"python /load/load.py marsray-serve-svc {users} {tokens} {self._file}.stop"
        self._run(f"({line}; touch {self._file}.end) > {self._file} 2> /proc/1/fd/2 &")
        self._ended: str | None = None

    def _run(self, line: str) -> str:
        return self._cluster("exec", "load", "--", "sh", "-c", line)

    def stop(self) -> None:
        self._run(f"touch {self._file}.stop; until [ -e {self._file}.end ]; do sleep 0.5; done")
        self._ended = self._run(f"cat {self._file}")

    @property
    def chats(self) -> list[dict[str, Any]]:
        lines = self._run(f"cat {self._file}") if self._ended is None else self._ended
        return [json.loads(line) for line in lines.splitlines(keepends=True) if line[-1] == "\n"]

    @property
    def lost(self) -> list[str]:
        return [each["wrong"] for each in self.chats if each["wrong"]]

    def ends(self, since: float = 0) -> list[float]:
        """Return the times at which answers ended that were asked for since then."""
        return sorted(x["end"] for x in self.chats if not x["wrong"] and x["start"] >= since)

    def await_answers(self) -> None:
        """Wait until requests that are sent from now on have been answered."""
        since = time.time()
        wait_until(lambda: len(self.ends(since)) > _ANSWERS, "answers")

    def __str__(self) -> str:
        ends = self.ends()
        gap = max((after - before for before, after in pairwise(ends)), default=0.0)
        kinds = Counter(each[:90] for each in self.lost).most_common(3)
        why = "".join(f"; {count} x {kind}" for kind, count in kinds)
        refused = sum(x["refused"] for x in self.chats if not x["wrong"])
        why += f"; {refused} x refused, then accepted" if refused else ""
        return f"{len(self.lost)} of {len(self.chats)} lost, longest gap {gap:.1f} s{why}"


@contextmanager
def load(cluster: Cluster, users: int = 3, tokens: int = 40) -> Iterator[Load]:
    """Send chats from a pod of the cluster while the block runs."""
    found = Load(cluster, users, tokens)
    try:
        yield found
    finally:
        found.stop()


@contextmanager
def forwarded(cluster: Cluster, target: str, port: int) -> Iterator[str]:
    """Forward a port of this machine to a pod or service, and yield its URL."""
    command = [*cluster.command, "port-forward", target, f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forward:
        assert forward.stdout is not None
        try:
            yield "http://" + forward.stdout.readline().split()[2]
        finally:
            forward.kill()


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = START_S) -> float:
    """Wait until a condition holds and return the seconds that it took."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(2)  # each kubectl takes a good part of a second of CPU time
    return time.monotonic() - start


def own_node_of_a_worker(cluster: Cluster) -> tuple[str, str] | None:
    """Return a worker and its node, which has nothing else that the service or the load needs."""
    others = {
        pod["spec"].get("nodeName")
        for pod in cluster.get("pods", "--all-namespaces")["items"]
        if pod["metadata"].get("labels", {}).get("ray.io/node-type") != "worker"
    }
    nodes = ((pod["metadata"]["name"], pod["spec"]["nodeName"]) for pod in cluster.ready("worker"))
    return next((found for found in nodes if found[1] not in others), None)


def kill_the_head(cluster: Cluster, sent: Load) -> float:
    """Kill the head and return the seconds until another one, and a worker, is ready."""
    (head,) = cluster.heads()
    cluster("delete", "pod", head, "--grace-period=0", "--force")
    took = wait_until(lambda: set(cluster.heads()) - {head} and cluster.workers(), "a new head")
    sent.await_answers()
    return took
