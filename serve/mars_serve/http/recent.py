"""Answers that are expensive to get and stay useful for a moment."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class Recent(Generic[_Result]):
    """The result of a call that is made once for all who ask for it at about the same time."""

    def __init__(
        self,
        call: Callable[[], Awaitable[_Result]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._clock = clock
        self._begun_s = 0.0
        self._result: asyncio.Future[_Result] | None = None

    async def __call__(self, max_age_s: float) -> _Result:
        """Return the result of the latest call, or of a new one if that failed or is too old."""
        now_s = self._clock()
        result = self._result
        if result is None or (
            result.done()
            and (
                result.cancelled()
                or result.exception() is not None
                or now_s - self._begun_s >= max_age_s
            )
        ):
            self._begun_s = now_s
            self._result = result = asyncio.ensure_future(self._call())
        return await asyncio.shield(result)  # others wait for it, too
