import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from histories import held_out, record
from mars_train.run.curves import write_curves
from mars_train.stage.history import HeldOutScore, ThresholdScore, TrainingHistory


@pytest.fixture
def drawn(monkeypatch):
    """Collect the figures that are saved."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *args, **kw: figures.append(figure) or save(figure, *args, **kw),
    )
    return figures


def steps(*losses):
    return [record(loss, skipped=not math.isfinite(loss)) for loss in losses]


def ar_steps(*losses):
    return [record(loss, clean_loss=loss, noisy_loss=0.0) for loss in losses]


def unchecked(step):
    return HeldOutScore(step, [1.0, 2.0], [ThresholdScore(1.0, None, 1.0)])


HISTORIES = {
    "scores": TrainingHistory(steps(*[9 / i for i in range(1, 99)]), [held_out(0), held_out(98)]),
    "one step": TrainingHistory(steps(2.0), [held_out(0), held_out(1)]),
    "nothing finite": TrainingHistory(steps(math.nan, math.nan)),
    "nothing": TrainingHistory(),
    "ar": TrainingHistory(ar_steps(3.0, 2.0)),
    "nothing checkable": TrainingHistory(steps(2.0), [unchecked(0), unchecked(1)]),
}


def test_any_history_is_drawn(tmp_path):
    write_curves(HISTORIES, tmp_path / "curves.png")
    picture = imread(tmp_path / "curves.png")  # [height, width, 4]
    assert picture.shape == (396 * len(HISTORIES), 1760, 4)
    for row in np.split(picture, len(HISTORIES)):
        assert row.min() < 0.1 < 0.9 < row.max()


def test_curves_show_the_figures_of_the_history(tmp_path, drawn):
    histories = {"mars": HISTORIES["one step"], "ar": HISTORIES["ar"]}
    write_curves(histories, tmp_path / "curves.png")
    axes = drawn[0].axes
    curves = [{line.get_label(): list(line.get_ydata()) for line in axis.lines} for axis in axes]
    assert curves[0] == {"clean (AR)": [2 / 3], "noisy (masked)": [4 / 3]}
    assert curves[1] == {"depth 0": [0.1 + 0.2] * 2, "depth 1": [1 / 3] * 2}
    assert curves[2] == {"τ = 1": [0.5, 0.5]}
    assert curves[3] == {"τ = 1": [1.0, 1.0], "τ = 0.7": [10 / 3] * 2}
    assert len(axes) == 8
    assert [list(axes[i].lines[0].get_xdata()) for i in (0, 1, 4)] == [[1], [0, 1], [1, 2]]
    assert curves[4] == {"clean (AR)": [3.0, 2.0]}
    assert [axis.get_title() for axis in axes[::4]] == [
        "stage mars: training loss, nats",
        "stage ar: training loss, nats",
    ]


def test_training_loss_is_smoothed_over_finite_values(tmp_path, drawn):
    losses = [math.nan, *[3.0] * 99]
    losses[50:52] = 6.0, math.nan
    history = TrainingHistory(ar_steps(*losses))
    write_curves({"ar": history}, tmp_path / "curves.png")  # windows of 2 steps
    shown = list(drawn[0].axes[0].lines[0].get_ydata())
    assert math.isnan(shown[0])
    assert shown[1:50] == [3.0] * 49
    assert shown[50:54] == [4.5, 6.0, 3.0, 3.0]
    assert len(shown) == 100
