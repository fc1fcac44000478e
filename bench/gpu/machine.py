"""Tells what a machine has: packages, their versions, its GPU, and which sources run on it.

Imports the standard library alone, and starts nothing on the GPU.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / name for name in ("platform", "train", "serve", "autoscale")]
_NEEDED = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "rich": "rich",
    "typer": "typer",
    "pydantic": "pydantic",
    "llguidance": "llguidance",
    "prometheus_client": "prometheus-client",
    "platformdirs": "platformdirs",
}
"""Package by the module that is imported; Ray and HTTP libraries are not needed."""
_TOLD = ("torch", "triton", "transformers", "numpy", "pydantic", "llguidance")


def missing_packages(needed: dict[str, str] = _NEEDED) -> str | None:
    """Return a message that names the packages that are missing and the remedy, or None."""
    missing = [package for module, package in needed.items() if find_spec(module) is None]
    if not missing:
        return None
    return (
        f"missing packages: {', '.join(missing)}. Install them with pip, or, for a machine without "
        "internet, fetch wheels elsewhere with `sh bench/gpu_wheels.sh build/gpu-wheels`, copy "
        "that folder, and run `python -m pip install --no-index --find-links build/gpu-wheels "
        f"{' '.join(missing)}`"
    )


def identity() -> dict[str, str]:
    """Return what must be the same for an earlier result to hold."""
    return {"sources": _fingerprint(), "commit": _commit(), "machine": _machine(), **_versions()}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _TOLD:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def _fingerprint() -> str:
    """Return a hash of all sources, as a copy of a working tree has no commit."""
    digest = hashlib.sha256()
    for root in [*SOURCES, ROOT / "bench"]:
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str:
    return _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown"


def _machine() -> str:
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return gpus.replace("\n", "; ") or f"{platform.machine()}, no GPU"


def _output(*command: str) -> str:
    """Return what a command prints, or nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    run = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return run.stdout.strip() if run.returncode == 0 else ""
