"""Handles long texts beside the event loop, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mars_serve.api.errors import ApiError

_Found = TypeVar("_Found")
_SHORT = 4096
_LONG = 2**18
_MAX_LONG = 32
_RETRY_AFTER_S = 2


class TextThreads:
    """Threads for work on texts that would hold up all other requests."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "texts")
        # A long text takes a hundred times its own memory, so there is one at a time. It has a
        # thread of its own for shorter ones not to wait for it.
        self._long_thread = ThreadPoolExecutor(1, "long-text")
        self._num_long = 0

    async def run(self, size: int, work: Callable[[], _Found]) -> _Found:
        """Do some work on a text, at once if the text is short.

        Args:
            size: bytes of the text, or a number that takes as long.
            work: what to do; it may run in any thread.

        Raises:
            ApiError: status 503: many long texts wait already.
        """
        if size <= _SHORT:
            return work()
        loop = asyncio.get_running_loop()
        if size <= _LONG:
            return await loop.run_in_executor(self._threads, work)
        if self._num_long >= _MAX_LONG:
            reason = "many long prompts wait to be tokenized; try again shortly"
            raise ApiError(503, reason, code="queue_full", retry_after_s=_RETRY_AFTER_S)
        self._num_long += 1
        try:
            return await loop.run_in_executor(self._long_thread, work)
        finally:
            self._num_long -= 1

    async def write(self, size: int, work: Callable[[], _Found]) -> _Found:
        """Do some work on a response, which is never refused; see `run`."""
        if size <= _SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
