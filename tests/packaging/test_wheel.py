"""Checks the published wheel: its content, and that it works without the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from mars_platform.cluster.processes import end_process, free_port, wait_until_ready

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = {
    "mars_platform": ROOT / "platform",
    "mars_train": ROOT / "train",
    "mars_serve": ROOT / "serve",
    "mars_autoscale": ROOT / "autoscale",
}
SECRET = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|\bghp_\w{36}|\bhf_[A-Za-z]{34}\b"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*command, "--directory", directory], cwd=ROOT, check=True)
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="module")
def content(wheel):
    """Bytes of each file in the wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Directory of the programs of an environment in which the wheel is installed.

    The environment sees this environment's packages through a .pth file, but not its editable
    install: Python ignores .pth files in a directory that a .pth file adds.
    """
    directory = tmp_path_factory.mktemp("installed")
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-cache-dir", wheel], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


@pytest.fixture
def run(installed, tmp_path):
    """Runs a program of that environment outside the checkout; returns its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(name, *arguments):
        command = [installed / name, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    return run


def test_the_wheel_holds_the_four_packages_and_nothing_else(content):
    modules = {name for name in content if name.endswith(".py")}
    assert modules == {
        str(path.relative_to(root))
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*.py")
    }
    tops = {name.partition("/")[0] for name in content}
    assert tops == {*PACKAGES, f"marsray-{PROJECT['version']}.dist-info"}
    others = {Path(name).suffix for name in content if ".dist-info/" not in name}
    of_pages = {".html", ".css", ".js", ".svg"}
    assert others == {".py", ".typed", ".cpp", ".h", ".yaml", ".json", *of_pages}
    pages = PACKAGES["mars_serve"] / "mars_serve" / "http" / "pages"
    files = {str(path.relative_to(PACKAGES["mars_serve"])) for path in pages.glob("*/*")}
    assert {name for name in content if "/http/pages/" in name} == files
    assert {f"{package}/py.typed" for package in PACKAGES} <= content.keys()
    assert f"marsray-{PROJECT['version']}.dist-info/licenses/LICENSE" in content


def test_the_wheel_contains_no_secret(content):
    assert [name for name, data in content.items() if SECRET.search(data)] == []


def test_the_wheel_is_small(wheel):
    assert wheel.stat().st_size < 1_200_000


def test_the_packages_are_imported_from_the_installation(installed, run):
    code = f"import {', '.join(PACKAGES)}; print({', '.join(f'{p}.__file__' for p in PACKAGES)})"
    for file in run("python", "-c", code).split():
        assert Path(file).is_relative_to(installed.parent)


def test_the_installed_command_has_its_version_and_all_commands(run):
    assert run("marsray", "--version") == f"marsray {PROJECT['version']}\n"
    printed = run("marsray", "--help")
    listed = {line.split()[0] for line in printed.splitlines() if line.startswith("  ")}
    assert PROJECT["entry-points"]["marsray.commands"].keys() <= listed


@pytest.mark.full
def test_the_installed_command_serves_a_model(installed, trained, tmp_path):
    port, log = free_port(), tmp_path / "log"
    command = [installed / "marsray", "serve", "--model", f"tiny={trained.model}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        name = f"marsray serve, see {log},"
        wait_until_ready(process, f"{address}/ready", name=name, timeout_s=900)
        body = {"model": "tiny", "prompt": "Totals: 4", "max_tokens": 8}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()
    finally:
        end_process(process)
    assert process.returncode == 0, log.read_text()
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["mars"]["forward_passes"] > 0
    assert answer["mars"]["mode"] == "exact"
