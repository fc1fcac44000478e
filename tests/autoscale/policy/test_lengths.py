import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.policy.lengths import (
    NUM_SPANS,
    USUAL_TOKENS,
    LengthCounter,
    LengthCounts,
    counts_of,
)

LOOK_S = 0.5
TOKENS_PER_S = 40.0

lengths = st.lists(st.integers(1, 5_000), min_size=1, max_size=300)


class Stream:
    """Requests that arrive evenly, and decode at `TOKENS_PER_S` each.

    ``known`` is what the outer loop knows of earlier ones.
    """

    def __init__(self, rate, output, known=LengthCounts(), max_tokens=4_096):  # noqa: B008
        self.rate, self.output, self.known, self.max_tokens = rate, output, known, max_tokens
        self.counter, self.before = LengthCounter(), LengthCounts()
        self.now_s, self.num, self.rows = 0.0, 0, []

    def run(self, seconds):
        """Return the counts after some seconds more."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += LOOK_S
            while self.num < self.rate * self.now_s:
                self.rows.append([0, self.output()])
                self.counter.begun(self.max_tokens)
                self.num += 1
            for row in self.rows:
                grown = min(row[0] + int(TOKENS_PER_S * LOOK_S), row[1])
                self.counter.grown(row[0], grown)
                row[0] = grown
                if grown == row[1]:
                    self.counter.ended(grown)
            self.rows = [row for row in self.rows if row[0] < row[1]]
            counts = self.counter.counts
            self.known = self.known.followed_by(counts - self.before)
            self.before = counts
        return self.known


def exponential(mean, seed=0):
    random = Random(seed)
    return lambda: 1 + int(random.expovariate(1 / mean))


def test_nothing_known_is_the_usual_length_within_max_tokens():
    assert LengthCounts().mean == pytest.approx(USUAL_TOKENS, rel=0.1)
    few = LengthCounter()
    few.begun(max_tokens=16)
    assert 8 <= few.counts.mean <= 16


def test_long_outputs_are_seen_while_they_run():
    """None of the first outputs ends before 37.5 s."""
    stream = Stream(4, lambda: 1_500)
    assert stream.run(2).mean > 256
    assert stream.run(8).mean > 0.4 * 1_500
    assert stream.run(20).mean == pytest.approx(1_500, rel=0.25)
    assert stream.run(30).mean == pytest.approx(1_500, rel=0.05)


@pytest.mark.parametrize("mean", [1, 5, 28, 211, 1_000])
def test_the_mean_of_a_steady_load_is_found(mean):
    stream = Stream(8, exponential(mean))
    found = [stream.run(60).mean, *(stream.run(10).mean for _ in range(12))]
    assert sum(found) / len(found) == pytest.approx(mean, rel=0.1, abs=1.0)
    assert all(0.7 * mean - 1 <= each <= 1.5 * mean + 1 for each in found)


@pytest.mark.parametrize(("before", "after"), [(200, 1_500), (1_500, 28), (28, 600)])
def test_a_new_kind_of_load_is_followed(before, after):
    old = Stream(4, exponential(before)).run(180)
    new = Stream(4, lambda: after, known=old)
    assert abs(new.run(60).mean - after) < 0.25 * abs(before - after)
    assert new.run(90).mean == pytest.approx(after, rel=0.1, abs=40)


def test_what_was_counted_before_a_hundred_requests_counts_half():
    known = counts_of([100] * 10, num_begun=10)
    later = known.followed_by(counts_of([], num_begun=100))
    assert sum(later.ended) == pytest.approx(5)
    assert known.followed_by(LengthCounts()) == known


def test_outputs_are_no_longer_than_max_tokens_on_average():
    assert Stream(4, lambda: 100, max_tokens=100).run(5).mean <= 100


@given(ended=lengths, running=lengths)
def test_counts_do_not_depend_on_how_outputs_grew(ended, running):
    counts = counts_of(ended, running)
    steps = LengthCounter()
    for length in (*ended, *running):
        for before in range(0, length, 7):
            steps.grown(before, min(before + 7, length))
    for length in ended:
        steps.ended(length)
    assert steps.counts == counts
    assert sum(counts.tokens) == sum(ended) + sum(running)
    assert sum(counts.ended) == len(ended)
    assert len(counts.tokens) == NUM_SPANS


@given(ended=lengths)
def test_the_mean_of_ended_outputs_is_theirs(ended):
    ended = ended * 100  # so that the expectation has no weight
    assert counts_of(ended).mean == pytest.approx(sum(ended) / len(ended), rel=0.02, abs=1)


@given(ended=st.lists(st.integers(0, 10**7)), running=st.lists(st.integers(0, 10**7)))
def test_the_mean_is_always_a_length(ended, running):
    mean = counts_of(ended, running).mean
    assert math.isfinite(mean)
    assert mean >= 1
