"""Synthetic entries of a training history."""

from mars_train.stage.history import HeldOutScore, StepRecord, ThresholdScore


def record(loss=1.0, **changes):
    values = {"clean_loss": loss / 3, "noisy_loss": loss / 3 * 2, "learning_rate": 1e-3}
    counts = {"gradient_norm": 0.1 + 0.2, "num_tokens": 77, "skipped": False}
    return StepRecord(loss, **{**values, **counts, **changes})


def held_out(step=4):
    thresholds = [ThresholdScore(1.0, 0.5, 1.0), ThresholdScore(0.7, None, 10 / 3)]
    return HeldOutScore(step, [0.1 + 0.2, 1 / 3], thresholds)
