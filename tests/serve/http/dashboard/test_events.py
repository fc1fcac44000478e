from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from typing import Any

import pytest

from mars_serve.api.errors import ApiError
from mars_serve.config.served import Picture
from mars_serve.http.endpoints.dashboard import Watchers
from rest import asgi
from rest.api_keys import bearer, key_entry
from rest.rest_server import SingleEngineBackend, app_of, client_of, served

EVENTS = "/admin/dashboard/events"
ENTRIES = [key_entry("admin", admin=True), key_entry("user")]


class CountedBackend(SingleEngineBackend):
    """A backend that counts how often it is asked for a picture."""

    num_asked = 0

    async def picture(self, since_s: int | None) -> Picture:
        self.num_asked += 1
        return await super().picture(since_s)


class SilentBackend(SingleEngineBackend):
    """A backend whose governor fails."""

    async def picture(self, since_s: int | None) -> Picture:
        raise ConnectionError("<b>gone</b>")


@pytest.fixture
def backend(loops):
    return CountedBackend(loops["mars"])


@pytest.fixture
def model(mars, backend):
    return served("mars", mars, backend)


def content(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event.removeprefix(b"data: "))


async def events_of(app, number, path=EVENTS, headers=(), **fields) -> list[dict[str, Any]]:
    """Return the first events of a stream, after which the client leaves."""
    with suppress(OSError):
        messages = await asgi.call(app, "GET", path, headers, leave_after=number + 1, **fields)
    start, *parts = messages
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    return [content(part["body"]) for part in parts]


async def test_the_first_event_holds_everything_and_the_next_what_is_new(model):
    first, second, third = await events_of(app_of(model), 3)
    assert first["about"]["models"]["mars"]["has_threshold"] is True
    assert first["models"]["mars"]["columns"][0] == "time_s"
    for event in (second, third):
        assert "about" not in event
        assert event["models"]["mars"]["state"]["replicas"][0]["name"] == "only"
    times = [row[0] for event in (first, second, third) for row in event["models"]["mars"]["rows"]]
    assert times
    assert times == list(range(times[0], times[0] + len(times)))


async def test_many_watchers_cost_as_much_as_one(model, backend):
    watchers = Watchers({"mars": model}, period_s=0.01)
    streams = [(await watchers.watch(0))[1] for _ in range(10)]
    backend.num_asked = 0
    rounds = [await asyncio.gather(*map(anext, streams)) for _ in range(5)]
    # One picture is for all; those who began first may be some pictures behind on a busy machine.
    assert len({event for events in rounds for event in events}) <= 10
    assert backend.num_asked <= 20
    for stream in streams:
        await stream.aclose()
    assert watchers.number == 0
    await asyncio.sleep(0.05)
    backend.num_asked = 0
    await asyncio.sleep(0.05)
    assert backend.num_asked == 0


async def test_a_client_that_leaves_watches_no_more(model, backend):
    await events_of(app_of(model), 1)
    await asyncio.sleep(1.2)  # the next picture is due after a second
    assert backend.num_asked == 1


async def test_a_watcher_that_is_too_slow_is_cut_off_and_others_are_not(model):
    watchers = Watchers({"mars": model}, period_s=0.001)
    _, slow = await watchers.watch(None)
    _, fast = await watchers.watch(None)
    await anext(slow)
    async with aclosing(fast):
        for _ in range(60):
            await anext(fast)
        assert watchers.number == 1
    rest = [event async for event in slow]
    assert len(rest) < 60


async def test_too_many_watchers_are_refused(model):
    watchers = Watchers({"mars": model})
    streams = [(await watchers.watch(0))[1] for _ in range(64)]
    with pytest.raises(ApiError) as refused:
        await watchers.watch(0)
    assert (refused.value.status, refused.value.code) == (429, "too_many_watchers")
    for stream in streams:
        await stream.aclose()


async def test_a_governor_that_fails_is_told_and_the_stream_goes_on(mars, loops, model):
    broken = served("broken", mars, SilentBackend(loops["mars"]))
    for event in await events_of(app_of(model, broken), 2):
        assert "the governor does not answer" in event["models"]["broken"]["problem"]
        assert "<b>" not in json.dumps(event)
        assert "rows" in event["models"]["mars"]


@pytest.mark.parametrize("since", ["-1", "x", "1e99", "99999999999999"])
async def test_an_invalid_time_is_refused(model, since):
    async with client_of(app_of(model)) as client:
        response = await client.get(EVENTS, params={"since_s": since})
        client.error_of(response, 400, "since_s")


async def test_an_administrators_key_watches(model):
    app = app_of(model, keys={"entries": ENTRIES})
    assert len(await events_of(app, 1, headers=bearer("admin"))) == 1
