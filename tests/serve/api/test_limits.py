from __future__ import annotations

import pytest

from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller
from mars_serve.api.limits import KeyLimits, KeyUsage
from rest.api_keys import FakeClock


class Tokens:
    """A count of the tokens that a request has used."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self) -> int:
        return self.num


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def limits(clock: FakeClock) -> KeyLimits:
    return KeyLimits(clock=clock)


def use(limits: KeyLimits, caller: Caller, num_tokens: int = 0) -> KeyUsage:
    with limits.admit(caller, lambda: num_tokens) as usage:
        return usage


def refusal_of(limits: KeyLimits, caller: Caller) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        use(limits, caller)
    error = refusal.value
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    return error


def test_concurrent_requests_are_limited_per_key(limits):
    caller = Caller("a", max_concurrent=2)
    with limits.admit(caller, Tokens()):
        with limits.admit(caller, Tokens()):
            assert refusal_of(limits, caller).retry_after_s == 1
            use(limits, Caller("b", max_concurrent=1))  # the limit of another key is not affected
        use(limits, caller)
    use(limits, caller)


def test_a_busy_key_is_told_how_long_its_requests_take(limits, clock):
    caller = Caller("a", max_concurrent=1)
    for _ in range(20):
        with limits.admit(caller, Tokens()):
            clock.now_s += 6
    with limits.admit(caller, Tokens()):
        clock.now_s += 6
        assert refusal_of(limits, caller).retry_after_s == pytest.approx(6, rel=0.1)


def test_a_failed_request_no_longer_counts_as_running(limits):
    caller = Caller("a", max_concurrent=1)
    with pytest.raises(ZeroDivisionError), limits.admit(caller, Tokens()):
        raise ZeroDivisionError
    use(limits, caller)


def test_requests_per_minute_are_limited(limits, clock):
    caller = Caller("a", requests_per_minute=3)
    for _ in range(3):
        use(limits, caller)
    assert refusal_of(limits, caller).retry_after_s == 20
    clock.now_s += 13.5
    assert refusal_of(limits, caller).retry_after_s == pytest.approx(6.5)
    clock.now_s += 7
    use(limits, caller)
    refusal_of(limits, caller)


def test_refused_requests_cost_nothing(limits, clock):
    caller = Caller("a", requests_per_minute=1)
    use(limits, caller)
    for _ in range(6):
        clock.now_s += 9.9
        refusal_of(limits, caller)
    clock.now_s += 0.7
    use(limits, caller)


@pytest.mark.parametrize("per_minute", [1, 7, 13, 60, 997, 10**6])
def test_waiting_for_retry_after_is_enough(limits, clock, per_minute):
    caller = Caller("a", requests_per_minute=per_minute, tokens_per_minute=per_minute)
    for _ in range(20):
        use(limits, caller, num_tokens=per_minute + 3)
        clock.now_s += refusal_of(limits, caller).retry_after_s


def test_an_overdrawn_account_must_refill_first(limits, clock):
    caller = Caller("a", tokens_per_minute=60)
    use(limits, caller, num_tokens=59)
    use(limits, caller, num_tokens=100)  # one token was left
    assert refusal_of(limits, caller).retry_after_s == 100
    clock.now_s += 99
    refusal_of(limits, caller)
    clock.now_s += 1
    use(limits, caller)


def test_running_requests_are_charged_while_they_generate(limits, clock):
    caller, tokens = Caller("a", tokens_per_minute=60), Tokens()
    with limits.admit(caller, tokens):
        tokens.num = 40
        assert use(limits, caller).headers()["x-ratelimit-remaining-tokens"] == "20"
        tokens.num = 60
        refusal_of(limits, caller)
        clock.now_s += 30
        use(limits, caller, num_tokens=30)
        tokens.num = 65
    assert refusal_of(limits, caller).retry_after_s == 6


def test_a_stream_is_charged_before_its_account_is_capped(limits, clock):
    caller, tokens = Caller("a", tokens_per_minute=60), Tokens()
    with limits.admit(caller, tokens):
        tokens.num = 60
        clock.now_s += 60  # the account is full again
    assert use(limits, caller).headers()["x-ratelimit-remaining-tokens"] == "60"


def test_headers_report_limit_remainder_and_reset(limits):
    caller = Caller("a", requests_per_minute=60, tokens_per_minute=600)
    headers = use(limits, caller, num_tokens=90).headers()
    assert headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "510",
        "x-ratelimit-reset-tokens": "9.000s",
    }
    use(limits, caller, num_tokens=1000)
    refused = refusal_of(limits, caller).headers
    assert refused["x-ratelimit-remaining-tokens"] == "0"
    assert refused["x-ratelimit-remaining-requests"] == "58"
    assert use(limits, Caller("b", max_concurrent=1)).headers() == {}


def test_limits_are_divided_among_processes(clock):
    limits = KeyLimits(num_shares=4, clock=clock)
    caller = Caller("a", max_concurrent=9, requests_per_minute=3)
    with limits.admit(caller, Tokens()):
        refusal_of(limits, caller)  # each process allows one request
    more = Caller("b", max_concurrent=9)
    with limits.admit(more, Tokens()), limits.admit(more, Tokens()):
        refusal_of(limits, more)


def test_changed_limits_apply_from_then_on(limits, clock):
    use(limits, Caller("a", tokens_per_minute=60), num_tokens=60)
    use(limits, Caller("a"), num_tokens=999)  # for a while there is no limit
    caller = Caller("a", tokens_per_minute=600)
    use(limits, caller, num_tokens=600)
    clock.now_s += 10
    smaller = Caller("a", tokens_per_minute=6)
    use(limits, smaller, num_tokens=6)
    refusal_of(limits, smaller)
