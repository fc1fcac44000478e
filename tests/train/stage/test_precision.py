import pytest

from mars_train.stage import trainer
from mars_train.stage.parallel import Workers
from stage_runs import Events, RecordingReporter, run_group


def warnings_with(kind, is_slow):
    """Return the warnings of a run in this precision, on a processor of this kind."""
    trainer.is_bfloat16_slow = lambda: is_slow
    workers, reporter = Workers("ddp", use_gpu=False, precision=kind), RecordingReporter(Events())
    trainer.warn_of_slow_bfloat16(workers, reporter)
    return reporter.warned


@pytest.mark.parametrize(
    ("kind", "is_slow", "warned"),
    [("bf16", True, True), ("bf16", False, False), ("no", True, False)],
)
def test_training_in_bfloat16_where_it_is_slow_is_warned_of_by_the_first_worker(
    kind, is_slow, warned
):
    first, second = run_group(warnings_with, 2, kind, is_slow)
    assert second == []
    assert len(first) == warned
    if warned:
        assert 'set precision: "no"' in first[0]
