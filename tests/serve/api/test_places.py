from __future__ import annotations

from contextlib import ExitStack

import pytest

from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller
from mars_serve.api.limits import Places
from rest.api_keys import FakeClock

HOG, OTHER, THIRD = (Caller(name, is_alone=False) for name in ("hog", "other", "third"))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def made(clock: FakeClock, total: int = 12, per_key: int | None = None) -> Places:
    return Places(total, per_key, clock=clock)


def filled(places: Places, held: ExitStack, caller: Caller, num: int = 1) -> int:
    """Take places until the caller is refused for a limit of its own; return how many it got."""

    def fill() -> None:
        nonlocal count
        for count in range(0, 1000, num):  # noqa: B007 -- read when a place is refused
            held.enter_context(places.take(caller, num))

    count = 0
    with pytest.raises(ApiError, match=r"limits\.choices_per_key") as refusal:
        fill()
    assert (refusal.value.status, refusal.value.code) == (429, "rate_limit_exceeded")
    return count


def refusal_of(places: Places, caller: Caller, num: int = 1) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        places.check(caller, num)
    return refusal.value


def test_one_of_several_keys_takes_half_of_the_queue(clock):
    places = made(clock)
    with ExitStack() as held:
        assert filled(places, held, HOG) == 6
        assert filled(places, held, OTHER) == 3
        assert filled(places, held, THIRD) == 2
        places.check(Caller("fourth", is_alone=False), 1)
    with ExitStack() as held:
        assert filled(places, held, HOG) == 6, "the places are free again"


def test_every_output_of_a_request_takes_a_place(clock):
    places = made(clock)
    with ExitStack() as held:
        assert filled(places, held, HOG, 4) == 4
        assert filled(places, held, OTHER) == 4


def test_each_key_has_a_place_even_where_none_is_free(clock):
    places = made(clock, 2)
    with places.take(HOG, 1), places.take(OTHER, 1), places.take(THIRD, 1):
        assert refusal_of(places, THIRD).status == 429


@pytest.mark.parametrize("caller", [Caller(""), Caller("only")])
def test_a_single_key_and_a_server_without_keys_may_fill_the_queue(clock, caller):
    places = made(clock)
    with ExitStack() as held:
        for _ in range(50):  # the engine, which knows its room, refuses
            held.enter_context(places.take(caller, 1))


def test_a_given_limit_holds_for_a_single_key_too(clock):
    places = made(clock, per_key=3)
    with ExitStack() as held:
        assert filled(places, held, Caller("only")) == 3
        assert filled(places, held, OTHER) == 3
    error = refusal_of(places, HOG, 4)
    assert (error.status, error.param) == (400, "n")
    assert str(error).startswith("n: 4 outputs exceed the 3 that one key may have at once")


def test_a_failed_request_gives_its_places_back(clock):
    places = made(clock, per_key=1)
    with pytest.raises(ZeroDivisionError), places.take(HOG, 1):
        raise ZeroDivisionError
    places.check(HOG, 1)


# A full engine


def test_a_full_engine_is_not_asked_again_while_no_place_is_free(clock):
    places, caller = made(clock), Caller("")
    with ExitStack() as held:
        first = held.enter_context(ExitStack())
        first.enter_context(places.take(caller, 1))
        for _ in range(4):
            held.enter_context(places.take(caller, 1))
        places.check(caller, 1)
        places.note_full(1)
        error = refusal_of(places, caller)
        assert (error.status, error.code) == (503, "queue_full")
        first.close()
        places.check(caller, 1)
        assert refusal_of(places, caller, 2).status == 503
        places.note_full(3)  # which says nothing that was not known
        places.check(caller, 1)
        clock.now_s += 2
        places.check(caller, 50)


def test_after_a_flood_another_key_gets_the_places_that_become_free(clock):
    """The queue is smaller than was thought, because there are fewer replicas than there may be."""
    places = made(clock, 1000)
    with ExitStack() as held:
        ending = [held.enter_context(ExitStack()) for _ in range(10)]
        for each in ending:
            each.enter_context(places.take(HOG, 1))
        places.note_full(1)
        assert refusal_of(places, OTHER).code == "queue_full"
        for each in ending[:5]:
            each.close()
            assert refusal_of(places, HOG).code == "rate_limit_exceeded"
            places.check(OTHER, 1)
        assert filled(places, held, OTHER) == 3


# The wait that a refusal names


def waits_of(clock: FakeClock, num_held: int, *, every_s: float) -> float:
    """Return the wait with some places held, where an output ended every so many seconds."""
    places = made(clock, 10_000)
    for _ in range(100):
        with places.take(HOG, 1), places.generating(1):
            clock.now_s += every_s
    with places.take(HOG, num_held):
        return places.wait_s()


def test_the_wait_grows_with_the_queue_and_with_the_time_of_each(clock):
    assert waits_of(clock, 20, every_s=0.1) == pytest.approx(2, rel=0.02)
    assert waits_of(clock, 200, every_s=0.1) == pytest.approx(20, rel=0.02)
    assert waits_of(clock, 20, every_s=1.0) == pytest.approx(20, rel=0.05)


def test_the_wait_is_a_second_where_nothing_has_ended_lately(clock):
    places = made(clock)
    with places.take(HOG, 5):
        assert places.wait_s() == 1.0
    clock.now_s += 3600
    with places.take(HOG, 5):
        assert places.wait_s() == 1.0


def test_refusals_do_not_count_as_ends(clock):
    places = made(clock)
    for _ in range(50):
        clock.now_s += 0.01
        with pytest.raises(ZeroDivisionError), places.generating(1):
            raise ZeroDivisionError
    assert places.wait_s() == 1.0
