"""How much a key may ask for at once and in a minute. Knows no HTTP and no model.

Tokens are charged when they are known: a prompt's with the request, an output's as they come. A key
is refused while its account is empty. So no guess at an output's length is needed, and none is
paid for that is not generated; an account may be overdrawn by what already runs, which the
key has to wait for, so that its rate holds over time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from mars_serve.errors import ApiError
from mars_serve.keys import Caller

_MINUTE_S = 60
_ROUNDING = 1e-6  # of sums of what has come in
_BUSY_S = 1
"""Seconds after which a key with too many requests at once may try again: nobody knows when one of
them ends."""


class Account:
    """A token bucket: an allowance that refills evenly, up to what a minute gives."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.capacity = per_minute
        """What a minute gives, and the most that it holds."""
        self._level = float(per_minute)
        self._counted_s = now_s

    def update(self, per_minute: int, now_s: float) -> None:
        """Count in what has come since; the allowance may have been changed."""
        gained = (now_s - self._counted_s) * per_minute / _MINUTE_S
        self.capacity, self._counted_s = per_minute, now_s
        self._level = min(self._level + gained, per_minute)

    def take(self, amount: int) -> None:
        """Spend; the account may be overdrawn."""
        self._level -= amount

    def wait_s(self, amount: float) -> float:
        """Seconds until so much is there; 0 where it is."""
        missing = amount - self._level
        return missing * _MINUTE_S / self.capacity if missing > _ROUNDING else 0.0

    @property
    def remaining(self) -> int:
        """What may still be spent now."""
        return max(0, math.floor(self._level + _ROUNDING))

    @property
    def full_s(self) -> float:
        """Seconds until it is full again."""
        return self.wait_s(self.capacity)


@dataclass
class _Usage:
    """What one key has in use."""

    num_running: int = 0
    accounts: dict[str, Account] = field(default_factory=dict)
    """By what they count: requests or tokens; only those that are limited."""


class KeyLimits:
    """What every key has used, in one of ``num_shares`` processes that share its limits evenly."""

    def __init__(self, *, num_shares: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_shares = num_shares
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    def admit(self, caller: Caller) -> Admission:
        """Let a request in; the caller has to close what it gets.

        Raises:
            ApiError: 429, with the seconds to wait, if one of the key's limits is reached.
        """
        usage = self._usage_of(caller)
        limit = self._share(caller.max_concurrent)
        if limit is not None and usage.num_running >= limit:
            raise _refusal(f"{usage.num_running} requests are running, the most", _BUSY_S, usage)
        requests, tokens = usage.accounts.get("requests"), usage.accounts.get("tokens")
        if requests and (wait_s := requests.wait_s(1)):
            raise _refusal("too many requests in a minute", wait_s, usage)
        if tokens and not tokens.remaining:
            raise _refusal("too many tokens in a minute", tokens.wait_s(1), usage)
        if requests:
            requests.take(1)
        usage.num_running += 1
        return Admission(usage, tokens)

    def _usage_of(self, caller: Caller) -> _Usage:
        usage = self._usage.setdefault(caller.name, _Usage())
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


class Admission:
    """One request that was let in; a context manager."""

    def __init__(self, usage: _Usage, tokens: Account | None) -> None:
        self._usage = usage
        self._tokens = tokens
        self._num_charged = 0

    def charge_up_to(self, num_tokens: int) -> None:
        """Charge the tokens of the request's prompt and output so far, each once."""
        if self._tokens is not None:
            self._tokens.take(num_tokens - self._num_charged)
            self._num_charged = num_tokens

    def headers(self) -> dict[str, str]:
        """OpenAI's headers of what is left."""
        return _headers(self._usage)

    def __enter__(self) -> Admission:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._usage.num_running -= 1


def _refusal(reason: str, wait_s: float, usage: _Usage) -> ApiError:
    wait = max(1, math.ceil(wait_s))
    return ApiError(
        429,
        f"rate limit of this key: {reason}; try again in {wait} s",
        code="rate_limit_exceeded",
        retry_after_s=wait,
        headers=_headers(usage),
    )


def _headers(usage: _Usage) -> dict[str, str]:
    headers = {}
    for kind, account in usage.accounts.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(account.capacity)
        headers[f"x-ratelimit-remaining-{kind}"] = str(account.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = f"{account.full_s:.3f}s"
    return headers
