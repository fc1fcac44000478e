"""Components that users add to overlays, and the permanent clusters made of components."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest

from kustomized import JOBS, K8S, SERVING, STAYING, Document, needs_kubectl, rendered

pytestmark = needs_kubectl

KEYS = "marsray-job-object-store"


@pytest.fixture(scope="module")
def with_pull_secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manifests with the commented line of component image in effect."""
    root = tmp_path_factory.mktemp("manifests") / "k8s"
    shutil.copytree(K8S, root)
    file = root / "components" / "image" / "kustomization.yaml"
    before, line, after = file.read_text(encoding="utf-8").partition(
        "# components: [../image-pull-secret]\n"
    )
    assert line
    file.write_text(f"{before}{line.removeprefix('# ')}{after}", encoding="utf-8")
    return root


@pytest.mark.parametrize("name", [*SERVING, *JOBS, *STAYING, "files"])
def test_one_line_gives_every_pod_the_registrys_account(with_pull_secret, name):
    pods = rendered(str(with_pull_secret / name)).pods()
    images = [[each["image"].startswith("ghcr.io/") for each in pod.containers] for pod in pods]
    assert any(map(any, images))
    for pod, own in zip(pods, images, strict=True):
        if any(own):
            assert pod.spec["imagePullSecrets"] == [{"name": "marsray-registry"}], pod.where


def secrets_of(container: Document) -> list[Document]:
    return [each["secretRef"] for each in container.get("envFrom", []) if "secretRef" in each]


def test_jobs_and_the_files_pod_get_the_stores_keys_and_room_for_a_checkpoint(render):
    """An overlay adds the component as a user's would."""
    changed = render("../tests/k8s/object-store-jobs")
    (files,) = (each.spec for each in changed.pods() if each.where == "Pod/marsray-files")
    groups = [changed.cluster["headGroupSpec"], changed.workers]
    for spec in [files, *(each["template"]["spec"] for each in groups)]:
        (container,) = spec["containers"]
        assert secrets_of(container) == [{"name": KEYS, "optional": True}]
        (room,) = (each for each in spec["volumes"] if each["name"] == "tmp")
        assert room == {"name": "tmp", "emptyDir": {"sizeLimit": "200Gi"}}
        # a cloud role is bound to this account
        assert spec["serviceAccountName"] == "marsray-job"
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert {"configMapRef": {"name": "marsray-candidate"}} in container["envFrom"]
    (submitter,) = changed.ray["spec"]["submitterPodTemplate"]["spec"]["containers"]
    assert not secrets_of(submitter)


def test_the_service_has_no_keys_that_may_write(render):
    for where, container in render("../tests/k8s/object-store").containers():
        assert KEYS not in [each["name"] for each in secrets_of(container)], where


@pytest.mark.parametrize("staying", STAYING)
def test_a_permanent_cluster_equals_that_of_the_jobs_without_a_run(render, staying):
    (document,) = render(staying).documents
    assert document["kind"] == "RayCluster"
    stays, ends = copy.deepcopy([document["spec"], render("jobs/base").cluster])
    (own,), (jobs,) = stays["workerGroupSpecs"], ends["workerGroupSpecs"]
    assert own["replicas"] == own["minReplicas"] == own["maxReplicas"] >= 1
    for name in ("replicas", "minReplicas", "maxReplicas"):
        jobs[name] = own[name]
    for group in (ends["headGroupSpec"], jobs):
        (container,) = group["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "marsray-candidate"}}]
        container["envFrom"] = []
    if "gpu" in staying:
        of_job = render("jobs/gpu/evaluate").cluster["headGroupSpec"]["template"]["spec"]
        spec = jobs["template"]["spec"]
        spec |= {name: of_job[name] for name in ("nodeSelector", "tolerations")}
        spec["containers"][0]["resources"] = of_job["containers"][0]["resources"]
        for group in (ends["headGroupSpec"], jobs):
            group["template"]["spec"]["containers"][0]["image"] = of_job["containers"][0]["image"]
    assert stays == ends


def test_the_guide_leads_to_the_permanent_cluster(render, guide):
    for name in STAYING:
        cluster = render(name).ray["metadata"]["name"]  # KubeRay names the Secret like it
        assert f"raycluster/{cluster} " in guide
        assert f"port-forward svc/{cluster}-head-svc 8265:8265" in guide
        assert f"get secret {cluster} --output jsonpath='{{.data.auth_token}}'" in guide
