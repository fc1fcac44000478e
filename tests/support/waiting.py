"""Waits for conditions that other processes bring about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def wait_until(holds: Callable[[], object], timeout_s: float, describe: Callable[[], str]) -> None:
    """Wait until a condition holds; fail with ``describe()`` after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.1)


async def until(find: Callable[[], Awaitable[T]], what: str, timeout_s: float = 600) -> T:
    """Await ``find()`` again and again, and return its first result that is true.

    Args:
        find: Looks for what the test waits for.
        what: Name of that in the failure's message.
        timeout_s: Seconds after which the test fails; a busy machine needs many of them.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := await find():
            return found
        await asyncio.sleep(0.1)
    return pytest.fail(f"{what} did not happen in time")


async def soon(holds: Callable[[], object]) -> None:
    """Wait until a condition holds that threads of this process bring about within moments."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "waited for 20 s"
        await asyncio.sleep(0.005)
