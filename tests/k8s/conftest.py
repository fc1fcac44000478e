"""Renders the manifests as users do, each directory once."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

K8S = Path(__file__).parents[2] / "k8s"
COMMON = "setup/common"
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
OTHERS = [COMMON, "setup/single-node", "files"]

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


@pytest.fixture
def render() -> Callable[[str], Rendered]:
    return rendered


@pytest.fixture(params=[*SERVING, *JOBS, *OTHERS])
def manifests(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.fixture(params=SERVING)
def service(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.fixture(params=TRAINING)
def training(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.fixture
def readme() -> str:
    return (K8S / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], Any]]:
    """Imports a program below k8s/ by its path."""
    folders = [K8S, K8S / "setup" / "common" / "scripts"]
    sys.path[:0] = map(str, folders)
    yield importlib.import_module
    for folder in folders:
        sys.path.remove(str(folder))
