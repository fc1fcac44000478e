"""Places in a model's queue, as one ingress replica gives them to keys.

Each output of a request takes a place from its arrival to its end. Where there are several keys,
one may hold as many places as are free: alone it fills half of the queue, two fill a third each,
and others always find room. An engine that has said that it is full is not asked again while no
place is free, so that refusals stay fast under a flood.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.keys import Caller
from mars_serve.api.pace import Pace

_FULL_S = 1.0
"""Seconds for which a full engine counts as full; afterwards it may have more replicas."""


class Places:
    """The places in one model's queue."""

    def __init__(
        self, total: int, per_key: int | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with an empty queue.

        Args:
            total: Number of places, which is known only to be this or less.
            per_key: Largest number that a key may hold; None shares them by what is free.
            clock: Returns the time in seconds.
        """
        self._total = total
        self._per_key = per_key
        self._clock = clock
        self._held = Counter[str]()
        """Places by the name of the key that holds them."""
        self._num_held = 0
        self._pace = Pace(clock)
        self._full = (total, clock() - _FULL_S)
        """Number of places with which an engine was full, and when, in seconds."""

    def check(self, caller: Caller, num: int) -> None:
        """Refuse outputs for which there is no place.

        Raises:
            ApiError: status 503: the queue is full; 429: the key holds as many as it may for now;
                400: a key may never hold so many.
        """
        full_at, full_s = self._full
        is_full = self._clock() - full_s < _FULL_S
        if is_full and self._num_held + num > full_at:
            raise queue_full(self.wait_s())
        held = self._held[caller.name]
        if self._per_key is not None:
            if num > self._per_key:
                reason = f"{num} outputs exceed the {self._per_key} that one key may have at once"
                raise invalid_value("n", f"{reason}; lower n or send several requests")
            most = self._per_key
        elif caller.is_alone or not self._num_held:
            return
        else:
            free = (min(full_at, self._total) if is_full else self._total) - self._num_held
            most = max(free - num + 1, 1)  # as many as are left free
        if held + num > most:
            raise self._refusal(held, most)

    @contextmanager
    def take(self, caller: Caller, num: int) -> Iterator[None]:
        """Hold places for ``num`` outputs within the block.

        Raises:
            ApiError: see `check`.
        """
        self.check(caller, num)
        self._held[caller.name] += num
        self._num_held += num
        num_ended = num
        try:
            yield
        except Exception:
            num_ended = 0  # a refusal or failure tells nothing about the pace
            raise
        finally:
            self._num_held -= num
            self._held[caller.name] -= num
            if not self._held[caller.name]:
                del self._held[caller.name]
            self._pace.ended(num_ended)

    def note_full(self, num: int) -> None:
        """Remember that an engine had no place for ``num`` outputs, which hold none any more."""
        now_s, full_at = self._clock(), self._num_held + num - 1
        before, before_s = self._full
        if now_s - before_s < _FULL_S:
            full_at = min(full_at, before)
        self._full = (full_at, now_s)

    def wait_s(self) -> float:
        """Return the seconds in which all outputs that hold a place will end."""
        return self._pace.wait_s(self._num_held)

    def _refusal(self, held: int, most: int) -> ApiError:
        reason = f"{held} of its outputs wait or run already, and it may have {most} at the moment"
        remedy = "wait for some of them, lower n, or ask for a higher limits.choices_per_key"
        return ApiError(
            429,
            f"queue limit of this key: {reason}; {remedy}",
            code="rate_limit_exceeded",
            retry_after_s=self._pace.wait_s(held),
        )


def queue_full(wait_s: float) -> ApiError:
    """Return the error 503 for a request that finds no place in the queue."""
    message = "the queue is full; try again shortly"
    return ApiError(503, message, code="queue_full", retry_after_s=wait_s)
