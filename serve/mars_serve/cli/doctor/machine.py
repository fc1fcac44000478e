"""Checks the versions of packages, and memory and a port of this machine.

Loads no package that may be broken, so that these checks run in every installation.
"""

import platform
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

from mars_serve.cli.doctor.finding import Finding

DEFAULT_PORT = 8000
"""Port that ``marsray serve`` listens on by default."""
_NAMED = ("torch", "transformers", "ray", "pydantic", "fastapi")
"""Packages whose versions are told although they are right."""
_GIB = 2**30
_LEAST_MEMORY = 4 * _GIB
"""Bytes that Ray and one engine of a small model need together, about."""


def check_versions() -> Iterator[Finding]:
    """Compare Python and each package with the ranges that marsray requires."""
    from packaging.requirements import Requirement  # missing in a broken installation
    from packaging.specifiers import SpecifierSet

    found = f"{platform.python_version()} in {sys.prefix}"
    needed = SpecifierSet(str(metadata("marsray").json.get("requires_python") or ""))
    if needed.contains(platform.python_version(), prereleases=True):
        yield Finding("python", "ok", found)
    else:
        remedy = "use a newer Python"
        yield Finding("python", "failed", f"{found}, but marsray needs {needed}", remedy)
    packages = [Requirement(text) for text in requires("marsray") or []]
    packages = [each for each in packages if not each.marker or each.marker.evaluate({"extra": ""})]
    wrong = {each.name: finding for each in packages if (finding := _wrong(each)) is not None}
    names = ", ".join(f"{name} {version(name)}" for name in _NAMED if name not in wrong)
    in_range = f"{len(packages) - len(wrong)} are in range ({names})"
    yield Finding("packages", "ok", f"marsray {version('marsray')}; {in_range}")
    yield from wrong.values()


def _wrong(requirement: Any) -> Finding | None:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        text = "it is not installed"
    else:
        if requirement.specifier.contains(found, prereleases=True):
            return None
        text = f"version {found} is installed, but marsray needs {requirement.specifier}"
    remedy = f"run pip install '{requirement}'"
    if requirement.name == "torch":
        remedy += "; install a CUDA build of torch yourself beforehand if the machine has a GPU"
    return Finding(f"package {requirement.name}", "failed", text, remedy)


def check_memory(weights_bytes: int) -> Iterator[Finding]:
    """Compare the free memory with what a server needs besides weights of this size."""
    free = _free_memory()
    if free is None:
        yield Finding("memory", "ok", "this system does not say how much is free")
        return
    needed, found = _LEAST_MEMORY + weights_bytes, f"{free / _GIB:.1f} GiB free"
    if free >= needed:
        yield Finding("memory", "ok", found)
        return
    reason = f", and {weights_bytes / _GIB:.1f} GiB are weights" if weights_bytes else ""
    yield Finding(
        "memory",
        "warning",
        f"{found}, but a server needs about {needed / _GIB:.1f} GiB{reason}",
        "end other programs, use a larger machine, or serve a smaller number type (dtype: "
        "bfloat16)",
    )


def _free_memory() -> int | None:
    system, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    found = list[int]()
    if system.is_file():
        for line in system.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and (text := limit.read_text(encoding="utf-8").strip()) != "max":
        found.append(int(text) - int(used.read_text(encoding="utf-8")))
    return min(found, default=None)


def check_port(port: int | None, host: str = "127.0.0.1") -> Iterator[Finding]:
    """Check that a server could listen on a port; a taken one fails only if the user named it."""
    number = DEFAULT_PORT if port is None else port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind((host, number))
        except PermissionError:
            yield Finding(
                "port",
                "failed",
                f"{number} may be used by the administrator only",
                "give --port of 1024 or more, and let a load balancer listen on this one",
            )
        except OSError as error:
            yield Finding(
                "port",
                "warning" if port is None else "failed",
                f"{number} is taken ({error.strerror})",
                "end that program, or run marsray serve with another --port",
            )
        else:
            yield Finding("port", "ok", f"{number} is free on {host}")
