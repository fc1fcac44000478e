from __future__ import annotations

import asyncio
import json

import pytest

from rest.api_keys import bearer, key_entry
from rest.rest_server import LoopBackend, app_of, client_of, served

ORDER = {"model": "mars", "requests_per_s": 8, "seconds": 1, "max_tokens": 2}
ENTRIES = [key_entry("admin", admin=True)]


@pytest.fixture
def paced(mars, loops):
    return served("mars", mars, LoopBackend(loops["mars"]), rehearsal={})


async def ended(app) -> dict[tuple[str, str], float]:
    """Return the number of requests that have ended, by outcome."""
    found = {}
    for family in app.state.telemetry.collect():
        for sample in family.samples:
            if sample.name == "marsray_requests_total" and sample.labels["model"] == "mars":
                found[sample.labels["outcome"]] = sample.value
    return found


async def test_a_burst_is_sent_as_the_callers_requests_and_one_at_a_time(paced):
    app = app_of(paced, keys={"entries": ENTRIES})
    async with client_of(app, headers=bearer("admin")) as client:
        response = await client.post("/admin/burst", json=ORDER)
        assert response.status_code == 202
        assert response.json() == {"model": "mars", "requests_per_s": 8, "seconds": 1}
        again = await client.post("/admin/burst", json=ORDER)
        assert "a burst to 'model' runs" in client.error_of(again, 409, None)
        assert int(again.headers["retry-after"]) >= 1
    picture = await paced.backend.picture(None)
    assert json.loads(picture.text)["state"]["burst"]["requests_per_s"] == 8
    async with asyncio.timeout(20):
        while not await ended(app):
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.1)  # a slow machine may send fewer, never more
    assert set(await ended(app)) <= {"stop", "length"}
    assert sum((await ended(app)).values()) <= 8


async def test_a_model_that_is_not_paced_takes_no_burst(mars, loops):
    model = served("mars", mars, LoopBackend(loops["mars"]))
    async with client_of(app_of(model)) as client:
        response = await client.post("/admin/burst", json=ORDER)
        assert "'mars' is not paced" in client.error_of(response, 400, "model")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"requests_per_s": 0}, 400, "requests_per_s"),
        ({"requests_per_s": 101}, 400, "requests_per_s"),
        ({"requests_per_s": float("nan")}, 400, "requests_per_s"),
        ({"seconds": 61}, 400, "seconds"),
        ({"max_tokens": 5000}, 400, "max_tokens"),
        ({"prompt": "x"}, 400, "prompt"),
    ],
)
async def test_a_burst_beyond_its_bounds_is_refused(paced, fields, status, param):
    async with client_of(app_of(paced)) as client:
        await client.refusal("/admin/burst", {**ORDER, **fields}, status, param)
