from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mars_platform.method.mode import Confidence, Mode
from mars_serve.engine.adaptive.draft_groups import DraftChances, chosen_masks, mask_gains
from mars_serve.engine.adaptive.window import Acceptance, StepTimes, WindowChooser
from mars_serve.engine.request import DecodingOptions, Draft, Outcomes, Request, Sampling

Floats = NDArray[np.float64]
MAX_WINDOW = 4


def step_times(seconds: dict[int, float], per_stored: float = 0.0) -> StepTimes:
    stored = (0, 65536)
    lines = tuple(
        tuple(value + per_stored * count for count in stored) for value in seconds.values()
    )
    return StepTimes(tuple(seconds), stored, lines)


TABLES = {
    "cpu": step_times({1: 0.012, 8: 0.013, 16: 0.016, 32: 0.022, 64: 0.035, 128: 0.060}),
    "uneven": step_times({1: 0.010, 3: 0.0145, 4: 0.0125, 8: 0.0125, 32: 0.022, 128: 0.060}),
    "gpu": step_times({1: 0.0080, 64: 0.0083, 128: 0.0090, 256: 0.0105, 512: 0.0165}, 1e-8),
    "stairs": step_times(
        {8: 0.010, 9: 0.011, 32: 0.011, 33: 0.013, 64: 0.013, 65: 0.02, 128: 0.02, 129: 0.036}
    ),
    "linear": step_times({1: 0.001, 2: 0.002, 64: 0.064}),
    "affine": step_times({1: 0.0066, 65: 0.0962}),
}
PAPER = 0.452  # geometric acceptance that gives 1.79 tokens a forward with four masks
ACCEPTANCE = {
    "none": [0.0],
    "low": [0.2],
    "paper": [PAPER],
    "high": [0.9],
    "mixed": [0.9, 0.0, PAPER, 0.2],
}


def make_rows(count: int) -> list[Request]:
    options = DecodingOptions(max_tokens=10**9)
    return [Request(f"row {index}", [5], options) for index in range(count)]


def numbers_of(
    chooser: WindowChooser, rows: list[Request], *, other: int = 0, stored: int | None = None
) -> list[int]:
    """Chosen masks of rows that have one outcome each."""
    chosen = chooser.choose(rows, other_positions=other, stored=stored)
    assert all(len(masks) == 1 for masks in chosen)
    return [masks[0] for masks in chosen]


def mean_tokens(acceptance: float) -> float:
    return sum(acceptance**depth for depth in range(MAX_WINDOW + 1))


class Simulation:
    """A model's outcomes, drawn beforehand: windows are compared on the same luck."""

    def __init__(self, acceptance: Floats, num_steps: int, *, seed: int = 0) -> None:
        """``acceptance``: by step and row, ``[steps or 1, rows]``."""
        self.num_rows = acceptance.shape[1]
        size = (num_steps, self.num_rows, MAX_WINDOW)
        hits = np.random.default_rng(seed).random(size) < acceptance[:, :, None]
        self._runs = np.cumprod(hits, axis=2).sum(axis=2)  # [steps, rows]
        self.stored = 600 * self.num_rows

    def fixed(self, times: StepTimes, window: int) -> float:
        """Tokens a second with the same window in each step."""
        return self._rate(times, np.full_like(self._runs, window))

    def chosen(self, times: StepTimes, chooser: WindowChooser) -> tuple[float, NDArray[np.int64]]:
        """Tokens a second with the chooser's windows, and the windows ``[steps, rows]``."""
        rows, windows = make_rows(self.num_rows), []
        for runs in self._runs:
            windows.append(numbers_of(chooser, rows, stored=self.stored))
            for row, num_masks, run in zip(rows, windows[-1], runs.tolist(), strict=True):
                num_accepted = 1 + min(run, num_masks)
                chooser.observe(row, num_masks, num_accepted)
                row.num_cached = len(row.tokens)
                row.tokens += [5] * num_accepted
        return self._rate(times, np.array(windows)), np.array(windows)

    def _rate(self, times: StepTimes, windows: NDArray[np.int64]) -> float:
        accepted = 1 + np.minimum(self._runs, windows)
        fed = np.vstack([np.ones((1, self.num_rows)), accepted[:-1]]) + windows
        return float(accepted.sum() / times.at(fed.sum(axis=1), self.stored).sum())


# Step times


GRID = StepTimes((1, 5, 9), (0, 100), ((1.0, 2.0), (3.0, 6.0), (4.0, 9.0)))


@pytest.mark.parametrize(
    ("positions", "stored", "seconds"),
    [
        (5, 0, 3.0),
        (9, 100, 9.0),
        (3, 0, 2.0),
        (3, 50, 3.0),
        (0, 0, 1.0),
        (5, -7, 3.0),
        (17, 0, 6.0),
        (5, 200, 9.0),
        (17, 200, 24.0),
    ],
)
def test_times_between_and_past_the_grid(positions: int, stored: int, seconds: float) -> None:
    assert GRID.at(positions, stored) == pytest.approx(seconds, rel=1e-5)


def test_times_of_many_positions_are_those_of_each() -> None:
    positions = np.linspace(0, 20, 41)
    assert GRID.at(positions, 130).tolist() == [GRID.at(float(at), 130) for at in positions]


def test_a_single_measurement_holds_everywhere_and_a_falling_end_stays_positive() -> None:
    assert StepTimes((4,), (0,), ((0.5,),)).at(1000, 1000) == pytest.approx(0.5)
    assert step_times({1: 2.0, 2: 1.0}).at(10**6, 0) == pytest.approx(1.0)


def test_times_survive_json() -> None:
    GRID.at(3, 50)
    plain = json.loads(json.dumps(asdict(GRID)))
    assert set(plain) == {"positions", "stored", "seconds"}
    assert StepTimes(**plain).at(3, 50) == GRID.at(3, 50)


@pytest.mark.parametrize(
    ("positions", "stored", "seconds"),
    [
        ((), (0,), ()),
        ((1,), (), ((),)),
        ((2, 1), (0,), ((1.0,), (1.0,))),
        ((1, 1), (0,), ((1.0,), (1.0,))),
        ((1, 2), (0,), ((1.0,),)),
        ((1,), (0, 9), ((1.0,),)),
        ((1,), (0,), ((0.0,),)),
        ((1,), (0,), ((float("nan"),),)),
        ((1,), (0,), ((float("inf"),),)),
    ],
)
def test_malformed_grids_are_refused(
    positions: tuple[int, ...], stored: tuple[int, ...], seconds: tuple[tuple[float, ...], ...]
) -> None:
    with pytest.raises(AssertionError):
        StepTimes(positions, stored, seconds)


# Acceptance


def teach(acceptance: Acceptance, row: Request, outcomes: Sequence[tuple[int, int]]) -> None:
    for num_masks, num_accepted in outcomes:
        acceptance.advance(1)
        acceptance.observe(row, num_masks, num_accepted)


def estimate(acceptance: Acceptance, row: Request) -> list[float]:
    return [float(chance) for chance in acceptance.probabilities([row])[0]]


def test_only_proposed_depths_behind_accepted_ones_are_learnt_from() -> None:
    acceptance, row = Acceptance(MAX_WINDOW), make_rows(1)[0]
    prior = estimate(acceptance, row)[0]
    teach(acceptance, row, [(3, 2)] * 30)  # depth 1 accepted, depth 2 refused, 3 unknown
    first, second, third, fourth = estimate(acceptance, row)
    assert first > prior > second
    assert third == fourth == pytest.approx(prior)
    teach(acceptance, row, [(3, 4)] * 5)  # 1 to 3 accepted, 4 was not proposed
    assert estimate(acceptance, row)[2] > prior
    assert estimate(acceptance, row)[3] == pytest.approx(prior)


def test_estimates_approach_each_depth_s_own_acceptance() -> None:
    acceptance, rows = Acceptance(3), make_rows(8)
    source, truth = np.random.default_rng(0), np.array([0.8, 0.3, 0.6])
    for _ in range(600):
        acceptance.advance(1)
        for row in rows:
            run = int(np.cumprod(source.random(3) < truth).sum())
            acceptance.observe(row, 3, run + 1)
    mean = acceptance.probabilities(rows).mean(axis=0)
    assert mean == pytest.approx(truth, abs=0.06)


def test_a_new_row_starts_from_what_rows_of_its_kind_taught() -> None:
    acceptance, (old, like) = Acceptance(MAX_WINDOW), make_rows(2)
    other = Request("other measure", [5], replace(old.options, confidence=Confidence.MARGIN))
    lower = Request("lower", [5], replace(old.options, threshold=0.6))
    near = Request("near", [5], replace(old.options, threshold=0.96))
    prior = estimate(acceptance, like)
    teach(acceptance, old, [(4, 1)] * 60)
    acceptance.forget(old.id)
    assert estimate(acceptance, like)[0] < 0.2
    assert estimate(acceptance, near)[0] < 0.2
    assert estimate(acceptance, other) == estimate(acceptance, lower) == pytest.approx(prior)


def test_a_forgotten_row_leaves_nothing_to_the_next_in_its_place() -> None:
    acceptance, rows = Acceptance(MAX_WINDOW), make_rows(40)
    for row in rows:
        teach(acceptance, row, [(4, 1)] * 20)
        acceptance.observe(row, 4, 1)
        acceptance.forget(row.id)
    acceptance.forget("never seen")
    teach(acceptance, rows[0], [(4, 5)])
    best, fresh = (
        estimate(acceptance, row) for row in (rows[0], Request("new", [5], rows[0].options))
    )
    assert fresh[0] < best[0] < 0.3


def test_rows_of_unlike_luck_are_told_apart_and_evidence_fades() -> None:
    acceptance, (good, bad) = Acceptance(MAX_WINDOW), make_rows(2)
    prior = estimate(acceptance, good)[0]
    for _ in range(60):
        teach(acceptance, good, [(1, 2)])
        teach(acceptance, bad, [(1, 1)])
    assert estimate(acceptance, good)[0] > 0.8
    assert estimate(acceptance, bad)[0] < 0.25
    for _ in range(20_000):
        acceptance.advance(1)
    assert estimate(acceptance, bad)[0] == pytest.approx(prior, abs=0.01)


# The choice


@pytest.mark.parametrize("kind", ACCEPTANCE)
@pytest.mark.parametrize("table", TABLES)
def test_as_fast_as_the_best_window_and_never_slower_than_none(table: str, kind: str) -> None:
    times = TABLES[table]
    for num_rows in (1, 2, 4, 8, 16, 32, 64):
        acceptance = np.resize(ACCEPTANCE[kind], (1, num_rows))
        simulation = Simulation(acceptance, 800, seed=num_rows)
        rate, _ = simulation.chosen(times, WindowChooser(times, MAX_WINDOW))
        fixed = [simulation.fixed(times, window) for window in range(MAX_WINDOW + 1)]
        assert rate > 0.98 * fixed[0], f"{num_rows} rows are slowed down"
        assert rate > 0.95 * max(fixed), f"{num_rows} rows want {np.argmax(fixed)} masks"


def test_windows_shrink_as_the_batch_grows() -> None:
    means = []
    for num_rows in (1, 4, 16, 64):
        simulation = Simulation(np.full((1, num_rows), PAPER), 300)
        _, windows = simulation.chosen(TABLES["cpu"], WindowChooser(TABLES["cpu"], MAX_WINDOW))
        means.append(windows[100:].mean())
    assert means[0] > 3.5
    assert means == sorted(means, reverse=True)
    assert means[-1] == 0


def test_masks_go_to_the_rows_that_use_them() -> None:
    acceptance = np.resize([0.9, 0.1], (1, 8))
    _, windows = Simulation(acceptance, 400).chosen(
        TABLES["cpu"], WindowChooser(TABLES["cpu"], MAX_WINDOW)
    )
    assert windows[100:, ::2].mean() > 3
    assert windows[100:, 1::2].mean() < 0.5


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_windows_follow_a_change_of_acceptance(before: float, after: float) -> None:
    num_steps, times = 4000, TABLES["cpu"]
    acceptance = np.full((num_steps, 4), before)
    acceptance[num_steps // 4 :] = after
    _, windows = Simulation(acceptance, num_steps).chosen(times, WindowChooser(times, MAX_WINDOW))
    early, late = windows[200 : num_steps // 4].mean(), windows[-500:].mean()
    small, large = sorted([early, late])
    assert (early > late) == (before > after)
    assert small < 0.3
    assert large > 3


def test_a_falling_step_time_is_seen_past_the_rise() -> None:
    times = step_times({1: 1.0, 3: 2.0, 5: 1.0, 9: 1.05, 64: 40.0})
    chooser, (row,) = WindowChooser(times, MAX_WINDOW), make_rows(1)
    for _ in range(40):
        numbers_of(chooser, [row])
        chooser.observe(row, 4, 4)
    assert numbers_of(chooser, [row]) == [4]


def settled(times: StepTimes, rows: list[Request], acceptance: float) -> WindowChooser:
    """A chooser that has seen a long run of the rows' outcomes."""
    chooser, source = WindowChooser(times, MAX_WINDOW), np.random.default_rng(0)
    for _ in range(200):
        numbers_of(chooser, rows)
        for row in rows:
            if row.needs_masks:
                run = int(np.cumprod(source.random(MAX_WINDOW) < acceptance).sum())
                chooser.observe(row, MAX_WINDOW, run + 1)
    return chooser


def test_prompt_chunks_make_masks_neither_free_nor_forbidden() -> None:
    times = step_times({1: 0.008, 512: 0.008, 2560: 0.069})
    many, one = make_rows(128), make_rows(1)
    chooser = settled(times, many, PAPER)
    assert sum(numbers_of(chooser, many)) > 200
    # 0.46 tokens for 1.46 positions of 30 us, where a second is worth 28,000 tokens
    assert sum(numbers_of(chooser, many, other=2048)) == 0
    chooser = settled(times, one, PAPER)
    assert numbers_of(chooser, one, other=2048) == [4]


def test_neighbours_that_take_no_masks_are_not_slowed_down() -> None:
    times, rows = TABLES["cpu"], make_rows(1)
    neighbours = [Request(f"ar {index}", [5], DecodingOptions(99, Mode.AR)) for index in range(40)]
    chooser = settled(times, rows, PAPER)
    assert numbers_of(chooser, rows) == [4]
    assert numbers_of(chooser, rows + neighbours) == [0] * 41


def test_pinned_windows_are_kept_and_counted() -> None:
    times = TABLES["cpu"]
    rows = make_rows(6)
    pinned = [
        Request(f"pinned {index}", [5], replace(rows[0].options, window=4)) for index in (1, 2)
    ]
    chooser = settled(times, [*rows, *pinned], 0.6)
    alone, beside = numbers_of(chooser, rows), numbers_of(chooser, [*pinned, *rows])
    assert beside[:2] == [4, 4]
    assert sum(beside[2:]) < sum(alone)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Mode.AR, Mode.THRESHOLD]),
            st.sampled_from([0.3, 0.95, 1.0]),
            st.sampled_from([None, 0, 2, 9]),
            st.integers(1, 7),
        ),
        max_size=12,
    ),
    st.integers(0, 300),
)
def test_no_row_gets_more_than_it_can_use(
    kinds: list[tuple[Mode, float, int | None, int]], other_positions: int
) -> None:
    chooser = WindowChooser(TABLES["gpu"], MAX_WINDOW)
    rows = [
        Request(str(index), [5], DecodingOptions(max_tokens, mode, threshold, window=window))
        for index, (mode, threshold, window, max_tokens) in enumerate(kinds)
    ]
    chosen = numbers_of(chooser, rows, other=other_positions)
    assert len(chosen) == len(rows)
    for row, num_masks in zip(rows, chosen, strict=True):
        limit = row.num_masks(MAX_WINDOW)
        assert 0 <= num_masks <= limit
        assert row.options.window is None or num_masks == limit


def test_without_rows_there_is_nothing_to_choose() -> None:
    assert numbers_of(WindowChooser(TABLES["gpu"], MAX_WINDOW), []) == []


def test_the_paper_s_acceptance_is_what_it_says() -> None:
    assert mean_tokens(PAPER) == pytest.approx(1.79, abs=0.01)


def test_what_a_step_takes_beyond_the_table_speaks_for_masks() -> None:
    times, rows = step_times({1: 0.010, 100: 0.208}), make_rows(8)  # 2 ms a position
    chooser = settled(times, rows, PAPER)
    assert numbers_of(chooser, rows) == [0] * 8
    for _ in range(100):
        chooser.observe_step(8, 0, 0.024 + 0.040)
        windows = numbers_of(chooser, rows)
    assert sum(windows) >= 4


def test_a_pause_is_no_step() -> None:
    times, rows = step_times({1: 0.010, 100: 0.208}), make_rows(8)
    chooser = settled(times, rows, PAPER)
    chooser.observe_step(8, 0, 3600.0)
    assert numbers_of(chooser, rows) == [0] * 8
    chooser.observe_step(5000, 0, 10.0)  # a step of prompts, which the table does not hold
    assert numbers_of(chooser, rows) == [0] * 8


# Mode exact


def exact_row(
    drafts: Sequence[float],
    *,
    num_left: int = 100,
    temperature: float = 0.0,
    window: int | None = None,
    outcomes: Outcomes | None = None,
    name: str = "exact",
) -> Request:
    """A row of mode exact with drafts of these confidences."""
    options = DecodingOptions(
        num_left,
        Mode.EXACT,
        window=window,
        outcomes=outcomes,
        sampling=Sampling(temperature),
    )
    return Request(name, [5], options, drafts=[Draft(7, chance) for chance in drafts])


CHANCES = DraftChances.of([0.9, 0.6, 0.5, 0.5])


def test_a_mask_is_worth_the_chance_of_its_outcome_times_that_of_its_depth() -> None:
    greedy, sampled = mask_gains(exact_row([0.8, 0.5]), CHANCES, 2), [0.1, 0.36, 0.54]
    for gains, chance in zip(greedy, [0.2, 0.4, 0.4], strict=True):
        assert gains == pytest.approx([chance * 0.9, chance * 0.54])
    # what a mask thinks of its draft does not say whether noise will choose it
    other = mask_gains(exact_row([0.8, 0.5], temperature=1.0), CHANCES, 2)
    for gains, chance in zip(other, sampled, strict=True):
        assert gains == pytest.approx([chance * 0.9, chance * 0.54])
    assert mask_gains(exact_row([]), CHANCES, 3) == [pytest.approx([0.9, 0.54, 0.27])]


def test_masks_that_bring_enough_are_chosen_and_drafts_that_do_not_are_pruned() -> None:
    row = exact_row([0.8, 0.5, 0.1])
    assert chosen_masks(row, CHANCES, 4, 1e-9) == (4, 4, 4, 4)
    # outcomes of .2 .4 .36 .04; a third draft would be right with a chance of .04
    assert chosen_masks(row, CHANCES, 4, 0.1) == (2, 3, 3)
    assert chosen_masks(row, CHANCES, 4, 0.3) == (0, 1, 1)
    assert chosen_masks(row, CHANCES, 4, 0.5) == (0, 1)  # the last one now holds .8
    assert chosen_masks(row, CHANCES, 4, 0.95) == (0,)
    assert chosen_masks(row, CHANCES, 4, float("inf")) == (0,)


@given(
    st.lists(st.floats(0.0, 1.0), max_size=MAX_WINDOW),
    st.integers(1, 9),
    st.sampled_from([0.0, 1.0]),
    st.floats(1e-6, 1.5),
)
def test_nothing_is_fed_that_could_not_be_used(
    drafts: list[float], num_left: int, temperature: float, least_gain: float
) -> None:
    row = exact_row(drafts, num_left=num_left, temperature=temperature)
    chosen = chosen_masks(row, CHANCES, MAX_WINDOW, least_gain)
    asked = row.masks(MAX_WINDOW)
    for masks in (chosen, asked):
        assert 1 <= len(masks) <= min(len(drafts), num_left - 1) + 1
        for outcome, num_masks in enumerate(masks):
            # the outcome gives outcome + 1 tokens, and the pass after it one without drafts
            assert 0 <= num_masks <= max(0, min(MAX_WINDOW, num_left - outcome - 2))
    gains = mask_gains(row, CHANCES, MAX_WINDOW)
    shares = [line[0] for line in gains if line]
    assert sum(shares) <= CHANCES.each[0] + 1e-9
    if num_left > MAX_WINDOW + 2:
        assert sum(shares) == pytest.approx(CHANCES.each[0])  # one of the outcomes comes about


def test_pinned_layouts() -> None:
    drafts = [0.9] * MAX_WINDOW
    assert exact_row(drafts, outcomes=Outcomes.ALL).masks(4) == (4, 4, 4, 4, 4)
    assert exact_row(drafts, outcomes=Outcomes.LAST).masks(4) == (0, 0, 0, 0, 4)
    assert exact_row(drafts[:2], outcomes=Outcomes.ALL, window=2).masks(4) == (2, 2, 2)
    assert exact_row(drafts[:2], window=2).masks(4) == (0, 0, 2)
    assert exact_row([], outcomes=Outcomes.LAST, window=3).masks(4) == (3,)
    assert exact_row(drafts, outcomes=Outcomes.ALL, num_left=4).masks(4) == (2, 1, 0, 0)
    assert exact_row(drafts, outcomes=Outcomes.LAST, num_left=1).masks(4) == (0,)


FREE = step_times({1: 0.010, 4096: 0.010})
DEAR = step_times({1: 0.010, 2: 0.020, 256: 2.56})


def mixed_rows() -> list[Request]:
    pinned = {"outcomes": Outcomes.LAST, "window": 2, "name": "pinned"}
    return [
        exact_row([0.7, 0.6, 0.5, 0.4], name="greedy"),
        exact_row([0.7, 0.6], temperature=0.8, name="sampled"),
        exact_row([0.9, 0.9], **pinned),  # type: ignore[arg-type]
        *make_rows(2),
        Request("ar", [5], DecodingOptions(99, Mode.AR)),
    ]


def test_where_positions_are_free_every_outcome_gets_masks() -> None:
    greedy, sampled, pinned, *others = WindowChooser(FREE, MAX_WINDOW).choose(mixed_rows())
    # but for the very least of them, which sets what is worth a position
    assert len(greedy) == 5
    assert sum(greedy) >= 5 * MAX_WINDOW - 1
    assert sum(sampled) >= 3 * MAX_WINDOW - 1
    assert pinned == (0, 0, 2)
    assert others == [(MAX_WINDOW,), (MAX_WINDOW,), (0,)]


def test_where_positions_are_dear_there_are_neither_masks_nor_drafts() -> None:
    chooser, rows = WindowChooser(DEAR, MAX_WINDOW), mixed_rows()
    for _ in range(100):
        chosen = chooser.choose(rows)
        for row, masks in zip(rows, chosen, strict=True):
            asked = len(masks) - 1 if row.options.mode is Mode.EXACT else masks[0]
            chooser.observe(row, asked, 1)
    assert chosen == [(0,), (0,), (0, 0, 2), (0,), (0,), (0,)]


def test_where_positions_cost_something_the_likely_outcomes_get_masks() -> None:
    """As many as pay: with more rows beside it a row gets fewer."""
    totals = []
    for num_others in (0, 20, 60):
        chooser = WindowChooser(TABLES["cpu"], MAX_WINDOW)
        sure, unsure = exact_row([0.97] * 4, name="sure"), exact_row([0.1] * 4, name="unsure")
        others = [Request(f"ar {i}", [5], DecodingOptions(99, Mode.AR)) for i in range(num_others)]
        first, second, *rest = chooser.choose([sure, unsure, *others])
        assert rest == [(0,)] * num_others
        if sum(first) and sum(second):
            assert first[-1] == max(first)  # all drafts right
            assert second[0] == max(second)  # none
        assert len(first) >= len(second)
        totals.append(sum(first) + sum(second))
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


def test_rows_of_mode_exact_learn_apart_from_others() -> None:
    """By temperature: sampled drafts are right as often as noise allows."""
    acceptance, (threshold,) = Acceptance(MAX_WINDOW), make_rows(1)
    greedy, like, warm = (
        exact_row([], temperature=temperature, name=name)
        for name, temperature in [("greedy", 0.0), ("like", 0.0), ("warm", 1.0)]
    )
    prior = estimate(acceptance, threshold)
    teach(acceptance, greedy, [(4, 1)] * 60)
    assert estimate(acceptance, like)[0] < 0.2
    assert estimate(acceptance, threshold) == estimate(acceptance, warm) == pytest.approx(prior)
