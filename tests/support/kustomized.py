"""Renders the manifests with `kubectl kustomize`, each directory once."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
GUIDE = K8S.parent / "docs" / "guides" / "kubernetes.md"
SERVING = ["overlays/cpu-dev", "overlays/gpu", "overlays/ha"]
TRAINING = ["overlays/cpu-dev-train", "overlays/gpu-multi-node-train"]
JOBS = [
    *TRAINING,
    "jobs/calibrate",
    "jobs/evaluate",
    "jobs/promote",
    "jobs/gpu/calibrate",
    "jobs/gpu/evaluate",
]
STAYING = ["overlays/submit", "overlays/gpu-submit"]
"""Clusters that run no job of their own."""
OTHERS = ["setup/common", "setup/single-node", "setup/object-store", "files"]

RAY_DRAINS_ON_SIGTERM = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""Variable of Ray: a node that is told to end finishes its work first, for so many seconds."""

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which renders the manifests, is not installed"
)
"""Mark of modules and tests that render manifests."""

Document = dict[str, Any]


@dataclass(frozen=True)
class PodTemplate:
    """The template of a pod, with the place in the manifests where it stands."""

    where: str
    labels: dict[str, str]
    spec: Document

    @property
    def containers(self) -> list[Document]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def is_long_running(self) -> bool:
        return self.spec.get("restartPolicy") != "Never"


@dataclass(frozen=True)
class Rendered:
    """The documents that `kubectl apply -k` sends for one directory."""

    name: str
    documents: list[Document]

    def of_kind(self, kind: str) -> list[Document]:
        return [each for each in self.documents if each["kind"] == kind]

    @property
    def ray(self) -> Document:
        """The only document of a KubeRay kind."""
        (found,) = self._of_kuberay()
        return found

    @property
    def cluster(self) -> Document:
        (found,) = self.clusters()
        return found

    def clusters(self) -> list[Document]:
        """Return the specification of each Ray cluster, from any kind of document."""
        specs = [each["spec"] for each in self._of_kuberay()]
        return [
            each.get("rayClusterConfig") or each.get("rayClusterSpec") or each for each in specs
        ]

    def _of_kuberay(self) -> list[Document]:
        return [each for each in self.documents if each["apiVersion"].startswith("ray.io/")]

    @property
    def workers(self) -> Document:
        (group,) = self.cluster["workerGroupSpecs"]
        found: Document = group
        return found

    @property
    def worker_container(self) -> Document:
        found: Document = self.workers["template"]["spec"]["containers"][0]
        return found

    def pods(self) -> list[PodTemplate]:
        found = []
        for document in self.documents:
            where = f"{document['kind']}/{document['metadata']['name']}"
            if document["kind"] == "Pod":
                labels = document["metadata"].get("labels", {})
                found.append(PodTemplate(where, labels, document["spec"]))
            found += list(_templates(document, where))
        return found

    def containers(self) -> list[tuple[str, Document]]:
        """Return each container of every pod, with the place where it stands."""
        return [
            (f"{pod.where}: {each['name']}", each) for pod in self.pods() for each in pod.containers
        ]


def _templates(value: Any, where: str) -> Iterator[PodTemplate]:
    """Find every pod template below a value, in any kind of document."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _templates(item, f"{where}.{index}")
    elif isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and "containers" in spec and "kind" not in value:
            yield PodTemplate(where, value.get("metadata", {}).get("labels", {}), spec)
        for key, item in value.items():
            yield from _templates(item, f"{where}.{key}")


@cache
def rendered(name: str) -> Rendered:
    done = subprocess.run(
        ["kubectl", "kustomize", str(K8S / name)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Rendered(name, list(yaml.safe_load_all(done.stdout)))


def quantity(text: str) -> float:
    """Parse a number of bytes as Kubernetes writes it."""
    number, unit = re.fullmatch(r"(\d+)([KMG]i)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[unit]
