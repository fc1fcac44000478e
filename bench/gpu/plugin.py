"""Gives pytest the options, the limit of time and the file of results of the acceptance run.

A test's figures are what it records with `record_property`. The file is written anew at each
change, so that a process which crashes or is killed loses nothing but the test that it ran.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

PLANNED, RUNNING, PASSED, FAILED, LEFT_OUT = "planned", "running", "passed", "failed", "left out"


class Results:
    """The file of results: the state, the seconds, the figures and the error of each test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: dict[str, Any] = json.loads(path.read_text("utf-8"))

    @property
    def tests(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each test."""
        tests: dict[str, dict[str, Any]] = self._content["tests"]
        return tests

    def enter(self, name: str, **facts: Any) -> None:
        """Add facts to what is known of a test, and write the whole file in one piece."""
        self.tests.setdefault(name, {}).update(facts)
        temporary = self._path.with_suffix(".tmp")
        text = json.dumps(self._content, indent=1, default=str) + "\n"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._path)


class _Recorder:
    def __init__(self, config: pytest.Config) -> None:
        self._results = Results(config.getoption("--results"))
        self._until_s: float = config.getoption("--until")
        self._gpu_only = bool(config.getoption("--gpu-tests-only"))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept = [item for item in items if _needs_gpu(item) or not self._gpu_only]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._results.enter(item.nodeid, state=PLANNED)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._results.enter(report.nodeid, state=FAILED, error=str(report.longrepr))

    def pytest_runtest_setup(self) -> None:
        if time.time() > self._until_s:
            pytest.skip(LEFT_OUT)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._results.enter(nodeid, state=RUNNING, seconds=0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self._results.tests[report.nodeid]
        facts: dict[str, Any] = {"seconds": known["seconds"] + report.duration}
        facts["figures"] = dict(report.user_properties)
        if report.failed:
            facts |= {"state": FAILED, "error": str(report.longrepr)}
        elif report.skipped:
            reason = str(report.longrepr)
            facts |= {"state": LEFT_OUT if LEFT_OUT in reason else "skipped", "reason": reason}
        elif report.when == "teardown" and known["state"] == RUNNING:
            facts["state"] = PASSED
        self._results.enter(report.nodeid, **facts)


def _needs_gpu(item: pytest.Item) -> bool:
    reasons = (str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif"))
    return any("GPU" in reason or "on CUDA" in reason for reason in reasons)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path)
    parser.addoption("--until", type=float)
    parser.addoption("--device", choices=["cuda", "cpu"], default="cuda")
    parser.addoption("--tiny", action="store_true")
    parser.addoption("--gpu-tests-only", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config), "acceptance")


@pytest.fixture(scope="session")
def setup(pytestconfig: pytest.Config) -> Any:
    import torch
    from bench.gpu.setup import Setup

    if pytestconfig.getoption("--tiny"):
        torch.set_num_threads(1)
    return Setup(pytestconfig.getoption("--device"), bool(pytestconfig.getoption("--tiny")))
