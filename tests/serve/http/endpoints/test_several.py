from __future__ import annotations

import pytest

from rest_requests import BODIES, CHAT, COMPLETION, COMPLETIONS, text_of
from rest_server import LoopBackend, until_idle


@pytest.mark.parametrize("path", BODIES)
async def test_several_choices_share_one_prompt(client, path):
    one = await client.answer(path, BODIES[path])
    several = await client.answer(path, {**BODIES[path], "n": 3, "best_of": 3})
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert [{**choice, "index": 0} for choice in several["choices"]] == one["choices"] * 3
    usage = several["usage"]
    assert usage["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert usage["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert several["mars"] == {**one["mars"], "forward_passes": 3 * one["mars"]["forward_passes"]}


@pytest.mark.parametrize("path", BODIES)
async def test_streams_of_several_choices_interleave(client, path):
    body = {**BODIES[path], "n": 3, "confidence_threshold": 0.05}
    whole = await client.answer(path, body)
    body["stream_options"] = {"include_usage": True}
    *events, last = await client.events(path, body)
    assert last["usage"] == whole["usage"]
    for index in range(3):
        mine = [event for event in events if event["choices"][0]["index"] == index]
        choices = [event["choices"][0] for event in mine]
        text = "".join(text_of(choice) for choice in choices)
        assert text == text_of(whole["choices"][index])
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["mars"]["forward_passes"] == len(mine)
        if path == CHAT:
            assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (
                len(mine) - 1
            )
    order = [event["choices"][0]["index"] for event in events]
    assert order != sorted(order)


async def test_a_choice_that_cannot_be_queued_ends_the_others(
    mars, make_loop, client_over, monkeypatch
):
    loop = make_loop(mars, max_requests=2)
    ended, cancel = list[str](), loop.engine.cancel
    monkeypatch.setattr(loop.engine, "cancel", lambda name: (ended.append(name), cancel(name)))
    for stream in (False, True):
        async with client_over(LoopBackend(loop)) as client:
            body = {**COMPLETION, "n": 3, "max_tokens": 200, "mode": "ar", "stream": stream}
            response = await client.post(COMPLETIONS, json=body)
        client.error_of(response, 503, None)
        assert response.json()["error"]["code"] == "queue_full"
        await until_idle(loop.engine)
    loop.stop()  # all earlier messages have then been handled
    assert len(ended) == 4, "two of each request had been queued"
