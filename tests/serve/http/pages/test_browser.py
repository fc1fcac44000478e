"""What every page keeps to in a browser: its files only, its policy, and no request elsewhere."""

from __future__ import annotations

import pytest

from mars_serve.http.page_files import page_files
from web.chromium import Watch, chromium, needs_chromium, serious_faults
from web.live_server import live_server

pytestmark = needs_chromium
PAGES = [path for path in page_files() if not path.startswith("/pages/")]
MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def server(app):
    with live_server(app) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_small_accessible_and_asks_nobody_else(browser, server, path, scheme):
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    watch = Watch(page, server.address)
    page.goto(f"{server.address}{path}")  # a page that follows a stream is never idle
    page.locator("#connection[data-state=ready]").wait_for()
    assert serious_faults(page) == []
    assert (watch.problems, watch.foreign) == ([], [])
    assert 0 < watch.num_bytes <= MAX_BYTES
    context.close()
