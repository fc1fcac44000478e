"""Runs the manifests on the cluster that kubectl talks to, in a namespace of their own.

`make test-kubernetes` runs the steps in their order and prints a table. Environment:

    MARSRAY_IMAGE        image that every pod runs, NAME:TAG
    KUBECTL              the command; `kubectl` by default, which reads KUBECONFIG
    MARSRAY_NAMESPACE    namespace that is made and deleted; `marsray-test` by default
    MARSRAY_KEEP         if set, the namespace stays
    MARSRAY_CUT          command that cuts a node off with the arguments NODE `down`, and connects
                         it again with NODE `up`; without it no node is lost
    MARSRAY_API          command that stops the API server with `down`, and lets it go on with `up`;
                         without it the API server stays
    MARSRAY_REDIS_IMAGE  image that takes the place of Redis' own, NAME:TAG
    MARSRAY_S3_IMAGE     image with Debian's or another python3 and the package `moto[server]`,
                         NAME:TAG; without it no object store is used
    MARSRAY_PROMETHEUS_IMAGE  image with Prometheus, NAME:TAG; needed for monitoring, as are the
                         CRDs of its operator
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from on_cluster import KEPT, Cluster

TABLE = KEPT / "table.md"
"""Step, seconds and result of each test that has ended."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if "MARSRAY_IMAGE" not in os.environ:
        pytest.exit("set MARSRAY_IMAGE to the image that the pods are to run, NAME:TAG", 2)
    found = Cluster(tmp_path_factory.mktemp("overlays"))
    yield found
    if "MARSRAY_KEEP" not in os.environ:
        found("delete", "rayservice,rayjob", "--all", check=False)
        # Clusters with Redis clean up there first.
        found("wait", "--for=delete", "raycluster", "--all", "--timeout=120s", check=False)
        # Workers would serve on for minutes, since nothing else takes their replicas over.
        found("delete", "pod", "--all", "--grace-period=0", "--force", check=False)
        found("delete", "namespace", found.namespace, "--ignore-not-found", check=False)


@pytest.fixture
def says(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """Adds a figure to the table."""
    return lambda figure: record_property("says", str(figure))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.when != "teardown" and report.failed and "cluster" in item.funcargs:
        item.funcargs["cluster"].keep(item.name, str(report.longrepr))
        if item.path.stem == "test_from_nothing":
            item.session.shouldfail = f"later steps need {item.name}"
    return report


def pytest_sessionstart() -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("| step | seconds | result |\n| --- | ---: | --- |\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the step's row at once, so that a run that is stopped has its table, too."""
    if report.when != "call" and report.passed:
        return
    said = [str(value) for _, value in report.user_properties]
    if isinstance(report.longrepr, tuple):
        said.append(f"not run: {report.longrepr[2]}")
    result = "; ".join([f"FAILED, see {KEPT}", *said] if report.failed else said)
    name = report.nodeid.rpartition("::test_")[2].replace("_", " ")
    with TABLE.open("a") as table:
        table.write(f"| {name} | {report.duration:.0f} | {result} |\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"\n{TABLE.read_text()}")
