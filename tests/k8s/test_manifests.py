from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate
import pytest

from kustomized import GUIDE, Document, needs_kubectl, quantity
from mars_platform import __version__
from mars_platform.cluster.processes import free_port

pytestmark = needs_kubectl

TEXT = GUIDE.read_text(encoding="utf-8")
VERSION = "1.32"
OTHERS_KINDS = {"ray.io/v1", "monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}
USER_MADE = set(re.findall(r"^\| (Secret|ConfigMap) \| `([^`]+)` \|", TEXT, re.MULTILINE))
MADE_BY_OTHERS = {("ConfigMap", "kube-root-ca.crt")}
VOLUMES = {"configMap", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
SECRET = re.compile(r"(PASSWORD|TOKEN|SECRET|_KEY)S?$")


@cache
def validate(document: str) -> None:
    kubernetes_validate.validate(json.loads(document), VERSION, strict=True)


def test_kubernetes_own_kinds_match_their_schemas(manifests):
    for document in manifests.documents:
        if document["apiVersion"] not in OTHERS_KINDS:
            validate(json.dumps(document))


def test_every_pod_template_matches_the_schema_of_pods(manifests):
    for pod in manifests.pods():
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod.spec}
        validate(json.dumps(document))


def test_everything_is_in_the_namespace_that_enforces_the_restricted_profile(manifests, render):
    (namespace,) = render("setup/common").of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for document in manifests.documents:
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == namespace["metadata"]["name"]


def test_every_pod_complies_with_the_restricted_profile(manifests):
    for pod in manifests.pods():
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True, pod.where
        assert context["runAsUser"] != 0, pod.where
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod.where
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec), pod.where
        for volume in pod.spec.get("volumes", []):
            assert set(volume) - {"name"} <= VOLUMES, (pod.where, volume)


def test_no_container_has_privileges(manifests):
    for where, container in manifests.containers():
        assert_restricted(container["securityContext"], where)
        assert not any("hostPort" in port for port in container.get("ports", [])), where


def assert_restricted(context: Document, where: str) -> None:
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }, where


def test_the_autoscaler_that_kuberay_adds_has_no_privileges_either(service):
    options = service.cluster["autoscalerOptions"]
    assert_restricted(options["securityContext"], "autoscaler")
    assert {"requests", "limits"} <= set(options["resources"])


def test_every_container_has_requests_and_limits(manifests):
    for where, container in manifests.containers():
        for part in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][part]), where


def test_what_runs_long_has_probes(manifests):
    for pod in manifests.pods():
        for container in pod.spec["containers"] if pod.is_long_running else []:
            assert {"readinessProbe", "livenessProbe"} <= set(container), pod.where


def test_a_start_warns_of_nothing(manifests):
    """Each failure of a probe is an event; those of Ray's pods wait until the pod has started."""
    for cluster in manifests.clusters():
        for group in [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]:
            (container,) = group["template"]["spec"]["containers"]
            startup = container["startupProbe"]
            assert startup["failureThreshold"] == 1
            assert startup["timeoutSeconds"] >= 180
            (waited,) = re.findall(r"/dev/tcp/localhost/(\d+)", startup["exec"]["command"][-1])
            probe = container["readinessProbe"]["httpGet"]
            numbers = {each["name"]: each["containerPort"] for each in container["ports"]}
            assert int(waited) == numbers.get(probe["port"], probe["port"])
            assert f"GET {probe['path']} HTTP" in startup["exec"]["command"][-1]


@pytest.mark.parametrize("name", ["overlays/cpu-dev", "overlays/cpu-dev-train"])
def test_the_startup_probe_ends_once_its_page_answers_well(render, name, tmp_path):
    command = render(name).worker_container["startupProbe"]["exec"]["command"]
    port = free_port()
    text = re.sub(r"(/dev/tcp/localhost/)\d+", rf"\g<1>{port}", command[-1])
    page = tmp_path / re.search(r"GET /(\S+)", text)[1]
    page.parent.mkdir()
    with subprocess.Popen([*command[:-1], text]) as probe:
        server = [sys.executable, "-m", "http.server", str(port), "--directory", str(tmp_path)]
        with subprocess.Popen(server, stderr=subprocess.PIPE, text=True) as pages:
            try:
                assert '" 404 ' in "".join(pages.stderr.readline() for _ in range(2))
                assert probe.poll() is None
                page.touch()
                assert probe.wait(60) == 0
            finally:
                pages.kill()


def test_written_volumes_are_limited_and_shared_memory_counts_as_memory(manifests):
    for pod in manifests.pods():
        memory = sum(
            quantity(each["resources"]["limits"]["memory"]) for each in pod.spec["containers"]
        )
        for volume in pod.spec.get("volumes", []):
            if "emptyDir" in volume:
                limit = quantity(volume["emptyDir"]["sizeLimit"])
                on_disk = volume["emptyDir"].get("medium") != "Memory"
                assert on_disk or limit <= memory / 2, pod.where


def test_the_object_store_fits_into_shared_memory(manifests):
    for cluster in manifests.clusters():
        for group in [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]:
            volumes = group["template"]["spec"]["volumes"]
            (shared,) = (each for each in volumes if each["name"] == "shm")
            limit = quantity(shared["emptyDir"]["sizeLimit"])
            assert int(group["rayStartParams"]["object-store-memory"]) <= limit


def test_every_mount_has_a_volume_and_every_volume_a_mount(manifests):
    for pod in manifests.pods():
        mounted = {m["name"] for each in pod.containers for m in each.get("volumeMounts", [])}
        volumes = {each["name"] for each in pod.spec.get("volumes", [])}
        # the autoscaler's mount is in its options, the StatefulSet's claim beside its template
        assert volumes - mounted <= {"api-token"}, pod.where
        assert mounted - volumes <= {"state"}, pod.where


def test_the_api_token_is_mounted_for_the_autoscaler_alone(manifests):
    for pod in manifests.pods():
        assert pod.spec["automountServiceAccountToken"] is False, pod.where
    for where, container in manifests.containers():
        assert "api-token" not in {each["name"] for each in container.get("volumeMounts", [])}, (
            where
        )


def test_no_manifest_contains_a_secret(manifests):
    assert not manifests.of_kind("Secret")
    for where, container in manifests.containers():
        for variable in container.get("env", []):
            if SECRET.search(variable["name"]):
                assert "value" not in variable, (where, variable["name"])


def test_images_are_pinned_to_the_version(manifests):
    """Pods have the image without CUDA unless they have a GPU."""
    containers = [container for _, container in manifests.containers()]
    has_gpus = any("nvidia.com/gpu" in each["resources"]["limits"] for each in containers)
    expected = __version__ if has_gpus else f"{__version__}-cpu"
    for container in containers:
        name, _, tag = container["image"].partition("@")[0].partition(":")
        assert tag == expected if name.endswith("/marsray") else tag[0].isdigit(), container


def test_images_of_others_are_pinned_by_digest(manifests):
    """The user's own image has a name that no registry accepts until the user has set it."""
    for where, container in manifests.containers():
        name, _, digest = container["image"].partition("@sha256:")
        is_placeholder = name.startswith("ghcr.io/EXAMPLE/")
        assert is_placeholder or re.fullmatch("[0-9a-f]{64}", digest), where


def test_the_guide_builds_the_images_that_the_manifests_name(render):
    built = dict(re.findall(r"VARIANT=(\w+) --tag REGISTRY/marsray:(\S+)", TEXT))
    assert built == {"cpu": f"{__version__}-cpu", "gpu": __version__}
    assert set(re.findall(r"docker push REGISTRY/marsray:(\S+)", TEXT)) == set(built.values())


def test_ray_is_the_installed_version(manifests):
    for cluster in manifests.clusters():
        assert cluster["rayVersion"] == importlib.metadata.version("ray")
        assert cluster["authOptions"] == {"mode": "token"}


def test_a_referenced_object_exists_or_the_guide_says_who_creates_it(manifests, render):
    there = {
        (each["kind"], each["metadata"]["name"])
        for each in [*manifests.documents, *render("setup/common").documents]
    }
    for reference in named(manifests.documents):
        assert reference in there | USER_MADE | MADE_BY_OTHERS, reference


def test_services_that_others_create_are_in_the_guide(service):
    own = {each["metadata"]["name"] for each in service.of_kind("Service")}
    rules = [rule for route in service.of_kind("HTTPRoute") for rule in route["spec"]["rules"]]
    for backend in [each for rule in rules for each in rule.get("backendRefs", [])]:
        assert backend["name"] in own or f"Service `{backend['name']}`" in TEXT


def named(value: Any) -> Iterator[tuple[str, str]]:
    """Kind and name of every object that a manifest refers to."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _named_by(key, item)
            yield from named(item)
    elif not isinstance(value, str) and hasattr(value, "__iter__"):
        for item in value:
            yield from named(item)


def _named_by(key: str, item: Any) -> Iterator[tuple[str, str]]:
    kinds = {"configMap": "ConfigMap", "configMapRef": "ConfigMap", "configMapKeyRef": "ConfigMap",
             "secretRef": "Secret", "secretKeyRef": "Secret", "credentials": "Secret"}  # fmt: skip
    if key in kinds and isinstance(item, dict):
        yield kinds[key], item["name"]
    elif key == "parametersRef":
        yield item["kind"], item["name"]
    elif key in ("imagePullSecrets", "certificateRefs"):
        yield from (("Secret", each["name"]) for each in item)
    elif key in ("secretName", "claimName", "serviceAccountName"):
        kind = {"secretName": "Secret", "claimName": "PersistentVolumeClaim"}
        yield kind.get(key, "ServiceAccount"), item
