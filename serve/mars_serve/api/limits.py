"""Limits what one key may use: requests and tokens per minute, and places in a model's queue.

Prompt tokens are charged when the request arrives and output tokens once they are generated, so
that no output length has to be guessed. A key is refused while its account is empty. Running
requests may overdraw an account; the key then waits until it has refilled, so the rate holds over
time. Charges are booked when the remaining amount is needed, not with every token.

A request takes a place in the queue before its body is read, and once that is known one for each
output, until its answer has ended. Where there are several keys, one may hold as many places as are
free: alone it fills half of the queue, two fill a third each, and others always find room. An
engine that has said that it is full is not asked again while no place is free, so that refusals
stay fast under a flood.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.keys import Caller

_MINUTE_S = 60
_ROUNDING = 1e-6  # tolerance for rounding errors in sums of refills
_PACE_S = 60.0
"""Seconds over which ends are counted to tell the pace."""
_MAX_ENDS = 256
"""Largest number of ends that are remembered; the latest tell the pace well enough."""
_UNKNOWN_S = 1.0
"""Wait in seconds where nothing has ended lately, so that nothing is known of the pace."""
_FULL_S = 1.0
"""Seconds for which a full engine counts as full; afterwards it may have more replicas."""


class QueuePace:
    """Tells from the latest ends how long some more will take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends_s = deque[float](maxlen=_MAX_ENDS)

    def ended(self, num: int = 1) -> None:
        """Count requests or outputs that have ended."""
        self._ends_s.extend([self._clock()] * num)

    def wait_s(self, num: int) -> float:
        """Return the seconds in which ``num`` will end."""
        now_s = self._clock()
        while self._ends_s and self._ends_s[0] < now_s - _PACE_S:
            self._ends_s.popleft()
        if len(self._ends_s) < 2 or now_s <= self._ends_s[0]:
            return _UNKNOWN_S
        return num * (now_s - self._ends_s[0]) / len(self._ends_s)


class Account:
    """A token bucket: an allowance that refills evenly and holds at most one minute's worth."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.capacity = per_minute
        """Size of the bucket, which is also its refill per minute."""
        self._level = float(per_minute)
        self._counted_s = now_s

    def update(self, per_minute: int, now_s: float) -> None:
        """Add what has been refilled since the last update; ``per_minute`` may have changed."""
        gained = (now_s - self._counted_s) * per_minute / _MINUTE_S
        self.capacity, self._counted_s = per_minute, now_s
        self._level = min(self._level + gained, per_minute)

    def take(self, amount: int) -> None:
        """Spend an amount, even if that overdraws the account."""
        self._level -= amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until ``amount`` is available, 0 if it already is."""
        missing = amount - self._level
        return missing * _MINUTE_S / self.capacity if missing > _ROUNDING else 0.0

    @property
    def remaining(self) -> int:
        """Whole units that can be spent now."""
        return max(0, math.floor(self._level + _ROUNDING))

    @property
    def full_s(self) -> float:
        """Seconds until the bucket is full."""
        return self.wait_s(self.capacity)


class _Running:
    def __init__(self, num_tokens: Callable[[], int]) -> None:
        self._num_tokens = num_tokens
        self._num_charged = 0

    def newly_used(self) -> int:
        before, self._num_charged = self._num_charged, self._num_tokens()
        return self._num_charged - before


@dataclass
class KeyUsage:
    """The running requests and accounts of one key."""

    pace: QueuePace
    running: set[_Running] = field(default_factory=set)
    accounts: dict[str, Account] = field(default_factory=dict)
    """Accounts of the limited quantities, by name: ``requests`` or ``tokens``."""

    def settle(self) -> None:
        """Charge the tokens that running requests have used since the last call."""
        if tokens := self.accounts.get("tokens"):
            tokens.take(sum(request.newly_used() for request in self.running))

    def headers(self) -> dict[str, str]:
        """Return OpenAI's rate limit headers for the key."""
        self.settle()
        headers = {}
        for kind, account in self.accounts.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(account.capacity)
            headers[f"x-ratelimit-remaining-{kind}"] = str(account.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = f"{account.full_s:.3f}s"
        return headers

    def refusal(self, reason: str, wait_s: float) -> ApiError:
        """Return the error for a request beyond one of the key's limits."""
        return ApiError(
            429,
            f"rate limit of this key: {reason}; try again in {max(1, math.ceil(wait_s))} s",
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
            headers=self.headers(),
        )


class KeyLimits:
    """Usage of every key in one of ``num_shares`` processes that divide each limit evenly."""

    def __init__(self, *, num_shares: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_shares = num_shares
        self._clock = clock
        self._usage: dict[str, KeyUsage] = {}

    @contextmanager
    def admit(
        self, caller: Caller, num_tokens: Callable[[], int], *, is_new: bool = True
    ) -> Iterator[KeyUsage]:
        """Admit a request, which counts as running within the block, and yield its key's usage.

        ``num_tokens`` returns the request's prompt and output tokens so far. One that is not new
        was counted as a request before.

        Raises:
            ApiError: status 429 with the seconds to wait: one of the key's limits is reached.
        """
        usage = self._usage_of(caller)
        limit = self._share(caller.max_concurrent)
        if limit is not None and len(usage.running) >= limit:
            reason = f"{len(usage.running)} requests are running already"
            raise usage.refusal(reason, usage.pace.wait_s(1))
        accounts = {k: each for k, each in usage.accounts.items() if is_new or k != "requests"}
        waits_s = {account.wait_s(1): kind for kind, account in accounts.items()}
        wait_s = max(waits_s, default=0)
        if wait_s:
            raise usage.refusal(f"too many {waits_s[wait_s]} in a minute", wait_s)
        if "requests" in accounts:
            accounts["requests"].take(1)
        request = _Running(num_tokens)
        usage.running.add(request)
        try:
            yield usage
        finally:
            usage.settle()
            usage.running.remove(request)
            usage.pace.ended()

    def _usage_of(self, caller: Caller) -> KeyUsage:
        usage = self._usage.setdefault(caller.name, KeyUsage(QueuePace(self._clock)))
        usage.settle()  # charge first: update() caps the level at what the account holds
        now_s = self._clock()
        limits = {"requests": caller.requests_per_minute, "tokens": caller.tokens_per_minute}
        for kind, limit in limits.items():
            share = self._share(limit)
            if share is None:
                usage.accounts.pop(kind, None)
            elif kind in usage.accounts:
                usage.accounts[kind].update(share, now_s)
            else:
                usage.accounts[kind] = Account(share, now_s)
        return usage

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self._num_shares)


class Places:
    """The places in one model's queue, as one ingress replica gives them to keys."""

    def __init__(
        self, total: int, per_key: int | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with an empty queue for ``total`` places; there may turn out to be fewer.

        A key may hold at most ``per_key`` places; None shares them by what is free.
        """
        self._total = total
        self._per_key = per_key
        self._clock = clock
        self._held = Counter[str]()
        """Places by the name of the key that holds them."""
        self._num_held = 0
        self._pace = QueuePace(clock)
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
        """Hold places for ``num`` outputs within the block."""
        self.check(caller, num)
        self._held[caller.name] += num
        self._num_held += num
        try:
            yield
        finally:
            self._num_held -= num
            self._held[caller.name] -= num
            if not self._held[caller.name]:
                del self._held[caller.name]

    @contextmanager
    def generating(self, num: int) -> Iterator[None]:
        """Count ``num`` outputs as ended with the block, for the pace; not if it fails."""
        num_ended = num
        try:
            yield
        except Exception:
            num_ended = 0  # a refusal or failure tells nothing about the pace
            raise
        finally:
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
