"""Serves a trained tiny model to clients that are installed in an environment of their own.

`make test-clients` runs these tests. They import nothing of the project, which is not installed in
the clients' environment.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from rest.rest_requests import TOOL_TEMPLATE

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # read at import; else it uses the network
ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S, _STOP_TIMEOUT_S = 900, 300
_KEY = "mars-key-of-the-client-tests"


@dataclass(frozen=True)
class Served:
    """A running server, with the model and the data that it serves."""

    address: str
    """URL of the server, without ``/v1``."""
    key: str
    model: Path
    """Checkpoint that is served as ``mars``."""
    data: Path
    """File of held-out conversations."""

    @property
    def api(self) -> str:
        return f"{self.address}/v1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--python", default=str(ROOT / ".venv/bin/python"), help="interpreter that has marsray"
    )
    parser.addoption("--work", type=Path, help="folder of an earlier run, for its trained model")


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> str:
    """The interpreter in whose environment the project is installed."""
    found: str = request.config.getoption("--python")
    return found


@pytest.fixture(scope="session")
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model and its data."""
    return request.config.getoption("--work") or tmp_path_factory.mktemp("work")


@pytest.fixture(scope="session")
def model(work: Path, python: str) -> Path:
    """A checkpoint of the recipe of all tests, with a chat template that has tools."""
    path = work / "served"
    if path.exists():
        return path
    marsray = [python, "-m", "mars_platform"]
    data = ["--out", str(work / "data"), "--task", "short", "--examples", "4000"]
    _run([*marsray, "data", "demo", *data])
    recipe = [*marsray, "train", str(ROOT / "tests/recipe.yaml"), "--set", f"output={work / 'out'}"]
    recipe += ["--set", f"data.train=[{work / 'data/train.jsonl'}]"]
    recipe += ["--set", f"evaluation.data=[{work / 'data/eval.jsonl'}]"]
    _run(recipe)
    shutil.copytree(work / "out/model", path)
    (path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return path


@pytest.fixture(scope="session")
def data(work: Path, model: Path) -> Path:
    """The file of held-out conversations."""
    return work / "data/eval.jsonl"


@pytest.fixture(scope="session")
def served(
    model: Path, data: Path, python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A running ``marsray serve`` with one admin key, whose prompts may hold control tokens."""
    folder, port = tmp_path_factory.mktemp("server"), _free_port()
    digest = hashlib.sha256(_KEY.encode()).hexdigest()
    # lm-eval renders chats itself and sends them to /v1/completions
    key = {"name": "clients", "sha256": digest, "admin": True, "control_tokens": True}
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": [key]}))
    settings = {
        "port": port,
        # By default requests are decoded in mode exact: outputs do not depend on other requests.
        "models": [{"name": "mars", "path": str(model), "mode": "exact"}],
        "keys": {"file": str(folder / "keys.yaml")},
        "storage": {"path": str(folder / "storage")},
    }
    (folder / "serve.yaml").write_text(yaml.safe_dump(settings))
    command = [python, "-m", "mars_platform", "serve", str(folder / "serve.yaml")]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/ready", log)
        yield Served(f"http://127.0.0.1:{port}", _KEY, model, data)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_STOP_TIMEOUT_S)


@pytest.fixture(scope="session")
def offline() -> dict[str, str]:
    """The environment of child processes, which use neither a hub nor telemetry."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "OPENAI_API_KEY": _KEY,
    }


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.2)
    pytest.fail(f"not ready in time: {log.read_text()}")
