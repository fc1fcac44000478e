from __future__ import annotations

import asyncio

import pytest

from mars_serve.http.recent import Recent
from rest.api_keys import FakeClock


class Asked:
    """Answers with the number of the call, when it is let."""

    def __init__(self) -> None:
        self.num = 0
        self.is_let = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.num += 1
        number = self.num
        await self.is_let.wait()
        if self.error is not None:
            raise self.error
        return number


async def test_one_call_serves_all_who_ask_within_a_second():
    asked, clock = Asked(), FakeClock()
    recent = Recent(asked, clock=clock)
    waiting = [asyncio.ensure_future(recent(1)) for _ in range(76)]
    await asyncio.sleep(0)
    asked.is_let.set()
    assert await asyncio.gather(*waiting) == [1] * 76
    clock.now_s += 0.9
    assert await recent(1) == 1
    clock.now_s += 0.2
    assert [await recent(1), await recent(1)] == [2, 2]
    assert asked.num == 2
    assert [await recent(0), await recent(0)] == [3, 4]


async def test_who_leaves_takes_the_answer_from_nobody():
    asked = Asked()
    recent = Recent(asked, clock=FakeClock())
    leaving, staying = asyncio.ensure_future(recent(1)), asyncio.ensure_future(recent(1))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    asked.is_let.set()
    assert await staying == 1


async def test_a_failure_is_not_kept():
    asked = Asked()
    recent = Recent(asked, clock=FakeClock())
    asked.is_let.set()
    asked.error = OSError("lost")
    with pytest.raises(OSError, match="lost"):
        await recent(1)
    asked.error = None
    assert await recent(1) == 2
