"""The meter of a replica's pace, on engines whose counts the tests set."""

from dataclasses import replace

import pytest

from ladders import CAPACITY
from mars_autoscale.model.capacity import AR
from mars_autoscale.policy.pace import PaceMeter
from mars_autoscale.policy.reports import EngineStatus

ROWS = CAPACITY.max_num_seqs


class Engine:
    """An engine that works at a pace, and a meter that looks at it twice a second."""

    def __init__(self):
        self.meter, self.status, self.now_s = PaceMeter(CAPACITY), EngineStatus(), 0.0
        self.meter.look(0.0, self.status)

    def run(self, seconds, rows, pace, *, waiting=0, busy=1.0, every_s=0.5, gain=1.0):
        """Run so many rows in plain AR decoding, in a share of the time."""
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            per_s = CAPACITY.tokens_per_s(AR, rows) * pace * gain
            tokens, before = per_s * every_s * busy, self.status
            self.status = replace(
                before,
                num_running=rows,
                num_waiting=waiting,
                num_generated_tokens=before.num_generated_tokens + tokens,
                num_row_passes=before.num_row_passes + tokens,
                num_forward_passes=before.num_forward_passes + tokens / rows,
                busy_s=before.busy_s + every_s * busy,
            )
            self.meter.look(self.now_s, self.status, gain)
        return self.meter.pace

    def rest(self, seconds):
        """Have nothing to do."""
        self.now_s += seconds
        self.status = replace(self.status, num_running=0, num_waiting=0)
        self.meter.look(self.now_s, self.status)
        return self.meter.pace


@pytest.mark.parametrize("rows", [1, 8, ROWS])
@pytest.mark.parametrize("pace", [0.2, 1.0, 1.5])
def test_the_pace_is_the_speed_over_the_frontiers_at_the_rows_that_ran(rows, pace):
    assert Engine().run(60, rows, pace) == pytest.approx(pace)


def test_by_hand_at_one_row():
    """A step of one row takes .032 * (1 + 1 / 128) = .03225 s; here it takes .1 s."""
    meter = PaceMeter(CAPACITY)
    meter.look(0.0, EngineStatus())
    meter.look(60.0, EngineStatus(1, 1, 0, 0, 0, 0, 0, 0, 600, 600, 0, 600, 60.0))
    assert meter.pace == pytest.approx(0.3225)


def test_prompts_that_were_computed_count_as_work():
    meter = PaceMeter(CAPACITY)
    meter.look(0.0, EngineStatus())
    prompts = EngineStatus(num_prompt_tokens=500_000, num_prefix_hit_tokens=100_000)
    ran = replace(prompts, num_forward_passes=1_000, num_row_passes=1_000, busy_s=80.0)
    meter.look(80.0, ran)
    assert meter.pace == pytest.approx(400_000 / 20_000 / 80)


def test_the_pace_is_unknown_until_full_batches_have_worked_for_three_seconds():
    assert Engine().rest(600) == 0.0
    assert Engine().run(2.5, ROWS, 0.5) == 0.0
    assert Engine().run(4.0, ROWS, 0.5) == pytest.approx(0.5)
    assert Engine().run(20, 1, 0.5) == 0.0, "one row of 16 counts a sixteenth"


def test_idle_time_is_not_slow():
    """Half of the time there is nothing to do, between looks as well as at them."""
    engine = Engine()
    for _ in range(40):
        engine.run(1, 4, 0.8, busy=0.5)
        pace = engine.rest(1)
    assert pace == pytest.approx(0.8)


def test_replicas_that_are_never_full_have_the_mean_pace_of_their_work():
    paces = [Engine().run(60, rows, pace) for rows, pace in ((3, 0.5), (7, 1.0), (11, 0.9))]
    assert paces == pytest.approx([0.5, 1.0, 0.9])


def test_an_engine_that_rests_although_requests_wait_is_slow():
    assert Engine().run(60, ROWS, 1.0, waiting=5, busy=0.5) == pytest.approx(0.5, rel=0.02)


def test_a_batch_that_long_prompts_keep_small_is_not_slow():
    assert Engine().run(60, ROWS // 2, 1.0, waiting=5) == pytest.approx(1.0)


def test_too_few_pages_for_a_full_batch_are_known_before_it_is_full():
    half = CAPACITY.tokens_per_s(AR, ROWS / 2) / CAPACITY.tokens_per_s(AR, ROWS)
    for rows in (2, 6, ROWS // 2):
        engine = Engine()
        engine.status = replace(engine.status, num_pages=32, num_free_pages=32 - 4 * rows)
        assert engine.run(60, rows, 1.0) == pytest.approx(half)
    engine.status = replace(engine.status, num_free_pages=31)
    assert engine.run(400, 3, 1.0) == pytest.approx(1.0, abs=0.02), "there are more than slots"


def test_steps_that_last_seconds_count_once_they_have_ended():
    often, rarely = Engine(), Engine()
    for _ in range(10):
        often.run(3, ROWS, 0.3, waiting=9)
        for look in range(5):  # no step ends until the last look
            rarely.meter.look(rarely.now_s + 0.5 * look, rarely.status)
        rarely.run(3, ROWS, 0.3, waiting=9, every_s=3.0)
    assert rarely.meter.pace == pytest.approx(often.meter.pace, rel=0.02)


def test_the_gain_of_the_ladder_is_no_pace():
    assert Engine().run(60, 8, 0.7, gain=1.4) == pytest.approx(0.7)


def test_what_was_slow_is_forgotten_by_work_and_not_by_rest():
    engine = Engine()
    engine.run(60, ROWS, 0.2)
    assert engine.rest(3600) == pytest.approx(0.2)
    assert engine.run(10, ROWS, 1.0) == pytest.approx(0.6, abs=0.02), "half of it is new"
    assert engine.run(60, ROWS, 1.0) > 0.98
