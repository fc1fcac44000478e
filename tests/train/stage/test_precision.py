import pytest

from mars_train.stage import precision
from mars_train.stage.parallel import Workers
from mars_train.stage.precision import slowdown_in_bfloat16, warn_of_slow_bfloat16
from stage_runs import Events, RecordingReporter, run_group


def warnings_with(kind, seconds_in_bfloat16):
    """Return the warnings of a run in this precision, by a process whose clock is made up."""
    precision._product_seconds = lambda dtype: seconds_in_bfloat16 if dtype.itemsize == 2 else 1.0
    workers, reporter = Workers("ddp", use_gpu=False, precision=kind), RecordingReporter(Events())
    warn_of_slow_bfloat16(workers, reporter)
    return reporter.warned


@pytest.mark.parametrize(
    ("kind", "seconds_in_bfloat16", "warned"),
    [("bf16", 12.0, True), ("bf16", 1.1, False), ("no", 12.0, False)],
)
def test_training_in_bfloat16_where_it_is_slow_is_warned_of_by_the_first_worker(
    kind, seconds_in_bfloat16, warned
):
    first, second = run_group(warnings_with, 2, kind, seconds_in_bfloat16)
    assert second == []
    assert len(first) == warned
    if warned:
        assert "take 12.0 times as long" in first[0]
        assert 'set precision: "no"' in first[0]


def test_products_are_timed_in_both_number_types():
    assert 0 < slowdown_in_bfloat16() < 10_000
