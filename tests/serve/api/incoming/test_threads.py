from __future__ import annotations

import asyncio
import threading

import pytest

from mars_serve.api.errors import ApiError
from mars_serve.api.incoming.threads import TextThreads

SHORT, MEDIUM, LONG = 4096, 2**18, 2**18 + 1
HANG_S = 30


async def test_short_work_is_done_at_once():
    assert await TextThreads().run(SHORT, threading.get_ident) == threading.get_ident()


@pytest.mark.parametrize("size", [SHORT + 1, MEDIUM, LONG])
async def test_longer_work_goes_on_beside_the_loop(size):
    threads, begun, may_end = TextThreads(), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return may_end.wait(HANG_S)

    tasks = [asyncio.create_task(run(size, work)) for run in (threads.run, threads.write)]
    assert await asyncio.to_thread(begun.wait, HANG_S)
    may_end.set()  # which the loop could not do if it waited itself
    assert await asyncio.gather(*tasks) == [True, True]


async def test_one_long_text_is_handled_at_a_time_and_shorter_ones_pass_it():
    threads, may_end = TextThreads(), threading.Event()
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert may_end.wait(HANG_S)
        running -= 1

    tasks = [asyncio.create_task(threads.run(LONG, work)) for _ in range(4)]
    assert await threads.run(MEDIUM, lambda: "passed") == "passed"
    may_end.set()
    await asyncio.gather(*tasks)
    assert most == 1


async def test_few_long_texts_may_wait_but_every_response_is_written():
    threads, may_end = TextThreads(), threading.Event()
    tasks = [asyncio.create_task(threads.run(LONG, may_end.wait)) for _ in range(32)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as refusal:
        await threads.run(LONG, may_end.wait)
    assert (refusal.value.status, refusal.value.code) == (503, "queue_full")
    assert refusal.value.retry_after_s
    assert await threads.write(LONG, lambda: "written") == "written"
    may_end.set()
    await asyncio.gather(*tasks)
    assert await threads.run(LONG, lambda: "room again") == "room again"
