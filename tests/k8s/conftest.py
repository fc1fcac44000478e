"""Fixtures with rendered manifests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kustomized import GUIDE, JOBS, K8S, OTHERS, SERVING, STAYING, TRAINING, Rendered, rendered


@pytest.fixture
def render() -> Callable[[str], Rendered]:
    return rendered


@pytest.fixture(params=[*SERVING, *JOBS, *STAYING, *OTHERS])
def manifests(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.fixture(params=SERVING)
def service(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.fixture(params=TRAINING)
def training(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.fixture
def guide() -> str:
    return GUIDE.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[[str], Any]]:
    """Import a program of k8s/ by its name."""
    folders = [K8S, K8S / "setup" / "common" / "scripts"]
    sys.path[:0] = map(str, folders)
    yield importlib.import_module
    for folder in folders:
        sys.path.remove(str(folder))
