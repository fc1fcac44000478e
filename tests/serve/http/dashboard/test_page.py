"""The dashboard's page in a browser, over a real engine and a real governor."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ladders import CAPACITY
from mars_autoscale.policy.inner_loop import Cause, InnerLoopDecision
from mars_autoscale.policy.outer_loop import AutoscalingBasis
from mars_autoscale.policy.reports import IngressReport
from mars_autoscale.policy.settings import OuterSettings
from mars_platform.method.mode import LiveDecoding
from mars_serve.config.served import Picture
from mars_serve.http.batches.records import Lease
from mars_serve.storage.objects import new_id
from replica_reports import report_of
from rest.api_keys import key_entry
from rest.rest_server import SingleEngineBackend, app_of, served
from web.chromium import Watch, chromium, needs_chromium, serious_faults
from web.live_server import live_server

pytestmark = needs_chromium
HOSTILE = "<img src=x onerror='document.title=1'>"
BASIS = AutoscalingBasis(CAPACITY, OuterSettings(max_replicas=3, period_s=0.2))
AUTOSCALING = {"max_replicas": 3}


class ScaledBackend(SingleEngineBackend):
    """A backend whose governor also hears of a replica that is autoscaled, with a hostile name."""

    async def picture(self, since_s: int | None) -> Picture:
        live = LiveDecoding(0.9, 0.7)
        decision = InnerLoopDecision(live, gain=1.4, loss=2.0, cause=Cause.LOAD)
        hostile = replace(report_of("", 3), replica=HOSTILE, node=HOSTILE, decoding=decision)
        await self.governor.report("model", hostile, BASIS)
        counted = {"/v1/messages": 31}
        rejected = IngressReport("i", rejected={HOSTILE: 2}, endpoints=counted)
        await self.governor.report_ingress("model", IngressReport("i"))
        await self.governor.report_ingress("model", rejected)
        return await super().picture(since_s)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(mars, loops, tmp_path_factory) -> Iterator[Any]:
    """A server of an autoscaled model and of a plain one that is not, where a batch runs."""
    scaled = served("scaled", mars, ScaledBackend(loops["mars"]), autoscaling=AUTOSCALING)
    fixed = served("fixed", loops["plain"].engine.checkpoint, SingleEngineBackend(loops["plain"]))
    app = app_of(scaled, fixed, storage={"path": str(tmp_path_factory.mktemp("kept"))})
    leased = app.state.batches.store.put_lease(
        new_id(), Lease(tenant="t", expires_at=2**40, owner="other")
    )
    thread = threading.Thread(target=asyncio.run, args=[leased])
    thread.start()  # the browser's loop runs in this one
    thread.join()
    with live_server(app) as server:
        yield server


@pytest.fixture
def page(browser) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.set_default_timeout(15_000)
    yield page
    context.close()


def test_it_shows_what_the_governor_knows_and_text_stays_text(page, server):
    watch = Watch(page, server.address)
    page.goto(f"{server.address}/dashboard")
    page.get_by_text("0.9", exact=True).first.wait_for()
    page.get_by_role("cell", name=HOSTILE, exact=True).first.wait_for()
    assert page.locator("main img").count() == 0
    assert page.title() == "Dashboard · marsray"
    page.get_by_text("requests run and wait than are served fast enough").first.wait_for()
    page.locator("#now p", has_text="replica").first.wait_for()
    page.get_by_role("row", name="/v1/messages 31").wait_for()
    page.get_by_text(
        re.compile("Batches: 1 running, 0 waiting, the oldest for .* minute")
    ).wait_for()
    label = page.get_by_role("img", name="τ, mean over ready replicas").get_attribute("aria-label")
    assert "default 0.9" in label
    frontier = page.get_by_role("img", name="Frontier with full batches")
    assert "lose 2 points" in frontier.get_attribute("aria-label")
    assert serious_faults(page) == []
    assert (watch.problems, watch.foreign) == ([], [])


def test_a_chart_is_read_by_keyboard(page, server):
    page.goto(f"{server.address}/dashboard")
    chart = page.get_by_role("img", name="Replicas, number")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert ", at " in chart.get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert ", now:" in chart.get_attribute("aria-label")


def test_what_a_model_lacks_is_explained(page, server):
    page.goto(f"{server.address}/dashboard")
    page.get_by_label("Model").select_option("fixed")
    page.get_by_text("There is no loss budget, audit or frontier to show.").wait_for()
    page.get_by_text("has no mars.json").first.wait_for()
    assert not page.locator("#charts .card", has_text="mean over ready replicas").is_visible()


def test_it_says_when_the_server_is_away_and_comes_back_by_itself(page, mars, loops):
    app = app_of(served("mars", mars, SingleEngineBackend(loops["mars"])))
    with live_server(app) as server:
        page.goto(f"{server.address}/dashboard")
        page.get_by_text("As of ").wait_for()
        server.stop()
        page.locator("#problem", has_text="This page reconnects by itself").wait_for()
        threading.Timer(0.3, server.start).start()
        page.locator("#problem").wait_for(state="hidden")
        page.get_by_text("As of ").wait_for()


def test_a_wrong_key_is_asked_for_again_and_a_users_key_is_refused(page, mars, loops):
    entries = [key_entry("admin", admin=True), key_entry("user")]
    app = app_of(
        served("mars", mars, SingleEngineBackend(loops["mars"])), keys={"entries": entries}
    )
    with live_server(app) as server:
        page.goto(f"{server.address}/dashboard")
        for key, text in (("wrong", "missing, wrong or expired"), ("user", "no administrator")):
            page.locator("dialog[open]").wait_for()
            page.get_by_label("API key").fill(key)
            page.get_by_role("button", name="Use this key").click()
            page.locator("#problem", has_text=text).wait_for()
        page.get_by_role("button", name="Key: set").click()
        page.get_by_label("API key").fill("admin")
        page.get_by_role("button", name="Use this key").click()
        page.get_by_text("As of ").wait_for()
        assert not page.locator("#problem").is_visible()


def test_on_a_phone_nothing_is_wider_than_the_screen(page, server):
    page.set_viewport_size({"width": 360, "height": 700})
    page.goto(f"{server.address}/dashboard")
    page.get_by_role("img", name="Frontier with full batches").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert serious_faults(page) == []
