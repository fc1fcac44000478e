"""Renders the manifests as users do, each directory once."""

from __future__ import annotations

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

Document = dict[str, Any]


@dataclass(frozen=True)
class PodTemplate:
    """A pod that somebody starts, with the containers that KubeRay adds as options say."""

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
    """What `kubectl apply -k` sends."""

    name: str
    documents: list[Document]

    def of_kind(self, kind: str) -> list[Document]:
        return [each for each in self.documents if each["kind"] == kind]

    @property
    def ray(self) -> Document:
        """The one RayService or RayJob."""
        (found,) = self.of_kind("RayService") or self.of_kind("RayJob")
        return found

    @property
    def cluster(self) -> Document:
        spec = self.ray["spec"]
        found: Document = spec.get("rayClusterConfig") or spec["rayClusterSpec"]
        return found

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


def _templates(value: Any, where: str) -> Iterator[PodTemplate]:
    """Every pod template below a value, whatever kind it is in."""
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
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which renders the manifests, is not installed")
    done = subprocess.run(
        ["kubectl", "kustomize", str(K8S / name)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Rendered(name, list(yaml.safe_load_all(done.stdout)))
