"""The guide's commands name existing files, and its figures are those of the manifests."""

from __future__ import annotations

import re
import shlex
from typing import Any

from kustomized import JOBS, K8S, needs_kubectl, quantity

pytestmark = needs_kubectl

ON_CPUS = [each for each in JOBS if "gpu" not in each]


def commands(guide: str) -> list[str]:
    """Lines of the code blocks without comments; continued lines are joined."""
    plain = re.sub(r"^ {4}", "", guide, flags=re.MULTILINE)  # blocks in tabs are indented
    blocks = re.findall(r"^```sh\n(.+?)^```", plain, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_applied_directory_exists(guide):
    named = re.findall(r"-k (k8s/[\w/-]+)", guide)
    assert len(set(named)) > 10
    for directory in named:
        assert (K8S.parent / directory / "kustomization.yaml").is_file(), directory


def test_a_shell_can_read_every_line(guide):
    found = commands(guide)
    assert len(found) > 40
    for line in found:
        words = shlex.split(line, comments=True)
        assert words[0] in {"helm", "kubectl", "docker", "marsray", "curl", "export"}, line
        # zsh reads brackets as a pattern, and kubectl waits only 30 s by default
        assert "[" not in re.sub(r"'[^']*'|\"[^\"]*\"", "", line), line
        assert "wait" not in words or any(each.startswith("--timeout=") for each in words), line


def test_every_object_that_users_create_has_a_command(guide):
    made = re.findall(r"create (secret|configmap)(?: generic| tls| docker-registry)? (\S+)", guide)
    table = re.findall(r"^\| (Secret|ConfigMap) \| `([^`]+)` \|", guide, re.MULTILINE)
    assert {(kind, name) for kind, name in made} == {(kind.lower(), name) for kind, name in table}


def test_the_rollback_moves_the_link_that_is_served(render, guide):
    gate = shlex.split(render("jobs/promote").ray["spec"]["entrypoint"])
    (line,) = (each for each in commands(guide) if "marsray promote" in each)
    back = shlex.split(line)
    assert "--force" in back
    assert "--force" not in gate
    assert back[back.index("--service") + 1] == gate[gate.index("--service") + 1]


def requested(manifests: Any) -> tuple[float, float]:
    """CPUs and bytes that the pods request."""
    groups = manifests.cluster.get("workerGroupSpecs", [])
    assert all(each["replicas"] == 1 for each in groups)
    containers = [each for pod in manifests.pods() for each in pod.spec["containers"]]
    if manifests.cluster.get("enableInTreeAutoscaling"):
        containers.append(manifests.cluster["autoscalerOptions"])
    asked = [each["resources"]["requests"] for each in containers]
    return sum(cpus(each["cpu"]) for each in asked), sum(quantity(each["memory"]) for each in asked)


def cpus(text: str) -> float:
    return int(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


def test_the_guides_node_has_room_for_the_service_and_a_job(render, guide):
    said = re.search(
        r"a node with (\d+) CPUs and (\d+) GiB: the service asks for "
        r"([\d.]+) CPUs and ([\d.]+) GiB, training for ([\d.]+) and ([\d.]+), each other job for "
        r"([\d.]+) and ([\d.]+)\.\s",
        guide,
    )
    assert said is not None
    node, service, training, other = (
        (float(said[at]), float(said[at + 1]) * 2**30) for at in (1, 3, 5, 7)
    )
    assert requested(render("overlays/cpu-dev")) == service
    for name in ON_CPUS:
        assert requested(render(name)) == (training if "train" in name else other), name
    assert all(of_node > a + b for of_node, a, b in zip(node, service, training, strict=True))
