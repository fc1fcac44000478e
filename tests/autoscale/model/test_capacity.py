import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.model.capacity import Capacity, Rung, StepTime, linear_step_time

AR = Rung(1.0, 1.0, 0.0)
SURE = Rung(0.95, 1.695, 1.7, 3)


def capacity(*rungs, slots=16):
    return Capacity(linear_step_time(0.032, 128), (AR, *rungs), slots, 20_000)


def test_step_time_between_and_past_its_points():
    measured = StepTime((1, 8, 64), (0.010, 0.012, 0.040))
    assert measured.at(0) == 0.010
    assert measured.at(4.5) == pytest.approx(0.011)
    assert measured.at(120) == pytest.approx(0.068)
    assert StepTime((1, 8), (0.02, 0.01)).at(100) == 0.01, "a fall does not go on"
    assert linear_step_time(0.032, 128).at(256) == pytest.approx(0.096)


def test_speed_and_break_even():
    """By hand: 16 rows take 16 positions plainly and 16 * 4.695 at 0.95."""
    both = capacity(SURE)
    assert both.tokens_per_s(AR) == pytest.approx(16 / (0.032 * (1 + 16 / 128)))
    assert both.tokens_per_s(SURE) == pytest.approx(16 * 1.695 / (0.032 * (1 + 75.12 / 128)))
    # b < K (TF - 1) / M = 128 * 0.695 / 3
    assert both.break_even_batch(SURE) == 29
    assert both.gain(SURE, 29) > 1 > both.gain(SURE, 30)
    assert both.break_even_batch(AR) == 0


def test_the_dead_zone_is_skipped():
    barely = Rung(0.99, 1.2, 0.1, 3)
    assert capacity(barely, SURE).useful(1.05) == (AR, SURE)
    assert capacity(SURE, slots=30).useful(1.0) == (AR,)


def test_what_a_mixture_of_others_beats_is_skipped():
    dear = Rung(0.9, 1.72, 6.0, 3)  # hardly faster than SURE, at far more loss
    deep = Rung(0.8, 2.5, 7.0, 3)
    assert capacity(SURE, dear, deep).useful(1.0) == (AR, SURE, deep)


@given(
    st.lists(
        st.tuples(st.floats(1.0, 4.0), st.floats(0.0, 30.0)), min_size=1, max_size=8, unique=True
    ),
    st.integers(1, 64),
)
def test_useful_rungs_are_faster_and_dearer_each(points, slots):
    rungs = [
        Rung(1 - (i + 1) / 20, tokens, loss, 3)
        for i, (tokens, loss) in enumerate(
            zip(*map(sorted, zip(*points, strict=True)), strict=True)
        )
    ]
    made = capacity(*rungs, slots=slots)
    useful = made.useful(1.05)
    assert useful[0] == AR
    speeds, losses = [made.tokens_per_s(rung) for rung in useful], [rung.loss for rung in useful]
    assert speeds == sorted(speeds)
    assert losses == sorted(losses)
    assert all(made.gain(rung) >= 1.05 for rung in useful[1:])
