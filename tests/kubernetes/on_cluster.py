"""The cluster that kubectl talks to, and requests that a pod there sends."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import threading
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
_CONTAINER = "template/spec/containers/0"
_REQUESTS = {
    "RayJob": (
        "/spec/submitterPodTemplate/spec/containers/0",
        f"/spec/rayClusterSpec/headGroupSpec/{_CONTAINER}",
    ),
    "RayService": (
        "/spec/rayClusterConfig/autoscalerOptions",
        f"/spec/rayClusterConfig/headGroupSpec/{_CONTAINER}",
        f"/spec/rayClusterConfig/workerGroupSpecs/0/{_CONTAINER}",
    ),
}
"""Parts of each kind of object whose requests are made smaller."""


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


class Cluster:
    """The cluster, through kubectl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace = os.environ.get("MARSRAY_NAMESPACE", "marsray-test")
        self.image, _, self.tag = os.environ["MARSRAY_IMAGE"].rpartition(":")
        kubectl = shlex.split(os.environ.get("KUBECTL", "kubectl"))
        self.command = [*kubectl, "--namespace", self.namespace]

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Run kubectl in the namespace and return what it printed."""
        command = [*self.command, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    def get(self, *what: str) -> Any:
        return json.loads(self("get", *what, "--output", "json"))

    def apply(self, manifests: str, *patches: dict[str, Any]) -> None:
        """Apply a directory through an overlay that names the image and shrinks requests."""
        image = {"name": "ghcr.io/EXAMPLE/marsray", "newName": self.image, "newTag": self.tag}
        with tempfile.TemporaryDirectory(dir=self.folder) as overlay:
            content = {
                "namespace": self.namespace,
                "resources": [os.path.relpath(ROOT / manifests, os.path.realpath(overlay))],
                "patches": [*_SMALLER, *patches],
                "images": [image],
            }
            Path(overlay, "kustomization.yaml").write_text(yaml.safe_dump(content))
            self("apply", "--kustomize", overlay)

    def run_job(self, name: str, manifests: str, *patches: dict[str, Any]) -> str:
        """Run a RayJob to its end and return its output; it has to succeed at the first attempt."""
        self.apply(manifests, *patches)

        def status() -> dict[str, Any]:
            found: dict[str, Any] = self.get("rayjob", name).get("status", {})
            return found

        wait_until(lambda: status().get("jobDeploymentStatus") in ("Complete", "Failed"), 900, name)
        output = self("logs", f"job/{name}", "--tail=-1", check=False)
        ended = status()
        assert (ended["jobStatus"], ended.get("failed", 0)) == ("SUCCEEDED", 0), output
        self("delete", "rayjob", name)
        return output

    def pods(self, role: str = "worker") -> list[str]:
        """Return the names of the service's pods of one kind that are ready and stay."""
        labels = f"app.kubernetes.io/component=serving,ray.io/node-type={role}"
        return [
            each["metadata"]["name"]
            for each in self.get("pods", "--selector", labels)["items"]
            if "deletionTimestamp" not in each["metadata"]
            for condition in each["status"].get("conditions", [])
            if condition["type"] == "Ready" and condition["status"] == "True"
        ]

    def keep(self, test: str) -> None:
        """Write down what explains a failure."""
        folder = KEPT / test
        folder.mkdir(parents=True, exist_ok=True)
        kinds = "pods,jobs,services,rayjobs,rayservices,rayclusters"
        for what in (("get", f"{kinds},events", "--output", "wide"), ("describe", kinds)):
            (folder / f"{what[0]}.txt").write_text(self(*what, check=False))
        for pod in self("get", "pods", "--output", "name", check=False).split():
            logs = self("logs", pod, "--all-containers", "--prefix", "--tail=2000", check=False)
            (folder / f"{Path(pod).name}.log").write_text(logs)


class Load:
    """Chats that ``load/load.py`` has ended so far in its pod."""

    def __init__(self) -> None:
        self.chats: list[dict[str, Any]] = []

    @property
    def lost(self) -> list[str]:
        return [each["wrong"] for each in self.chats if each["wrong"]]

    def ends(self, since: float = 0) -> list[float]:
        """Return the times at which answers ended that were asked for since then."""
        return sorted(x["end"] for x in self.chats if not x["wrong"] and x["start"] >= since)

    def __str__(self) -> str:
        ends = self.ends()
        gap = max((after - before for before, after in pairwise(ends)), default=0.0)
        kinds = Counter(each[:90] for each in self.lost).most_common(3)
        why = "".join(f"; {count} x {kind}" for kind, count in kinds)
        return f"{len(self.lost)} of {len(self.chats)} lost, longest gap {gap:.1f} s{why}"


@contextmanager
def load(cluster: Cluster, users: int, tokens: int = 40) -> Iterator[Load]:
    """Send chats from a pod of the cluster while the block runs."""
    found, stop = Load(), f"/tmp/stop-{time.time()}"  # noqa: S108 - in the pod
    arguments = ["http://marsray-serve-svc:8000", str(users), str(tokens), stop]
    command = [*cluster.command, "exec", "load", "--", "python", "/load/load.py", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        lines = process.stdout
        assert lines is not None
        reader = threading.Thread(target=lambda: found.chats.extend(map(json.loads, lines)))
        reader.start()
        try:
            yield found
        finally:
            cluster("exec", "load", "--", "touch", stop)
            reader.join(120)


def wait_until(holds: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Wait until a condition holds and return the seconds that it took."""
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < timeout_s, f"{what}: not within {timeout_s} s"
        time.sleep(1)
    return time.monotonic() - start
