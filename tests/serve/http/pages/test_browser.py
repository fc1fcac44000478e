"""Tests that every page loads its own files only, keeps to its policy and asks no other origin."""

from __future__ import annotations

import pytest

from mars_serve.http.page_files import page_files
from web.chromium import needs_chromium, serious_faults

pytestmark = needs_chromium
PAGES = [path for path in page_files() if not path.startswith("/pages/")]
MAX_BYTES = 300_000


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_small_accessible_and_asks_nobody_else(open_page, server, path, scheme):
    page, watch = open_page(server, path, color_scheme=scheme)
    page.locator("#connection[data-state=ready]").wait_for()
    page.wait_for_load_state("load")  # a page that follows a stream is never idle
    assert serious_faults(page) == []
    assert (watch.problems, watch.foreign) == ([], [])
    assert 0 < watch.num_bytes <= MAX_BYTES


@pytest.mark.parametrize("path", PAGES)
def test_scripts_that_are_no_files_of_the_page_do_not_run(open_page, server, path):
    page, _ = open_page(server, path)
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.hasRun = true";
            document.body.append(script);
            const image = document.createElement("div");
            image.innerHTML = '<img src="data:," onerror="window.hasRun = true">';
            document.body.append(image);
        }"""
    )
    page.locator("img[src='data:,']").wait_for(state="attached")
    page.evaluate("() => document.querySelector(\"img[src='data:,']\").decode().catch(() => {})")
    assert page.evaluate("window.hasRun") is None
    with pytest.raises(Exception, match="Failed to fetch"):
        page.evaluate("fetch('http://localhost:9/')")
