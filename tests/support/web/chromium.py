"""Headless Chromium for the tests of the web pages, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
_AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js")
_SERIOUS = ("serious", "critical")

needs_chromium = pytest.mark.skipif(
    _CHROMIUM is None,
    reason="there is no Chromium; install the package chromium to test the web pages",
)
"""Mark of modules that need the browser."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium within the block."""
    # Chromium has no sandbox for root, as which tests run in containers.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """Records errors of a page, and its requests to other origins."""

    def __init__(self, page: Page, origin: str) -> None:
        self.problems: list[str] = []
        self.foreign: list[str] = []
        self.num_bytes = 0
        """Bytes of the bodies of the page's own files."""
        self._origin = origin
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._console)
        page.on("request", self._request)
        page.on("response", self._response)

    def _console(self, message: Any) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((f"{self._origin}/", "data:")):
            self.foreign.append(request.url)

    def _response(self, response: Any) -> None:
        if response.request.resource_type in ("document", "script", "stylesheet", "image"):
            self.num_bytes += int(response.headers.get("content-length", 0))


def serious_faults(page: Page) -> list[str]:
    """Return what axe-core finds to be serious or critical faults of accessibility."""
    page.evaluate(_AXE.read_text(encoding="utf-8"))  # as the browser's user, whom no policy binds
    found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['html'][:200]} ({node.get('failureSummary', '')})"
        for each in found["violations"]
        if each["impact"] in _SERIOUS
        for node in each["nodes"]
    ]
