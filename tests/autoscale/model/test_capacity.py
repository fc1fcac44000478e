import pytest
from hypothesis import given
from hypothesis import strategies as st

from ladders import exact_rung, threshold_rung
from mars_autoscale.model.capacity import AR, ONE_TOKEN, Capacity, Rung, Window
from mars_autoscale.model.step_times import StepTime, linear_step_time
from mars_platform.method.mode import Mode

SURE = threshold_rung(0.95, 1.695, 1.7)
EXACT = exact_rung(2.2, 5)


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
    barely = threshold_rung(0.99, 1.2, 0.1)
    assert capacity(barely, SURE).ladder(1.05) == (AR, SURE)
    assert capacity(SURE, max_num_seqs=30).ladder(1.0) == (AR,)


def test_a_rung_below_a_mixture_of_others_is_not_useful():
    dear = threshold_rung(0.9, 1.72, 6.0)  # hardly faster than SURE, and loses far more
    deep = threshold_rung(0.8, 2.5, 7.0)
    assert capacity(SURE, dear, deep).ladder(1.0) == (AR, SURE, deep)


@given(
    st.lists(
        st.tuples(st.floats(1.0, 4.0), st.floats(0.0, 30.0)), min_size=1, max_size=8, unique=True
    ),
    st.integers(1, 64),
)
def test_each_useful_rung_is_faster_and_loses_more(points, num):
    rungs = [
        threshold_rung(1 - (i + 1) / 20, tokens, loss)
        for i, (tokens, loss) in enumerate(
            zip(*map(sorted, zip(*points, strict=True)), strict=True)
        )
    ]
    made = capacity(*rungs, max_num_seqs=num)
    useful = made.ladder(1.05)
    assert useful[0] == AR
    speeds, losses = [made.tokens_per_s(rung) for rung in useful], [rung.loss for rung in useful]
    assert speeds == sorted(speeds)
    assert losses == sorted(losses)
    assert all(made.gain(rung) >= 1.05 for rung in useful[1:])


# The base: the fastest decoding that loses nothing


def test_gains_and_sizes_count_from_the_fastest_lossless_rung():
    """By hand, 16 rows: exact 35.2 / 1.625, τ .95 27.12 / 1.587 and ar 16 / 1.125 tokens per t0."""
    all_modes = capacity(EXACT, SURE)
    assert all_modes.base() == EXACT
    assert all_modes.gain(AR) == pytest.approx(16 / 1.125 / (35.2 / 1.625))
    assert all_modes.gain(SURE) < 1
    assert all_modes.ladder(1.05) == (EXACT,), "τ = .95 loses quality and speed"
    assert all_modes.break_even_batch(SURE) == 0
    assert capacity(SURE).busy_s(1000, 0) == pytest.approx(all_modes.busy_s(1000, 0) * 1.52, 0.01)


def test_the_base_depends_on_the_batch():
    wide = exact_rung(1.9, 16)  # faster up to 128 * .9 / (16 - 1.9) = 8 rows
    made = capacity(wide, SURE)
    assert [made.base(batch) for batch in (1, 8, 9, 16)] == [wide, wide, AR, AR]
    assert (made.break_even_batch(wide), made.break_even_batch(AR)) == (8, 0)
    assert made.break_even_batch(SURE) == 29, "plain AR decoding is the faster of the two there"
    assert made.ladder(1.05, 2) == (wide,)
    assert made.ladder(1.05, 16) == (AR, SURE)


def test_a_batch_uses_the_window_that_is_fastest_for_it():
    few, many = Window(1.6, 3), Window(2.2, 16)
    made = capacity(Rung(Mode.EXACT, 1.0, (many, few)))
    exact = made.rungs[1]
    assert (made.window(exact, 1), made.window(exact, 16)) == (many, few)
    assert made.window(AR) == ONE_TOKEN


def test_at_a_target_below_one_the_base_may_lose_what_the_target_does():
    low = Capacity(linear_step_time(0.032, 128), (AR, SURE), 16, 20_000, target_threshold=0.95)
    assert low.base() == low.target == SURE
    assert low.gain(SURE) == 1.0
    with_exact = Capacity(linear_step_time(0.032, 128), (AR, EXACT, SURE), 16, 20_000, 0.95)
    assert with_exact.base() == EXACT
    assert with_exact.target == SURE


def test_a_mixture_spends_time_by_the_tokens_of_each_part():
    """By hand: as many tokens each in modes ar and exact take 2.2 rows of ar for one of exact."""
    made = capacity(EXACT)
    rows, positions = (2.2 + 1) / 2.2, (2.2 * 1 + 1 * 5) / 2.2  # for two tokens
    expected = 16 * 2 / rows / (0.032 * (1 + 16 * positions / rows / 128))
    assert made.mixed_tokens_per_s([(0.5, AR), (0.5, EXACT)]) == pytest.approx(expected)
    assert made.mixed_tokens_per_s([(1.0, EXACT)]) == pytest.approx(made.tokens_per_s(EXACT))
