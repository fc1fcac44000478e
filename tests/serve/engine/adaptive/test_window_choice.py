from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from decoding.engine_requests import make_request, make_row
from mars_autoscale.model.step_times import StepTimes
from mars_platform.method.mode import Mode
from mars_serve.engine.adaptive.window_choice import WindowChooser
from mars_serve.engine.decoding_options import Outcomes, Sampling
from mars_serve.engine.request import Draft, Request
from mars_serve.engine.scheduled_row import ScheduledRow

Floats = NDArray[np.float64]
MAX_WINDOW = 4


def step_times(
    seconds: dict[int, float], per_cached_token: float = 0.0, mask_s: float = 0.0
) -> StepTimes:
    """Build step times from seconds by positions."""
    grid = (0, 65536)
    lines = tuple(
        tuple(value + per_cached_token * count for count in grid) for value in seconds.values()
    )
    return StepTimes(tuple(seconds), grid, lines, mask_s)


TABLES = {
    "cpu": step_times({1: 0.012, 8: 0.013, 16: 0.016, 32: 0.022, 64: 0.035, 128: 0.060}),
    "gpu": step_times({1: 0.0080, 64: 0.0083, 128: 0.0090, 256: 0.0105, 512: 0.0165}, 1e-8),
    "stairs": step_times(
        {8: 0.010, 9: 0.011, 32: 0.011, 33: 0.013, 64: 0.013, 65: 0.02, 128: 0.02, 129: 0.036}
    ),
    "linear": step_times({1: 0.001, 2: 0.002, 64: 0.064}),
    "adapter": step_times({1: 0.009, 8: 0.012, 64: 0.030}, mask_s=0.0043),
}
CPU = TABLES["cpu"]
PAPER = 0.452  # geometric acceptance: 1.79 tokens per forward pass with four masks
ACCEPTANCE = {
    "none": [0.0],
    "paper": [PAPER],
    "high": [0.9],
    "mixed": [0.9, 0.0, PAPER, 0.2],
}


def chooser_of(times: StepTimes) -> WindowChooser:
    """Return a chooser that chooses in no time, so anew in every step."""
    return WindowChooser(times, MAX_WINDOW, clock=lambda: 0.0)


def make_rows(count: int) -> list[Request]:
    return [make_request(f"row {index}", [5], 10**9) for index in range(count)]


def ar_rows(count: int) -> list[Request]:
    return [make_request(f"ar {index}", [5], 99, mode=Mode.AR) for index in range(count)]


def sampled_rows() -> list[Request]:
    return [
        make_request(f"sampled {index}", [5], 10**9, sampling=Sampling(temperature=1.0))
        for index in range(8)
    ]


def windows_of(
    chooser: WindowChooser,
    rows: list[Request],
    *,
    other_positions: int = 0,
    cached_tokens: int | None = None,
) -> list[int]:
    """Choose for rows that have one outcome each."""
    chosen = chooser.choose(rows, other_positions=other_positions, cached_tokens=cached_tokens)
    assert all(len(masks) == 1 for masks in chosen)
    return [masks[0] for masks in chosen]


class Simulation:
    """Accepted runs drawn in advance, so that policies are compared on the same luck."""

    def __init__(self, acceptance: Floats, num_steps: int, *, seed: int = 0) -> None:
        """``acceptance``: by step and row, ``[steps or 1, rows]``."""
        self.num_rows = acceptance.shape[1]
        size = (num_steps, self.num_rows, MAX_WINDOW)
        hits = np.random.default_rng(seed).random(size) < acceptance[:, :, None]
        self._runs = np.cumprod(hits, axis=2).sum(axis=2)  # [steps, rows]
        self.cached_tokens = 600 * self.num_rows

    def fixed(self, times: StepTimes, window: int) -> float:
        """Return the tokens per second with the same window in each step."""
        return self._rate(times, np.full_like(self._runs, window))

    def chosen(self, times: StepTimes) -> tuple[float, NDArray[np.int64]]:
        """Return the tokens per second with chosen windows, and the windows ``[steps, rows]``."""
        chooser, rows, windows = chooser_of(times), make_rows(self.num_rows), []
        for runs in self._runs:
            windows.append(windows_of(chooser, rows, cached_tokens=self.cached_tokens))
            for row, num_masks, run in zip(rows, windows[-1], runs.tolist(), strict=True):
                num_accepted = 1 + min(run, num_masks)
                chooser.observe(row, num_masks, num_accepted)
                row.num_cached = len(row.tokens)
                row.tokens += [5] * num_accepted
        return self._rate(times, np.array(windows)), np.array(windows)

    def _rate(self, times: StepTimes, windows: NDArray[np.int64]) -> float:
        accepted = 1 + np.minimum(self._runs, windows)
        fed = np.vstack([np.ones((1, self.num_rows)), accepted[:-1]]) + windows
        seconds = times.at(fed.sum(axis=1), self.cached_tokens, windows.any(axis=1))
        return float(accepted.sum() / seconds.sum())


def settled_chooser(times: StepTimes, rows: list[Request], acceptance: float) -> WindowChooser:
    """Build a chooser that has seen a long run of the rows' outcomes."""
    chooser, source = chooser_of(times), np.random.default_rng(0)
    for _ in range(200):
        windows_of(chooser, rows)
        for row in rows:
            if row.plan.window != 0:
                run = int(np.cumprod(source.random(MAX_WINDOW) < acceptance).sum())
                chooser.observe(row, MAX_WINDOW, run + 1)
    return chooser


@pytest.mark.parametrize(
    ("table", "kind", "num_rows"),
    [
        (table, kind, (1, 8, 64)[(i + j) % 3])  # each pair of two of them
        for i, table in enumerate(TABLES)
        for j, kind in enumerate(ACCEPTANCE)
    ],
)
def test_chosen_windows_are_as_fast_as_the_best_fixed_one_and_never_slower_than_none(
    table: str, kind: str, num_rows: int
) -> None:
    times = TABLES[table]
    # Where the first mask is dear, no row takes any once they seem not to pay, and only the trials
    # tell that they do.
    least = 0.95 if times.mask_s == 0 else 0.92
    simulation = Simulation(np.resize(ACCEPTANCE[kind], (1, num_rows)), 800, seed=num_rows)
    rate, _ = simulation.chosen(times)
    fixed = [simulation.fixed(times, window) for window in range(MAX_WINDOW + 1)]
    assert rate > 0.98 * fixed[0], "rows are slowed down"
    assert rate > least * max(fixed), f"rows want {np.argmax(fixed)} masks"


def test_masks_go_to_the_rows_that_use_them() -> None:
    _, windows = Simulation(np.resize([0.9, 0.1], (1, 8)), 400).chosen(CPU)
    assert windows[100:, ::2].mean() > 3
    assert windows[100:, 1::2].mean() < 0.5


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.0), (0.0, 0.9)])
def test_windows_follow_a_change_of_acceptance(before: float, after: float) -> None:
    num_steps = 2400
    acceptance = np.full((num_steps, 4), before)
    acceptance[num_steps // 4 :] = after
    _, windows = Simulation(acceptance, num_steps).chosen(CPU)
    early, late = windows[200 : num_steps // 4].mean(), windows[-500:].mean()
    small, large = sorted([early, late])
    assert (early > late) == (before > after)
    assert small < 0.3
    assert large > 3


def test_a_step_time_that_falls_after_a_rise_is_found() -> None:
    times = step_times({1: 1.0, 3: 2.0, 5: 1.0, 9: 1.05, 64: 40.0})
    chooser, (row,) = chooser_of(times), make_rows(1)
    for _ in range(40):
        windows_of(chooser, [row])
        chooser.observe(row, 4, 4)
    assert windows_of(chooser, [row]) == [4]


def test_prompt_chunks_make_masks_neither_free_nor_forbidden() -> None:
    times = step_times({1: 0.008, 512: 0.008, 2560: 0.069})
    many, one = make_rows(128), make_rows(1)
    chooser = settled_chooser(times, many, PAPER)
    assert sum(windows_of(chooser, many)) > 200
    # A mask gains 0.46 tokens for 1.46 positions of 30 us each; a second costs 28,000 tokens.
    assert sum(windows_of(chooser, many, other_positions=2048)) == 0
    chooser = settled_chooser(times, one, PAPER)
    assert windows_of(chooser, one, other_positions=2048) == [4]


def test_neighbours_that_take_no_masks_are_not_slowed_down() -> None:
    rows = make_rows(1)
    chooser = settled_chooser(CPU, rows, PAPER)
    assert windows_of(chooser, rows) == [4]
    assert windows_of(chooser, rows + ar_rows(40)) == [0] * 41


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
def test_no_row_gets_more_masks_than_it_can_use(
    kinds: list[tuple[Mode, float, int | None, int]], other_positions: int
) -> None:
    chooser = chooser_of(TABLES["gpu"])
    rows = [
        make_request(str(index), [5], max_tokens, mode=mode, threshold=threshold, window=window)
        for index, (mode, threshold, window, max_tokens) in enumerate(kinds)
    ]
    chosen = windows_of(chooser, rows, other_positions=other_positions)
    assert len(chosen) == len(rows)
    for row, num_masks in zip(rows, chosen, strict=True):
        limit = row.plan.num_masks(MAX_WINDOW, row.num_left)
        assert 0 <= num_masks <= limit
        assert row.options.window is None or num_masks == limit


@pytest.mark.parametrize("mode", [Mode.THRESHOLD, Mode.EXACT])
@pytest.mark.parametrize(("mask_s", "takes_masks"), [(0.0, True), (0.003, True), (0.02, False)])
def test_the_first_mask_pays_for_what_masks_add_to_a_step(
    mode: Mode, mask_s: float, takes_masks: bool
) -> None:
    """The masks gain one token in all, so that they pay up to about a step's 10 ms."""
    times = step_times({1: 0.010, 256: 0.010}, mask_s=mask_s)
    rows = [make_request("row", [5], 10**9, mode=mode)]
    chooser = settled_chooser(times, rows, 0.5)
    assert (windows_of(chooser, rows)[0] > 0) == takes_masks


def test_masks_that_are_fed_in_any_case_have_paid_for_what_masks_add_to_a_step() -> None:
    times = step_times({1: 0.010, 256: 0.010}, mask_s=0.02)
    rows = [*make_rows(1), make_request("pinned", [5], 10**9, window=2)]
    chooser = settled_chooser(times, rows, 0.5)
    assert windows_of(chooser, rows) == [MAX_WINDOW, 2]


FREE = step_times({1: 0.010, 256: 0.010})


def num_choices(choosing_s: float, times: StepTimes = FREE) -> int:
    """Return how often the masks of 100 steps of 10 ms are chosen if choosing takes so long."""
    looks = list[float]()

    def clock() -> float:
        looks.append(len(looks) * choosing_s)
        return looks[-1]

    chooser = WindowChooser(times, MAX_WINDOW, clock=clock)
    rows = make_rows(1)
    for _ in range(200):
        windows_of(chooser, rows)
    num_before = len(looks)
    for _ in range(100):
        windows_of(chooser, rows)
    return (len(looks) - num_before) // 2


def test_a_choice_is_kept_while_another_would_take_a_larger_share_of_the_steps() -> None:
    assert num_choices(0.0) == 100
    assert num_choices(0.0001) * 0.0001 < 0.004 * 100 * 0.010
    assert 0 < num_choices(1.0) < num_choices(0.0001)


def slow_chooser(times: StepTimes) -> WindowChooser:
    """Return a chooser to which choosing seems to take a second."""
    return WindowChooser(times, MAX_WINDOW, clock=map(float, itertools.count()).__next__)


def test_a_choice_is_dropped_with_the_number_of_rows_for_which_it_was_made() -> None:
    chooser = slow_chooser(step_times({1: 0.010, 8: 0.010, 9: 0.050, 64: 0.500}))
    rows = make_rows(8)
    for _ in range(2):
        for _ in range(20):
            assert not any(windows_of(chooser, rows))
        assert windows_of(chooser, rows[:1]) == [MAX_WINDOW]


def test_the_first_sampled_token_tells_at_once_what_positions_cost() -> None:
    rows = sampled_rows()
    chooser = slow_chooser(step_times({1: 0.010, 256: 0.040}))
    assert min(windows_of(chooser, rows)) > 1
    rows[0].sampling_s, rows[0].num_choices = 0.01, 1
    assert max(windows_of(chooser, rows)) == 0


def test_steps_that_are_far_quicker_than_measured_correct_the_times() -> None:
    """Measured beside other programs, small steps seemed to take as long as wide ones."""
    chooser, rows = chooser_of(step_times({1: 0.380, 64: 0.385, 256: 0.580})), make_rows(32)

    def step() -> list[int]:
        windows = windows_of(chooser, rows)
        fed = [make_row(row, 1, (masks,)) for row, masks in zip(rows, windows, strict=True)]
        chooser.note_step(fed, 0.010 + 0.001 * sum(row.num_positions for row in fed))
        for row, masks in zip(rows, windows, strict=True):
            chooser.observe(row, masks, min(masks, 2) + 1)
        return windows

    assert min(step()) == MAX_WINDOW
    assert not any(step())
    assert [any(step()) for _ in range(20)] == [False] * 20
    del rows[1:]
    assert [step() for _ in range(3)] == [[MAX_WINDOW], [0], [2]]  # as many as are right


def test_times_without_masks_alone_say_nothing_of_masks() -> None:
    rows = make_rows(1)
    chooser = chooser_of(TABLES["linear"])
    chooser.note_step([make_row(rows[0], 1)], 0.0002)
    assert windows_of(chooser, rows) == [0]
    chooser = chooser_of(step_times({1: 0.380, 64: 0.385, 256: 0.580}))
    chooser.note_step([make_row(rows[0], 1, (MAX_WINDOW,))], 0.150)
    assert windows_of(chooser, rows) == [0]
    chooser.note_step([make_row(rows[0], 1, (2,))], 0.100)  # its masks were pinned
    assert windows_of(chooser, rows) == [0]
    chooser.note_step([make_row(rows[0], 1)], 0.110)  # as expected, and wanted
    assert windows_of(chooser, rows) == [MAX_WINDOW]
    chooser.note_step([make_row(rows[0], 1, (MAX_WINDOW,))], 0.900)  # far longer than seen so far
    chooser.note_step([make_row(rows[0], 1)], 0.110)
    assert windows_of(chooser, rows) == [0]


@pytest.mark.parametrize(
    "other",
    [
        make_row(make_request("prompt", 200), 200, reads_logits=False),
        make_row(make_request("pinned", [5], 10**9, window=2), 1, (2,)),
    ],
)
def test_rows_get_masks_again_where_no_step_tells_the_time_without(other: ScheduledRow) -> None:
    chooser, rows = chooser_of(step_times({1: 0.380, 64: 0.385, 256: 0.580})), make_rows(8)
    for _ in range(2):  # the times that are wrong are found to be so once more
        assert min(windows_of(chooser, rows)) == MAX_WINDOW
        chooser.note_step([make_row(row, 1, (MAX_WINDOW,)) for row in rows], 0.050)
        for _ in range(16):
            assert not any(windows_of(chooser, rows))
            chooser.note_step([*(make_row(row, 1) for row in rows), other], 0.050)


def test_times_that_prompts_or_drift_seem_to_contradict_stay() -> None:
    times = step_times({1: 0.010, 8: 0.010, 9: 0.050, 64: 0.500})
    chooser, rows = chooser_of(times), make_rows(8)
    masks, prompt = make_row(rows[0], 1, (MAX_WINDOW,)), make_request("long", 40)
    chooser.note_step([masks], 0.007)
    chooser.note_step([masks, make_row(prompt, 40)], 0.010)
    chooser.note_step([masks, make_row(prompt, 2, reads_logits=False)], 0.001)
    assert not any(windows_of(chooser, rows))
    assert windows_of(chooser, rows[:1]) == [MAX_WINDOW]


# Mode exact


def exact_row(name: str, drafts: list[float], **options: object) -> Request:
    row = make_request(name, [5], 100, mode=Mode.EXACT, **options)
    row.drafts = [Draft(7, chance) for chance in drafts]
    return row


def mixed_rows() -> list[Request]:
    return [
        exact_row("greedy", [0.7, 0.6, 0.5, 0.4]),
        exact_row("sampled", [0.7, 0.6], sampling=Sampling(0.8)),
        exact_row("pinned", [0.9, 0.9], outcomes=Outcomes.LAST, window=2),
        *make_rows(2),
        *ar_rows(1),
    ]


def test_every_outcome_gets_masks_if_positions_are_free() -> None:
    chooser = chooser_of(step_times({1: 0.010, 4096: 0.010}))
    greedy, sampled, pinned, *others = chooser.choose(mixed_rows())
    # The least promising mask may be missing: it defines the least gain of a position.
    assert len(greedy) == 5
    assert sum(greedy) >= 5 * MAX_WINDOW - 1
    assert sum(sampled) >= 3 * MAX_WINDOW - 1
    assert pinned == (0, 0, 2)
    assert others == [(MAX_WINDOW,), (MAX_WINDOW,), (0,)]


def test_neither_masks_nor_drafts_are_fed_if_positions_are_expensive() -> None:
    times = step_times({1: 0.010, 2: 0.020, 256: 2.56})
    chooser, rows = chooser_of(times), mixed_rows()
    for _ in range(100):
        chosen = chooser.choose(rows)
        for row, masks in zip(rows, chosen, strict=True):
            chooser.observe(row, len(masks) - 1 if row.plan.checks_drafts else masks[0], 1)
    assert chosen == [(0,), (0,), (0, 0, 2), (0,), (0,), (0,)]


@pytest.mark.parametrize(("position_s", "has_masks"), [(0.002, True), (0.003, False)])
def test_a_draft_has_to_pay_for_its_own_position_too(position_s: float, has_masks: bool) -> None:
    """A mask and its draft take two positions, and half of the drafts are right."""
    times = step_times({1: 0.010, 101: 0.010 + 100 * position_s})
    chooser = chooser_of(times)
    row = exact_row("sampled", [], sampling=Sampling(0.8))
    for step in range(400):
        (masks,) = chooser.choose([row])
        chooser.observe(row, 1, 1 + step % 2)
    assert any(masks) is has_masks


def test_time_of_sampling_each_position_counts_as_time_of_the_step() -> None:
    sampled = sampled_rows()
    chooser = settled_chooser(step_times({1: 0.010, 256: 0.040}), sampled, 0.5)
    assert min(windows_of(chooser, sampled)) > 1
    sampled[0].sampling_s, sampled[0].num_choices = 0.01, 1
    assert max(windows_of(chooser, sampled)) == 0
    assert chooser.least_gain > 0.8  # what steps of .09 s give in the .01 s of a position
    assert max(windows_of(chooser, sampled[1:])) == 0  # known from earlier steps
    assert min(windows_of(chooser, make_rows(8))) > 1  # rows that choose the likeliest
