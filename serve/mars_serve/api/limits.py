"""Rate limits per key: concurrent requests, requests per minute and tokens per minute.

Prompt tokens are charged when the request arrives and output tokens once they are generated, so
that no output length has to be guessed. A key is refused while its account is empty. Running
requests may overdraw an account; the key then waits until it has refilled, so the rate holds over
time. Charges are booked when the remaining amount is needed, not with every token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller
from mars_serve.api.pace import Pace

_MINUTE_S = 60
_ROUNDING = 1e-6  # tolerance for rounding errors in sums of refills


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
    """A running request, whose tokens are charged while it generates."""

    def __init__(self, num_tokens: Callable[[], int]) -> None:
        self._num_tokens = num_tokens
        self._num_charged = 0

    def newly_used(self) -> int:
        """Return the number of tokens used since the last call."""
        before, self._num_charged = self._num_charged, self._num_tokens()
        return self._num_charged - before


@dataclass
class KeyUsage:
    """The running requests and accounts of one key."""

    pace: Pace
    """Pace at which the key's requests end."""
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
    def admit(self, caller: Caller, num_tokens: Callable[[], int]) -> Iterator[KeyUsage]:
        """Admit a request, which counts as running within the block, and yield its key's usage.

        Args:
            caller: The key's holder, with its limits.
            num_tokens: Returns the request's prompt and output tokens so far.

        Raises:
            ApiError: status 429 with the seconds to wait: one of the key's limits is reached.
        """
        usage = self._usage_of(caller)
        limit = self._share(caller.max_concurrent)
        if limit is not None and len(usage.running) >= limit:
            reason = f"{len(usage.running)} requests are running already"
            raise usage.refusal(reason, usage.pace.wait_s(1))
        waits_s = {account.wait_s(1): kind for kind, account in usage.accounts.items()}
        wait_s = max(waits_s, default=0)
        if wait_s:
            raise usage.refusal(f"too many {waits_s[wait_s]} in a minute", wait_s)
        if "requests" in usage.accounts:
            usage.accounts["requests"].take(1)
        request = _Running(num_tokens)
        usage.running.add(request)
        try:
            yield usage
        finally:
            usage.settle()
            usage.running.remove(request)
            usage.pace.ended()

    def _usage_of(self, caller: Caller) -> KeyUsage:
        usage = self._usage.setdefault(caller.name, KeyUsage(Pace(self._clock)))
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
