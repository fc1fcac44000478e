"""Runs the commands of the manifests' pods on this machine, with directories for volumes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import yaml

from clusters.ray_heads import SHELL, new_token
from kustomized import rendered
from mars_platform.cluster.processes import free_port

Done = subprocess.CompletedProcess[str]
WAIT_S = 240
WITH_TOKEN = {**SHELL, **new_token()}
_PATH = re.compile(r"(?<![\w/.-])/(?:etc/|run/|tmp/)?(models|data|marsray|haproxy|cache)(?![\w-])")
"""Matches a container's path that is a volume or lies in one."""
_SMALLER = {"calibrate": " --quick --max-tokens 40"}
"""Options that shorten a command's job to seconds."""


class Pods:
    """All pods at once: one directory for their volumes and one cluster for their containers."""

    def __init__(self, root: Path) -> None:
        self.root, self.address = root, ""
        self.port, self.agent_port = free_port(), free_port()
        for name in ("models", "data", "haproxy", "marsray/recipe", "marsray/keys"):
            (root / name).mkdir(parents=True)
        self._mount("setup/common", "marsray-scripts", "scripts")
        self._mount("overlays/cpu-dev-train", "marsray-recipe", "recipe")

    def _mount(self, manifests: str, name: str, directory: str) -> None:
        (found,) = (
            each
            for each in rendered(manifests).of_kind("ConfigMap")
            if each["metadata"]["name"] == name
        )
        (self.root / "marsray" / directory).mkdir(exist_ok=True)
        for file, text in found["data"].items():
            (self.root / "marsray" / directory / file).write_text(self.here(text))

    def here(self, text: str) -> str:
        """Replace the containers' paths in a text by paths on this machine."""
        return _PATH.sub(rf"{self.root}/\1", text)

    def environment(self, container: dict[str, Any]) -> dict[str, str]:
        return {each["name"]: self.here(each["value"]) for each in container["env"]}

    def init(self, group: dict[str, Any], name: str) -> Done:
        """Run one init container of a group of pods."""
        containers = group["template"]["spec"]["initContainers"]
        (found,) = (each for each in containers if each["name"] == name)
        return run(*map(self.here, found["command"]))

    def job(self, manifests: str, candidate: str) -> Done:
        """Run a RayJob as KubeRay's submitter does: in a shell with the ConfigMap's variable."""
        spec = rendered(manifests).ray["spec"]
        cpus = spec.get("entrypointNumCpus", 0)
        reserved = f"--entrypoint-num-cpus {cpus:f} " if cpus else ""
        entrypoint = self.here(spec["entrypoint"])
        size = _SMALLER.get(entrypoint.split()[1], "")
        line = f"ray job submit --address {self.address} {reserved}-- {entrypoint}{size}"
        environment = {**WITH_TOKEN, "CANDIDATE": candidate}
        return run("/bin/bash", "-ce", line, environment=environment)

    def serve_config(self, manifests: str) -> dict[str, Any]:
        """Return Serve's configuration with numbers that fit on this machine."""
        config = yaml.safe_load(self.here(rendered(manifests).ray["spec"]["serveConfigV2"]))
        config["http_options"] = {"host": "127.0.0.1", "port": self.port}
        arguments = config["applications"][0]["args"]
        for model in arguments["models"]:
            model |= {"num_cpus": 1, "num_gpus": 0}
            model["autoscaling"]["min_replicas"] = 1
        if "proxy" in arguments:
            arguments["proxy"]["num_replicas"] = 1
        return config

    def get(self, path: str) -> Any:
        """Return the dashboard's answer to a request with the token."""
        answer = get(f"{self.address}{path}", WITH_TOKEN["RAY_AUTH_TOKEN"])
        return answer.raise_for_status().json()


def run(*command: str, environment: dict[str, str] = SHELL) -> Done:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def get(url: str, key: str | None) -> httpx.Response:
    return httpx.get(url, headers=bearer(key), timeout=WAIT_S)
