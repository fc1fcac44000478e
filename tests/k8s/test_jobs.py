from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points
from typing import Any

import typer
import yaml

from kustomized import K8S, RAY_DRAINS_ON_SIGTERM, needs_kubectl
from mars_platform.config import build_settings
from mars_train.recipe import Recipe

pytestmark = needs_kubectl

CHECKPOINT = "/models/candidates/$CANDIDATE/model"


def recipe_of(training: Any) -> Recipe:
    (configmap,) = training.of_kind("ConfigMap")
    content = yaml.safe_load(configmap["data"]["recipe.yaml"])
    return build_settings(content, Recipe, source=training.name)


def parse(name, *arguments):
    """Parse a command line as the command does, without running it."""
    (command,) = entry_points(group="marsray.commands", name=name)
    cli = typer.Typer()
    cli.command(name)(command.load())
    typer.main.get_command(cli).make_context(name, list(arguments))


def test_marsray_accepts_the_entrypoint(job):
    program, *line = shlex.split(job.ray["spec"]["entrypoint"])
    assert program == "marsray"
    parse(*line)


def test_marsray_accepts_the_commands_of_the_guide(guide):
    lines = re.findall(r"^(?:kubectl .+ -- )?marsray ((?:key|promote) .+)$", guide, re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in lines]
    assert {name for name, *_ in found} == {"key", "promote"}
    for line in found:
        parse(*line)


def test_all_jobs_work_on_the_same_candidate(job):
    entrypoint = job.ray["spec"]["entrypoint"]
    expected = "output=/models/candidates/$CANDIDATE" if " train " in entrypoint else CHECKPOINT
    assert expected in shlex.split(entrypoint)
    # the variable is expanded by the submitter's shell or the job's
    for pod in job.pods():
        names = [each["configMapRef"]["name"] for each in pod.spec["containers"][0]["envFrom"]]
        assert names == ["marsray-candidate"], pod.where


def test_the_promoted_link_is_the_one_that_is_served(render):
    arguments = shlex.split(render("jobs/promote").ray["spec"]["entrypoint"])
    served = arguments[arguments.index("--service") + 1]
    for name in ("cpu-dev", "gpu", "ha"):
        content = yaml.safe_load((K8S / "overlays" / name / "serve.yaml").read_text())
        assert [each["path"] for each in content["models"]] == [served]


def test_a_job_ends_and_takes_its_cluster_with_it(job):
    spec = job.ray["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert 0 < spec["ttlSecondsAfterFinished"] <= 600
    assert spec["backoffLimit"] >= 1
    assert 0 < spec["preRunningDeadlineSeconds"] < spec["activeDeadlineSeconds"]
    assert spec["submitterPodTemplate"]["spec"]["restartPolicy"] == "Never"
    for group in job.cluster.get("workerGroupSpecs", []):
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert "enableInTreeAutoscaling" not in job.cluster


def test_a_command_that_computes_alone_runs_in_the_only_pod(job):
    spec, head = job.ray["spec"], job.cluster["headGroupSpec"]
    is_alone = " train " not in spec["entrypoint"]
    assert is_alone == ("workerGroupSpecs" not in job.cluster)
    assert is_alone == (spec.get("entrypointNumCpus", 0) > 0)
    assert is_alone == ("num-cpus" not in head["rayStartParams"])  # else zero
    (container,) = head["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert spec.get("entrypointNumCpus", 0) <= int(limits["cpu"])
    gpus = int(limits.get("nvidia.com/gpu", 0))
    assert spec.get("entrypointNumGpus", 0) == gpus == int("jobs/gpu/" in job.name)
    assert ("num-gpus" in head["rayStartParams"]) == (gpus == 0)


def test_pods_with_gpus_are_let_onto_their_nodes(manifests):
    for pod in manifests.pods():
        limits = [each["resources"]["limits"] for each in pod.spec["containers"]]
        if any("nvidia.com/gpu" in each for each in limits):
            assert pod.spec["tolerations"][0]["key"] == "nvidia.com/gpu", pod.where
            assert pod.spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}, pod.where


def test_the_workers_of_a_recipe_fit_on_the_nodes(training):
    recipe, limits = recipe_of(training), training.worker_container["resources"]["limits"]
    scaling, nodes = recipe.scaling, training.workers["replicas"]
    gpus = nodes * int(limits.get("nvidia.com/gpu", 0))
    assert gpus == (scaling.most_workers if scaling.use_gpu else 0)
    needed = scaling.most_workers * scaling.cpus_per_worker + 1  # one for Ray Data
    assert needed <= nodes * int(limits["cpu"])


def test_multi_node_training_shards_over_the_nodes(render):
    training = render("overlays/gpu-multi-node-train")
    assert recipe_of(training).scaling.strategy == "fsdp2"
    assert training.workers["replicas"] > 1


def test_a_recipe_uses_mounted_disks_and_no_network(training):
    recipe = recipe_of(training)
    data = [*recipe.data.train, *(recipe.evaluation.data if recipe.evaluation else [])]
    assert all(each.startswith("/data/") for each in data)
    assert recipe.model.base is None or recipe.model.base.startswith("/models/")
    head = training.cluster["headGroupSpec"]["template"]["spec"]
    (mount,) = (m for m in head["containers"][0]["volumeMounts"] if m["name"] == "recipe")
    recipe_file = shlex.split(training.ray["spec"]["entrypoint"])[2]
    assert recipe_file == f"{mount['mountPath']}/recipe.yaml"


def test_a_node_is_drained_before_a_worker_of_a_job_ends(training):
    variables = {each["name"]: each["value"] for each in training.worker_container["env"]}
    drain_s = float(variables[RAY_DRAINS_ON_SIGTERM])
    assert 60 < drain_s < training.workers["template"]["spec"]["terminationGracePeriodSeconds"]
