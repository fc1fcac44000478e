from __future__ import annotations

import hashlib
import importlib
import math
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from kustomized import K8S, RAY_DRAINS_ON_SIGTERM, needs_kubectl
from mars_platform.config import build_settings
from mars_serve.config.settings import ServeSettings
from mars_serve.deploy.app import application
from mars_serve.deploy.proxies import _launcher, proxy_environment

pytestmark = needs_kubectl

EVERYWHERE = "0.0.0.0"  # noqa: S104 - a pod's address
STOP_S = 30
"""Seconds beyond a drain that a pod needs to end."""


def config_of(service: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(service.ray["spec"]["serveConfigV2"])
    return found


def settings_of(service: Any) -> ServeSettings:
    (found,) = config_of(service)["applications"]
    return build_settings({"host": EVERYWHERE, **found["args"]}, ServeSettings, source=service.name)


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_generated_files_are_up_to_date(script, capsys):
    assert script("generate").main(["--check"]) == 0, capsys.readouterr().out


def test_ray_serve_accepts_the_configuration(service):
    config = config_of(service)
    ServeDeploySchema.model_validate(config)
    assert config["http_options"] == {"host": EVERYWHERE, "port": 8000}
    source = yaml.safe_load((K8S / service.name / "serve.yaml").read_text(encoding="utf-8"))
    assert config["applications"][0]["args"] == source


def test_the_application_can_be_built_and_has_the_configured_deployments(service):
    (found,) = config_of(service)["applications"]
    module, _, name = found["import_path"].partition(":")
    assert getattr(importlib.import_module(module), name) is application
    built = build_app(application(found["args"]), name="app", default_runtime_env={})
    assert {each["name"] for each in found["deployments"]} <= {x.name for x in built.deployments}


def test_settings_that_kuberays_cluster_decides_are_refused(script, tmp_path):
    source = tmp_path / "serve.yaml"
    source.write_text("models: [{name: a, path: b}]\nport: 9000\n")
    with pytest.raises(ValueError, match=r"port: no effect here"):
        script("generate").serve_config(source)


def test_a_worker_holds_one_replica_and_has_its_bounds(service):
    settings = settings_of(service)
    (model,) = settings.models
    assert model.autoscaling is not None
    limits = service.worker_container["resources"]["limits"]
    assert int(limits.get("nvidia.com/gpu", 0)) == math.ceil(model.num_gpus)
    # one replica and one ingress on a worker, so that workers are replicas
    assert model.num_cpus + 1 <= int(limits["cpu"]) < 2 * model.num_cpus + 1
    bounds = (service.workers["minReplicas"], service.workers["maxReplicas"])
    assert bounds == (model.autoscaling.min_replicas, model.autoscaling.max_replicas)
    assert service.workers["replicas"] == bounds[0]
    assert settings.proxy.num_replicas <= bounds[0]


def test_no_second_replica_takes_an_ingresss_place_on_a_worker(service):
    """A worker that drains has to find room for its ingress on the others, which have a replica."""
    *models, ingress = config_of(service)["applications"][0]["deployments"]
    assert ingress["name"] == "ingress"
    if not service.worker_container["resources"]["limits"].get("nvidia.com/gpu"):
        assert [each["max_replicas_per_node"] for each in models] == [1]


def test_neither_replicas_nor_ingresses_run_on_the_head(service):
    assert service.cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    *_, ingress = config_of(service)["applications"][0]["deployments"]
    (model,) = settings_of(service).models
    assert ingress["ray_actor_options"]["num_cpus"] > 0
    assert model.num_cpus > 0


def test_ray_removes_nodes_later_than_the_policy_removes_replicas(service):
    (model,) = settings_of(service).models
    assert model.autoscaling is not None
    options = service.cluster["autoscalerOptions"]
    assert options["version"] == "v2"
    assert options["idleTimeoutSeconds"] > model.autoscaling.scale_in_window_s
    # the autoscaler of version 2 refuses a restart policy
    for pod in service.pods():
        if pod.where.startswith("RayService"):
            assert "restartPolicy" not in pod.spec


def test_every_timeout_covers_the_longest_generation(service):
    drain_s = settings_of(service).drain_s
    spec = service.workers["template"]["spec"]
    assert service.ray["spec"]["rayClusterDeletionDelaySeconds"] >= drain_s + STOP_S
    node_drain_s = float(variables(service.worker_container)[RAY_DRAINS_ON_SIGTERM])
    assert spec["terminationGracePeriodSeconds"] >= node_drain_s + STOP_S
    # Serve ends a replica at once that could not finish by the node's end: others start first
    (model,) = settings_of(service).models
    assert node_drain_s >= drain_s + model.autoscaling.cold_start_s
    assert node_drain_s < drain_s + 4 * model.autoscaling.cold_start_s


def test_proxies_have_the_settings_of_marsray_serve(service):
    with proxy_environment(settings_of(service)) as expected:
        expected = {k: v for k, v in expected.items() if k.startswith("RAY_SERVE_")}
    del expected["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"]  # a pod has its ports to itself
    head = service.cluster["headGroupSpec"]["template"]["spec"]["containers"][0]
    for container in (head, service.worker_container):
        given = {k: v for k, v in variables(container).items() if k.startswith("RAY_SERVE_")}
        assert set(given) == set(expected)
        names = ("HARD_STOP_AFTER_S", "ENABLE_HA_PROXY", "THROUGHPUT_OPTIMIZED", "IMPORT_PATH")
        same = [key for key in expected if key.endswith(names)]
        assert len(same) == 5
        assert [given[key] for key in same] == [expected[key] for key in same]
        directory = next(m for m in container["volumeMounts"] if m["name"] == "haproxy")
        assert given["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] == directory["mountPath"]


def test_marsrays_program_is_started_in_place_of_haproxy(service, script, tmp_path):
    path = variables(service.worker_container)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    for group in (service.cluster["headGroupSpec"], service.workers):
        launchers = [
            each["command"]
            for each in group["template"]["spec"]["initContainers"]
            if each["command"][1].endswith("haproxy_launcher.py")
        ]
        assert [each[-1] for each in launchers] == [path]
    program = shlex.split(script("haproxy_launcher").launcher(), comments=False)
    assert program == shlex.split(_launcher(tmp_path).read_text())


def test_keys_and_weights_are_mounted_where_they_are_read(service):
    settings = settings_of(service)
    mounts = {m["mountPath"]: m["name"] for m in service.worker_container["volumeMounts"]}
    assert settings.keys.file is not None
    assert mounts[str(settings.keys.file.parent)] == "keys"
    assert mounts[str(Path(settings.models[0].path).parent)] == "models"
    # the head resolves the link to the checkpoint in service
    (head,) = service.cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert all(
        {"name": "models", "mountPath": "/models", "readOnly": True} in each["volumeMounts"]
        for each in (head, service.worker_container)
    )
    check = service.workers["template"]["spec"]["initContainers"][0]
    assert check["command"][-2:] == ["verify", settings.models[0].path]


def test_disruption_budgets_keep_replicas(service):
    for budget in service.of_kind("PodDisruptionBudget"):
        # RayCluster has no scale subresource: a share or maxUnavailable would be refused
        assert set(budget["spec"]) == {"minAvailable", "selector"}
        if budget["metadata"]["name"] == "marsray-workers":
            assert 0 < budget["spec"]["minAvailable"] < service.workers["minReplicas"]


def test_ha_survives_a_head_and_a_zone(render):
    service = render("overlays/ha")
    options = service.cluster["gcsFaultToleranceOptions"]
    assert "valueFrom" in options["redisPassword"]
    names = {each["metadata"]["name"] for each in service.of_kind("PodDisruptionBudget")}
    assert names == {"marsray-workers"}
    spread = service.workers["template"]["spec"]["topologySpreadConstraints"]
    keys = [each["topologyKey"] for each in spread]
    assert keys == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]


@pytest.mark.parametrize(
    "password", ["0a1b", "two words", "it's\"\\", "x\nrename-command GET ''", "$(id)"]
)
def test_a_password_is_no_configuration_of_redis(render, tmp_path, password):
    (redis,) = (
        each
        for found in render("overlays/ha").of_kind("StatefulSet")
        for each in found["spec"]["template"]["spec"]["containers"]
    )
    (tmp_path / "redis-server").write_text("#!/bin/sh\ncat")
    (tmp_path / "redis-server").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDISCLI_AUTH": password}
    command = [*redis["command"], *redis["args"]]
    lines = subprocess.run(
        command, env=variables, check=True, capture_output=True, text=True
    ).stdout
    digest = hashlib.sha256(password.encode()).hexdigest()
    assert lines.splitlines()[0] == f"user default on ~* &* +@all #{digest}"
    assert [line.split()[0] for line in lines.splitlines()[1:]] == [
        *("dir", "appendonly", "save", "maxmemory-policy"),
    ]


def test_ha_upgrades_in_steps_whose_needs_the_guide_names(render, guide):
    service = render("overlays/ha")
    strategy = service.ray["spec"]["upgradeStrategy"]
    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    assert service.cluster["enableInTreeAutoscaling"] is True
    assert strategy["clusterUpgradeOptions"]["stepSizePercent"] == 10  # a tenth
    assert service.workers["minReplicas"] == 3
    assert "at least three GPUs have to be free" in guide
    assert strategy["clusterUpgradeOptions"]["gatewayClassName"] == "istio"
    # without these settings the namespace refuses its pods, and its Service is a load balancer
    assert "--set gateways.seccompProfile.type=RuntimeDefault" in guide
    assert "--set gatewayClasses.istio.service.spec.type=ClusterIP" in guide


def test_the_overlay_has_the_value_that_starts_a_rollout(service, guide):
    text = (K8S / service.name / "kustomization.yaml").read_text(encoding="utf-8")
    (value,) = re.findall(r'/annotations/marsray\.dev~1rollout, value: "(\w+)"', text)
    assert service.workers["template"]["metadata"]["annotations"]["marsray.dev/rollout"] == value
    assert "`marsray.dev~1rollout`" in guide
    # the next apply would undo a patch of the live object by another rollout
    assert not re.search(r"patch rayservice[^`]+workerGroupSpecs", guide)
