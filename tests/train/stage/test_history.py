import json
import math

import pytest

from histories import held_out, record
from mars_train.stage.history import HeldOutScore, ThresholdScore, TrainingHistory, read_history


def test_a_history_survives_writing_and_reading_exactly(tmp_path):
    losses = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e22]
    history = TrainingHistory([record(loss) for loss in losses], [held_out(0), held_out(4)])
    history.write(tmp_path / "history.json")
    again = read_history(tmp_path / "history.json")
    assert again == history
    assert [step.loss.hex() for step in again.steps] == [loss.hex() for loss in losses]
    assert (again.steps[0].num_tokens, again.steps[0].skipped) == (77, False)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_infinities_and_nan_are_read_as_nan(tmp_path, loss):
    TrainingHistory([record(loss, gradient_norm=math.inf, skipped=True)]).write(
        tmp_path / "history.json"
    )

    def refuse(constant):
        raise AssertionError(constant)

    json.loads((tmp_path / "history.json").read_text(), parse_constant=refuse)  # valid JSON
    (step,) = read_history(tmp_path / "history.json").steps
    assert math.isnan(step.loss)
    assert math.isnan(step.gradient_norm)
    assert step.skipped
    assert step.learning_rate == 1e-3


def test_non_finite_scores_survive_writing_and_reading(tmp_path):
    score = HeldOutScore(0, [math.nan], [ThresholdScore(1.0, 0.0, 1.0)])
    TrainingHistory([], [score]).write(tmp_path / "history.json")
    (again,) = read_history(tmp_path / "history.json").scores
    assert math.isnan(again.loss_by_depth[0])


def test_metrics_leave_out_an_accuracy_without_checkable_answers():
    assert held_out().metrics() == {
        "eval/loss_depth_0": 0.1 + 0.2,
        "eval/loss_depth_1": 1 / 3,
        "eval/tokens_per_forward_1": 1.0,
        "eval/accuracy_1": 0.5,
        "eval/tokens_per_forward_0.7": 10 / 3,
    }
