import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_autoscale.model.capacity import Capacity, Rung, StepTime, linear_step_time

AR = Rung(1.0, 1.0, 0.0)
SURE = Rung(0.95, 1.695, 1.7, 3)


def capacity(*rungs, max_num_seqs=16):
    return Capacity(linear_step_time(0.032, 128), (AR, *rungs), max_num_seqs, 20_000)


def test_step_times_are_interpolated_and_extended():
    measured = StepTime((1, 8, 64), (0.010, 0.012, 0.040))
    assert measured.at(0) == 0.010
    assert measured.at(4.5) == pytest.approx(0.011)
    assert measured.at(120) == pytest.approx(0.068)
    assert StepTime((1, 8), (0.02, 0.01)).at(100) == 0.01, "a falling last piece is not extended"
    assert linear_step_time(0.032, 128).at(256) == pytest.approx(0.096)


def test_speeds_and_the_break_even_batch():
    """By hand: 16 rows have 16 positions in mode ar and 16 * 4.695 at τ = 0.95."""
    both = capacity(SURE)
    assert both.tokens_per_s(AR) == pytest.approx(16 / (0.032 * (1 + 16 / 128)))
    assert both.tokens_per_s(SURE) == pytest.approx(16 * 1.695 / (0.032 * (1 + 75.12 / 128)))
    # b < K (TF - 1) / M = 128 * 0.695 / 3
    assert both.break_even_batch(SURE) == 29
    assert both.gain(SURE, 29) > 1 > both.gain(SURE, 30)
    assert both.break_even_batch(AR) == 0


def test_rungs_in_the_dead_zone_are_not_useful():
    barely = Rung(0.99, 1.2, 0.1, 3)
    assert capacity(barely, SURE).useful(1.05) == (AR, SURE)
    assert capacity(SURE, max_num_seqs=30).useful(1.0) == (AR,)


def test_a_rung_below_a_mixture_of_others_is_not_useful():
    dear = Rung(0.9, 1.72, 6.0, 3)  # hardly faster than SURE, and loses far more
    deep = Rung(0.8, 2.5, 7.0, 3)
    assert capacity(SURE, dear, deep).useful(1.0) == (AR, SURE, deep)


@given(
    st.lists(
        st.tuples(st.floats(1.0, 4.0), st.floats(0.0, 30.0)), min_size=1, max_size=8, unique=True
    ),
    st.integers(1, 64),
)
def test_each_useful_rung_is_faster_and_loses_more(points, num):
    rungs = [
        Rung(1 - (i + 1) / 20, tokens, loss, 3)
        for i, (tokens, loss) in enumerate(
            zip(*map(sorted, zip(*points, strict=True)), strict=True)
        )
    ]
    made = capacity(*rungs, max_num_seqs=num)
    useful = made.useful(1.05)
    assert useful[0] == AR
    speeds, losses = [made.tokens_per_s(rung) for rung in useful], [rung.loss for rung in useful]
    assert speeds == sorted(speeds)
    assert losses == sorted(losses)
    assert all(made.gain(rung) >= 1.05 for rung in useful[1:])
