"""Work on clients' texts: beside the event loop, by turns among keys, and with room for others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
import uvloop

from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller
from mars_serve.api.text_threads import LARGE, Line, Load, TextThreads

SHORT, MEDIUM = 4096, LARGE
ROOM = 16 * LARGE
HANG_S = 30
NUM = 7
ALONE = Caller("")
HOG, OTHER, THIRD = (Caller(name, is_alone=False) for name in ("hog", "other", "third"))


@pytest.fixture
def threads() -> TextThreads:
    """Threads for keys of which several are active."""
    threads = TextThreads(ROOM)
    for caller in (HOG, OTHER):
        with threads.load(caller):
            pass
    return threads


async def read(
    threads: TextThreads, caller: Caller, size: int, work: Callable[[], object]
) -> object:
    """Read a body of some size, as a request does."""
    with threads.load(caller) as load:
        threads.add(load, size)
        await threads.begin(load)
        return await threads.read(load, size, work)


async def test_short_work_is_done_at_once(threads):
    assert await read(threads, ALONE, SHORT, threading.get_ident) == threading.get_ident()


@pytest.mark.parametrize("size", [SHORT + 1, MEDIUM, LARGE + 1])
async def test_longer_work_goes_on_beside_the_loop(threads, size):
    begun, may_end = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return may_end.wait(HANG_S)

    tasks = [
        asyncio.create_task(read(threads, ALONE, size, work)),
        asyncio.create_task(threads.write(ALONE, size, work)),
    ]
    assert await asyncio.to_thread(begun.wait, HANG_S)
    may_end.set()  # which the loop could not do if it waited itself
    assert await asyncio.gather(*tasks) == [True, True]


async def test_one_large_body_is_read_at_a_time_and_shorter_ones_pass_it(threads):
    may_end = threading.Event()
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert may_end.wait(HANG_S)
        running -= 1

    tasks = [asyncio.create_task(read(threads, ALONE, LARGE + 1, work)) for _ in range(4)]
    assert await read(threads, ALONE, MEDIUM, lambda: "passed") == "passed"
    may_end.set()
    await asyncio.gather(*tasks)
    assert most == 1


@pytest.mark.parametrize("size", [SHORT + 1, LARGE + 1])
async def test_the_texts_of_one_key_do_not_keep_those_of_another_waiting(threads, size):
    """Another's is the next to begin, however many of the first key's wait."""
    order, begun, may_end = list[str](), threading.Event(), threading.Event()

    def work(name: str) -> None:
        order.append(name)
        begun.set()
        assert may_end.wait(HANG_S)

    tasks = [asyncio.create_task(read(threads, HOG, size, lambda: work("hog"))) for _ in range(NUM)]
    assert await asyncio.to_thread(begun.wait, HANG_S)
    tasks += [
        asyncio.create_task(read(threads, caller, size, lambda name=caller.name: work(name)))
        for caller in (OTHER, THIRD)
    ]
    await asyncio.sleep(0)
    if size < LARGE:
        while len(order) < 2:  # the last thread is kept from a key that has all others
            await asyncio.sleep(0.001)
        assert order == ["hog", "other"]
    may_end.set()
    await asyncio.gather(*tasks)
    assert {"other", "third"} <= set(order[:4])
    assert len(order) == NUM + 2


async def test_a_key_that_hangs_up_does_not_get_more_threads(threads):
    may_end = threading.Event()
    begun = list[int]()

    def work() -> None:
        begun.append(1)
        assert may_end.wait(HANG_S)

    for _ in range(5):
        task = asyncio.create_task(threads.write(HOG, SHORT + 1, work))
        await asyncio.sleep(0.01)
        task.cancel()
    assert await threads.write(OTHER, SHORT + 1, lambda: "passed") == "passed"
    assert len(begun) == 1
    may_end.set()
    assert await threads.write(HOG, SHORT + 1, lambda: "again") == "again"


@pytest.mark.parametrize("size", [SHORT + 1, LARGE + 1])
async def test_texts_are_read_again_after_no_thread_could_start(threads, size):
    before = threading.stack_size(2**47)  # no machine has room for such a thread
    try:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="new thread"):
                await asyncio.wait_for(read(threads, HOG, size, lambda: None), HANG_S)
    finally:
        threading.stack_size(before)
    reading = read(threads, HOG, size, lambda: "again")
    assert await asyncio.wait_for(reading, HANG_S) == "again"


@pytest.mark.parametrize("num", [1, 2, 3])
async def test_no_turn_is_lost_or_given_twice_however_those_who_wait_leave(num):
    line, num_held, most = Line(num, "texts", lambda caller: caller is not ALONE), 0, 0

    async def use(caller: Caller) -> None:
        nonlocal num_held, most
        begun_s = await line.take(caller)
        num_held += 1
        most = max(most, num_held)
        try:
            await asyncio.sleep(0)
        finally:
            num_held -= 1
            line.end(caller, begun_s)

    tasks = [asyncio.create_task(use((HOG, OTHER, THIRD)[index % 3])) for index in range(60)]
    for index in range(30):
        tasks[index * 7 % 60].cancel()  # before its turn, with it, or as it comes
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(num):
        await asyncio.wait_for(line.take(ALONE), HANG_S)
    assert most == num


async def test_the_json_of_one_body_of_a_key_is_read_at_a_time(threads):
    first, second, other = (arriving(threads, caller, MEDIUM) for caller in (HOG, HOG, OTHER))
    await threads.begin(first)
    waiting = asyncio.create_task(threads.begin(second))
    await asyncio.wait_for(threads.begin(other), HANG_S)
    await asyncio.sleep(0)
    assert not waiting.done()
    threads.end(first)
    await asyncio.wait_for(waiting, HANG_S)


async def test_a_key_whose_others_are_idle_has_all_threads():
    threads, both = TextThreads(ROOM), threading.Barrier(2, timeout=HANG_S)
    await asyncio.gather(*(read(threads, HOG, MEDIUM, both.wait) for _ in range(2)))


@pytest.mark.parametrize("first", [MEDIUM, LARGE + 1])
@pytest.mark.parametrize("second", [MEDIUM, LARGE + 1])
async def test_a_key_rests_behind_each_turn_while_others_are_active(threads, first, second):
    begins_s = list[float]()
    for size in (first, second):
        load = arriving(threads, HOG, size)
        await threads.begin(load)
        begins_s.append(time.monotonic())
        await threads.read(load, size, lambda: time.sleep(0.05))
    assert begins_s[1] - begins_s[0] > 0.19


def test_every_rest_ends_on_the_event_loop_of_the_proxies():
    """The clock of uvloop has steps of a millisecond, so a timer may fire before its time."""

    async def rest(line: Line) -> None:
        for _ in range(40):
            begun_s = await asyncio.wait_for(line.take(HOG), HANG_S)
            await asyncio.sleep(0.003)
            line.end(HOG, begun_s)

    uvloop.run(rest(Line(1, "texts", lambda _: True)))


async def test_a_client_that_reads_its_answer_slowly_holds_no_turn(threads):
    with threads.load(HOG) as load:
        threads.add(load, LARGE + 1)
        await threads.begin(load)
        await threads.read(load, LARGE + 1, lambda: None)
        assert await read(threads, OTHER, LARGE + 1, lambda: "passed") == "passed"


# Room


def arriving(threads: TextThreads, caller: Caller, size: int) -> Load:
    load = Load(caller)
    threads.add(load, size)
    return load


def taken(threads: TextThreads, caller: Caller, size: int) -> list[Load]:
    """Let bodies arrive until one is refused; return all others."""
    loads = list[Load]()

    def fill() -> None:
        for _ in range(1000):
            loads.append(Load(caller))
            threads.add(loads[-1], size)

    with pytest.raises(ApiError) as refusal:
        fill()
    assert (refusal.value.status, refusal.value.code) == (503, "busy")
    assert refusal.value.retry_after_s
    threads.end(loads.pop())
    return loads


def test_one_of_several_keys_takes_half_of_the_room(threads):
    large = 2 * LARGE
    loads = taken(threads, HOG, large)
    assert len(loads) == ROOM // large // 2
    assert len(taken(threads, OTHER, large)) == ROOM // large // 4
    arriving(threads, THIRD, large)
    for load in loads:
        threads.end(load)
        threads.end(load)  # which changes nothing
    assert len(taken(threads, HOG, large)) > 1


def test_a_key_without_others_takes_all_the_room(threads):
    assert len(taken(threads, ALONE, 2 * LARGE)) == ROOM // LARGE // 2
    assert len(taken(threads, ALONE, LARGE)) == ROOM // LARGE, "small ones have as much again"


async def test_a_body_takes_no_room_once_its_texts_are_read(threads):
    for size in (SHORT, MEDIUM, LARGE + 1):
        load = arriving(threads, HOG, size)
        await threads.begin(load)
        await threads.read(load, size, lambda: None)
        assert load.size == 0
