import pytest

from mars_autoscale.queueing.estimate import StartPace


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pace(clock):
    return StartPace(clock)


def run(clock, pace, seconds, tokens_per_s):
    for _ in range(seconds):
        pace.began(tokens_per_s)
        pace.note_waiting(True)
        clock.now_s += 1.0


def test_nothing_is_refused_or_told_before_a_pace_is_known(clock, pace):
    assert pace.wait_s(1_000) is None
    pace.note_waiting(True)
    run(clock, pace, 4, 100)
    assert pace.wait_s(1_000) is None
    assert not pace.is_hopeless(10**9, clock.now_s + 1.0)


def test_a_steady_pace_tells_the_wait(clock, pace):
    pace.note_waiting(True)
    run(clock, pace, 20, 100)
    assert pace.wait_s(1_000) == pytest.approx(10.0)
    assert pace.wait_s(0) == 0.0


def test_a_request_is_refused_only_if_it_would_be_late_at_the_best_pace(clock, pace):
    pace.note_waiting(True)
    run(clock, pace, 10, 100)
    run(clock, pace, 5, 200)
    run(clock, pace, 10, 50)
    assert pace.wait_s(1_000) == pytest.approx(10.0)
    assert not pace.is_hopeless(1_000, clock.now_s + 5.1)
    assert pace.is_hopeless(1_000, clock.now_s + 4.9)
    assert not pace.is_hopeless(1_000, clock.now_s + 2.6, speedup=2.0)
    assert pace.is_hopeless(1_000, clock.now_s + 2.4, speedup=2.0)


def test_the_pace_of_arrivals_is_not_taken_for_that_of_the_replicas(clock, pace):
    for _ in range(60):
        pace.began(1)
        pace.note_waiting(False)
        clock.now_s += 1.0
    assert pace.wait_s(1_000) is None
    for _ in range(10):  # requests wait for a moment now and then
        pace.note_waiting(True)
        clock.now_s += 3.0
        pace.began(1)
        pace.note_waiting(False)
        clock.now_s += 3.0
    assert pace.wait_s(1_000) is None


def test_a_stand_still_is_no_reason_to_refuse_and_old_paces_are_forgotten(clock, pace):
    pace.note_waiting(True)
    clock.now_s += 1_000.0
    assert pace.wait_s(10) is None
    assert not pace.is_hopeless(10**9, clock.now_s)
    run(clock, pace, 10, 100)
    assert pace.is_hopeless(10**6, clock.now_s + 1.0)
    pace.note_waiting(False)
    clock.now_s += 601.0
    assert not pace.is_hopeless(10**6, clock.now_s + 1.0)
