"""One server for most modules of this folder, started as a user starts it."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import yaml

from mars_platform.cluster.processes import free_port, wait_until_ready
from rest.rest_requests import TOOL_TEMPLATE

_START_TIMEOUT_S, _STOP_TIMEOUT_S = 900, 300
_ENGINE = {"adaptive_windows": False}  # otherwise outputs depend on how busy the machine is


class Keys(NamedTuple):
    """Secrets of the server's keys."""

    admin: str = "mars-admin-key-of-the-tests"
    user: str = "mars-user-key-of-the-tests"
    slow: str = "mars-slow-key-of-the-tests"
    """The key that may send one request a minute."""


@pytest.fixture(scope="package")
def keys() -> Keys:
    return Keys()


@pytest.fixture(scope="package", params=["haproxy", pytest.param("python", marks=pytest.mark.full)])
def server(request, trained, keys, tmp_path_factory) -> Iterator[str]:
    """Start a server with keys behind one of Serve's proxies; yields its address.

    It serves two replicas of ``mars``, whose chat template has tools, and the AR model ``plain``.
    """
    work = tmp_path_factory.mktemp("serve")
    model = shutil.copytree(trained.model, work / "model")
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    tiers = {"default_min_threshold": 0.01}
    settings = {
        "models": [
            _model("mars", model, num_replicas=2, num_cpus=0.5, tiers=tiers, mode="threshold"),
            _model("plain", trained.ar_model),
        ],
        "proxy": {"kind": request.param},
        "keys": {"file": str(_write_keys(keys, work))},
        "port": free_port(),
    }
    (work / "serve.yaml").write_text(yaml.safe_dump(settings))
    address, log = f"http://127.0.0.1:{settings['port']}", work / "log"
    command = [sys.executable, "-m", "mars_platform", "serve", str(work / "serve.yaml")]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        name = f"marsray serve, see {log},"
        wait_until_ready(process, f"{address}/ready", name=name, timeout_s=_START_TIMEOUT_S)
        assert "plain AR" in log.read_text()  # the command says so of the model without masks
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(_STOP_TIMEOUT_S)
    assert (status, "SIGTERM received" in log.read_text()) == (0, False), log.read_text()


def _model(name: str, path: Path, **settings: Any) -> dict[str, Any]:
    return {"name": name, "path": str(path), "engine": _ENGINE, **settings}


def _write_keys(keys: Keys, work: Path) -> Path:
    entries = [
        {"name": "admin", "sha256": _sha256(keys.admin), "admin": True},
        {"name": "user", "sha256": _sha256(keys.user), "tiers": ["default"]},
        {"name": "slow", "sha256": _sha256(keys.slow), "requests_per_minute": 1},
    ]
    (work / "keys.yaml").write_text(yaml.safe_dump({"keys": entries}))
    return work / "keys.yaml"


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


@pytest.fixture
def client(server, keys) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, with the key of a user."""
    with openai.OpenAI(base_url=f"{server}/v1", api_key=keys.user, max_retries=0) as made:
        yield made


@pytest.fixture
async def http(server, keys) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client, with the administrator's key."""
    headers = {"Authorization": f"Bearer {keys.admin}"}
    async with httpx.AsyncClient(base_url=server, headers=headers, timeout=120) as made:
        yield made
