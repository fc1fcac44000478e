"""Compares the versions of Python and of the installed packages with marsray's ranges."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import Any

from mars_serve.cli.doctor.finding import Finding, failed, ok

_NAMED = ("torch", "transformers", "ray", "pydantic", "fastapi")
"""Packages whose versions are told although they are right."""
_CUDA_NOTE = "; install a CUDA build of torch yourself beforehand if the machine has a GPU"


def check_python() -> Iterator[Finding]:
    """Compare Python's version with the least one that marsray runs on."""
    from packaging.specifiers import SpecifierSet  # missing in a broken installation

    found = f"{platform.python_version()} in {sys.prefix}"
    needed = SpecifierSet(str(metadata("marsray").json.get("requires_python") or ""))
    if needed.contains(platform.python_version(), prereleases=True):
        yield ok("python", found)
    else:
        yield failed("python", f"{found}, but marsray needs {needed}", "use a newer Python")


def check_packages() -> Iterator[Finding]:
    """Compare each package that marsray requires with its range; a line for each that is wrong."""
    from packaging.requirements import Requirement  # missing in a broken installation

    try:
        listed = requires("marsray") or []
    except PackageNotFoundError:
        yield failed(
            "packages", "marsray itself is not installed", "run pip install marsray in this Python"
        )
        return
    needed = [Requirement(text) for text in listed]
    needed = [each for each in needed if not each.marker or each.marker.evaluate({"extra": ""})]
    wrong = [finding for each in needed if (finding := _finding_of(each)) is not None]
    right = [each.name for each in needed if _finding_of(each) is None]
    names = ", ".join(f"{name} {_version(name)}" for name in _NAMED if name in right)
    yield ok("packages", f"marsray {_version('marsray')}; {len(right)} are in range ({names})")
    yield from wrong


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _finding_of(requirement: Any) -> Finding | None:
    """Return what is wrong with an installed package; None if nothing is."""
    found = _version(requirement.name)
    remedy = f"run pip install '{requirement}'"
    if requirement.name == "torch":
        remedy += _CUDA_NOTE
    if found is None:
        return failed(f"package {requirement.name}", "it is not installed", remedy)
    if requirement.specifier.contains(found, prereleases=True):
        return None
    text = f"version {found} is installed, but marsray needs {requirement.specifier}"
    return failed(f"package {requirement.name}", text, remedy)
