"""A measured model behind a real port, and a browser that looks at its pages.

While the browser is open, no coroutine can be a test, so the modules here have none.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from decoding.local_engine_client import LocalEngineClient
from frontiers import AR, frontier_of, point
from mars_autoscale.model.frontier import write_frontier
from mars_platform.checkpoint.directory import read_checkpoint
from mars_platform.checkpoint.examples import write_examples
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_serve.config.served import ServedModel
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.http.batches.run import Pace
from rest.api_keys import key_entry
from rest.rest_requests import SHORT_TOOL_TEMPLATE
from rest.rest_server import SingleEngineBackend, app_of, served
from web.chromium import Watch, chromium
from web.live_server import LiveServer, live_server

KEY = "key-of-the-tests"
EXAMPLE = "What is 3 plus 4?"
# A step takes 1 ms and 0.5 ms for each position.
_STEPS = ((0.001, 0.001), (0.051, 0.051))
_POINTS = (
    AR,
    point("exact", 1.0, 80.0, 2.0, 3.0, 0.0),
    point("threshold", 0.9, 79.0, 2.0, 4.0),
    point("threshold", 0.5, 70.0, 4.0, 5.0),
    point("threshold", 0.1, 40.0, 4.9, 5.0),
)


class GatedBackend(SingleEngineBackend):
    """A backend whose streams wait before their third pass while the gate is closed."""

    def __init__(self, loop: LocalEngineClient) -> None:
        super().__init__(loop)
        self.gate = threading.Event()
        self.gate.set()

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        number = 0
        async with aclosing(super().stream(request)) as outputs:
            async for output in outputs:
                number += 1
                while number == 3 and not self.gate.is_set():
                    await asyncio.sleep(0.01)
                yield output


@pytest.fixture(scope="session")
def measured_dir(mars_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the MARS checkpoint with frontier, card and examples."""
    path = tmp_path_factory.mktemp("measured") / "model"
    shutil.copytree(mars_dir, path)
    (path / "README.md").write_text("# A small model")
    write_examples(path, [[{"role": "user", "content": EXAMPLE}]])
    write_frontier(path, frontier_of(*_POINTS, weights=weights_fingerprint(path), seconds=_STEPS))
    return path


@pytest.fixture(scope="module")
def backend(loops: dict[str, LocalEngineClient]) -> GatedBackend:
    return GatedBackend(loops["mars"])


@pytest.fixture(scope="module")
def page_models(
    backend: GatedBackend,
    measured_dir: Path,
    mars_dir: Path,
    plain_dir: Path,
    loops: dict[str, LocalEngineClient],
) -> list[ServedModel]:
    """Return a measured model, a plain one, and one without a frontier that takes tools."""
    with_tools = read_checkpoint(mars_dir)
    with_tools.tokenizer.chat_template = SHORT_TOOL_TEMPLATE
    return [
        served("measured", read_checkpoint(measured_dir), backend),
        served("plain", read_checkpoint(plain_dir), SingleEngineBackend(loops["plain"])),
        served("tools", with_tools, SingleEngineBackend(loops["mars"])),
    ]


@pytest.fixture(scope="module")
def server(
    page_models: list[ServedModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """Return a server without keys, and with a storage."""
    path = tmp_path_factory.mktemp("kept")
    app = app_of(*page_models, storage={"path": str(path), "file_bytes": 2**20})
    pace = Pace(look_s=0.02, beat_s=0.05, lease_s=1.0, settle_s=0.01)
    app.state.batches.means = replace(app.state.batches.means, pace=pace)
    with live_server(app) as server:
        yield server


@pytest.fixture(scope="module")
def keyed_server(page_models: list[ServedModel]) -> Iterator[LiveServer]:
    with live_server(app_of(*page_models, keys={"entries": [key_entry(KEY)]})) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., tuple[Page, Watch]]]:
    """Open a page in a context of its own: ``open_page(server, path="/", **context)``."""
    contexts = []

    def open_(server: LiveServer, path: str = "/", **options: Any) -> tuple[Page, Watch]:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        watch = Watch(page, server.address)
        page.goto(f"{server.address}{path}")
        return page, watch

    yield open_
    for context in contexts:
        context.close()
