from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable

import httpx
import pytest

from mars_serve.bench.load.plan import LoadPlan
from mars_serve.bench.load.send import Replay, Replayed
from rest.sent_requests import planned


async def replay_one(answer: Callable[[httpx.Request], httpx.Response]) -> Replayed:
    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        plan = LoadPlan("m", [planned()], [5, 6], 0)
        return await Replay(client, plan, 10, lambda *_: None).run()


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (200, 'data: {"choices": [{"text": "x"}], "mars": {"tokens": 1}}\n\n', "stream cut off"),
        (200, "data: {\n\ndata: [DONE]\n\n", "malformed event"),
        (502, "<html>", "502"),
        (200, ": ping\n\ndata: [DONE]\n\n", None),
    ],
)
async def test_an_answer_that_no_marsray_server_gives_is_reported(
    status: int, text: str, error: str | None
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, text=text)

    replayed = await replay_one(answer)
    (sent,) = replayed.sent
    assert (sent.status, sent.error) == (status, error)


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.EMFILE, "sender: too many open files"), (errno.ECONNREFUSED, "ConnectError")],
)
async def test_too_many_open_files_are_the_senders_failure(number: int, error: str) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        try:  # as anyio does for a host with two addresses
            attempts = [OSError(number, os.strerror(number)), OSError("no route")]
            raise OSError("All connection attempts failed") from ExceptionGroup("two", attempts)
        except OSError as failed:
            raise httpx.ConnectError(str(failed)) from failed

    replayed = await replay_one(refuse)
    assert [sent.error for sent in replayed.sent] == [error]


async def test_clients_wait_for_their_answers() -> None:
    running = most = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return httpx.Response(200, text="data: [DONE]\n\n")

    transport = httpx.MockTransport(answer)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        plan = LoadPlan("m", [planned(index) for index in range(7)], [5, 6], 0)
        replay = Replay(client, plan, 10, lambda *_: None, num_clients=2)
        assert sorted(each.request.index for each in (await replay.run()).sent) == list(range(7))
        assert most == 2
        replay = Replay(client, plan, 10, lambda *_: None, num_clients=2, limit_s=0)
        assert (await replay.run()).sent == []
