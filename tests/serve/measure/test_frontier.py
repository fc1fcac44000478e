"""The frontier that ``marsray calibrate`` measures, and ``frontier.json``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from conversations import read
from frontiers import frontier_of, point
from mars_autoscale.model.frontier import read_frontier, write_frontier
from mars_autoscale.model.step_times import StepTime
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.weights import load_model
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import paired_difference, proportion, ratio_of_totals
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.measure.calibrate import with_work_to_come
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem
from mars_serve.measure.evaluation.scoring import score
from mars_serve.measure.frontier.likelihood import log_likelihoods
from mars_serve.measure.frontier.measure import (
    FrontierOptions,
    MeasuredFrontier,
    measure_frontier,
    phases_left,
)
from mars_serve.measure.frontier.points import mean_cached_tokens, point_of
from mars_serve.measure.frontier.report import frontier_figures, useful_rungs
from mars_serve.measure.frontier.working_file import (
    WORKING_FILE,
    KeptMeasurements,
    WorkingFile,
    run_key,
)

BLOCK_SIZE, MAX_TOKENS = 4, 10
OPTIONS = FrontierOptions(
    (0.5, 0.05),
    max_tokens=MAX_TOKENS,
    batch=3,
    repeats=1,
    dtype=torch.float32,
    dtype_name="float32",
    device="cpu",
    hardware="a machine",
    block_size=BLOCK_SIZE,
)
NAMES = ["mode ar"]
for _name in ("τ 0.5", "τ 0.05", "mode exact"):
    NAMES += [_name, f"{_name}, 1 mask", f"{_name}, 2 masks"]


@pytest.fixture(name="checkpoint")
def _checkpoint(model_dir: Path) -> Checkpoint:
    return read_checkpoint(model_dir)


@pytest.fixture(name="items")
def _items(model_dir: Path, sums: Path) -> list[EvalItem]:
    return read(sums, model=model_dir, max_items=8)


class Seen:
    """A record of the reported phases."""

    def __init__(self, stop_at: str | None = None) -> None:
        self.titles: list[str] = []
        self._stop_at = stop_at

    def __call__(self, title: str, done: int, total: int, quality: str = "") -> None:
        assert 0 < done <= total
        if title == self._stop_at:
            raise KeyboardInterrupt
        if title not in self.titles:
            self.titles.append(title)


def test_a_measured_frontier_is_written_and_read_again(
    checkpoint: Checkpoint, items: list[EvalItem]
) -> None:
    working, seen = WorkingFile(checkpoint.path, "key"), Seen()
    measured = measure_frontier(checkpoint, items, OPTIONS, working, seen)
    write_frontier(checkpoint.path, measured.frontier)
    frontier = read_frontier(checkpoint.path)
    assert frontier == measured.frontier
    assert seen.titles == ["step times", *NAMES, "log-likelihoods"]
    assert seen.titles == list(phases_left(OPTIONS, KeptMeasurements(key=""), len(items)))
    assert (frontier.hardware, frontier.dtype) == ("a machine", "float32")
    assert (frontier.measure, frontier.num_items) == ("likelihood", len(items))
    assert frontier.window == BLOCK_SIZE
    steps = frontier.step_seconds
    assert steps.positions[0] == 1
    assert steps.positions[-1] == OPTIONS.batch * (BLOCK_SIZE + 1) ** 2
    assert frontier.prefill_tokens_per_s > 0
    ar, _, low, exact = frontier.points
    (plain,) = ar.windows
    assert (plain.num_masks, plain.tokens_per_forward, plain.positions_per_row) == (0, 1, 1)
    assert (ar.quality, ar.loss, ar.divergence) == (100, None, None)
    assert exact.quality == 100
    assert exact.divergence is not None
    assert exact.divergence.num_diverged == 0
    assert low.loss is not None
    assert low.loss.value > 0
    assert low.quality == pytest.approx(100 - low.loss.value)
    for each in (low, exact):
        narrow, middle, full = each.windows
        assert [narrow.num_masks, middle.num_masks, full.num_masks] == [1, 2, BLOCK_SIZE]
        assert 1 < narrow.tokens_per_forward <= middle.tokens_per_forward <= full.tokens_per_forward
        assert narrow.positions_per_row < middle.positions_per_row < full.positions_per_row


def test_points_equal_the_scores_of_decoding(checkpoint: Checkpoint, items: list[EvalItem]) -> None:
    measured = measure_frontier(
        checkpoint, items, OPTIONS, WorkingFile(checkpoint.path, "key"), Seen()
    )
    engine = evaluation_engine(checkpoint, items, max_tokens=MAX_TOKENS, max_num_seqs=8, exact=True)
    for setting, found in zip(OPTIONS.settings, measured.frontier.points, strict=True):
        outcomes = run_setting(engine, items, setting, max_tokens=MAX_TOKENS)
        result = score(outcomes)
        assert (found.mode, found.threshold) == (setting.mode, setting.threshold)
        assert found.tokens_per_forward == result.tokens_per_forward.value
        assert found.windows[-1].positions_per_row == result.positions_per_forward.value
        expected = ratio_of_totals(
            direct_log_likelihoods(
                checkpoint,
                [(item.prompt, out.tokens) for item, out in zip(items, outcomes, strict=True)],
            ),
            [out.num_tokens for out in outcomes],
        )
        likelihood = found.log_likelihood
        assert likelihood is not None
        found_interval = likelihood.value, likelihood.low, likelihood.high
        assert found_interval == pytest.approx(expected, abs=1e-4)


@torch.inference_mode()
def direct_log_likelihoods(checkpoint: Checkpoint, texts: Sequence[Any]) -> list[float]:
    """Return log-likelihoods from transformers' own logits."""
    model, found = load_model(checkpoint.path), []
    for prompt, output in texts:
        lines = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0].log_softmax(-1)
        before = lines[len(prompt) - 1 : -1]
        found.append(float(before.gather(1, torch.tensor(output)[:, None]).sum()))
    return found


def test_log_likelihoods_are_right_for_texts_with_a_common_start(
    checkpoint: Checkpoint, items: list[EvalItem]
) -> None:
    long = items[0].prompt * 4
    texts = [(long, (20,)), (long, (20, 30, 40)), (long[:-1], (long[-1], 20)), (long[:1], (9, 9))]
    engine = evaluation_engine(checkpoint, items, max_tokens=90, max_num_seqs=2)
    counts: list[int] = []
    found = log_likelihoods(engine, texts, counts.append)
    assert found == pytest.approx(direct_log_likelihoods(checkpoint, texts), abs=1e-4)
    assert counts[-1] == len(texts)
    assert log_likelihoods(engine, [], counts.append) == []


def test_a_stopped_run_is_continued(checkpoint: Checkpoint, items: list[EvalItem]) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure_frontier(
            checkpoint, items, OPTIONS, WorkingFile(checkpoint.path, "key"), Seen("τ 0.05")
        )
    working, seen = WorkingFile(checkpoint.path, "key"), Seen()
    assert working.kept.parts == ["step times", *NAMES[:4]]
    before = working.kept
    assert list(phases_left(OPTIONS, before, 8)) == [*NAMES[4:], "log-likelihoods"]
    measured = measure_frontier(checkpoint, items, OPTIONS, working, seen)
    assert seen.titles == [*NAMES[4:], "log-likelihoods"]
    assert before.speed is not None
    assert measured.frontier.step_seconds == before.speed.step_seconds
    again = Seen()
    complete = WorkingFile(checkpoint.path, "key")
    assert measure_frontier(checkpoint, items, OPTIONS, complete, again) == measured
    assert again.titles == []
    further = replace(OPTIONS, thresholds=(0.5, 0.05, 0.3))
    measure_frontier(checkpoint, items, further, complete, again)
    assert again.titles == ["τ 0.3", "τ 0.3, 1 mask", "τ 0.3, 2 masks", "log-likelihoods"]
    complete.remove()
    assert not (checkpoint.path / WORKING_FILE).exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"key": "key", "speed": 3}', '{"key": "other", "outcomes": {}}']
)
def test_a_working_file_that_cannot_be_used_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / WORKING_FILE).write_text(content)
    working = WorkingFile(tmp_path, "key")
    assert working.kept == KeptMeasurements(key="key")
    working.keep(log_likelihoods={"mode ar": (-1.5,)})
    assert WorkingFile(tmp_path, "key").kept.log_likelihoods == {"mode ar": (-1.5,)}


def test_the_key_of_a_run_depends_on_everything_that_changes_its_figures() -> None:
    items = [EvalItem("a:1", (1, 2), None, False), EvalItem("a:2", (3,), "4", True)]
    keys = {
        run_key("weights", items, {"batch": 2}),
        run_key("others", items, {"batch": 2}),
        run_key("weights", items, {"batch": 3}),
        run_key("weights", items[:1], {"batch": 2}),
        run_key("weights", [items[0], replace(items[1], answer="5")], {"batch": 2}),
        run_key("weights", [items[0], replace(items[1], prompt=(2,))], {"batch": 2}),
    }
    assert len(keys) == 6
    moved = [replace(item, source=f"b{item.source}") for item in items]
    assert run_key("weights", moved, {"batch": 2}) in keys


def outcome(tokens: Sequence[int], correct: bool | None, passes: int = 1) -> DecodedItem:
    return DecodedItem("", tuple(tokens), passes, 2 * passes, FinishReason.STOP, correct)


def found_of(
    ar: Sequence[DecodedItem], low: Sequence[DecodedItem], log_p: float = -2.0
) -> KeptMeasurements:
    """Return what was kept of outputs whose tokens at τ 0.5 have a certain log-likelihood."""
    return KeptMeasurements(
        key="",
        outcomes={"mode ar": tuple(ar), "τ 0.5": tuple(low)},
        log_likelihoods={
            "mode ar": tuple(-1.0 * out.num_tokens for out in ar),
            "τ 0.5": tuple(log_p * out.num_tokens for out in low),
        },
    )


def low_point(found: KeptMeasurements) -> Any:
    return point_of(found, DecodingSetting(Mode.THRESHOLD, 0.5), [], BLOCK_SIZE)


def test_accuracy_is_over_the_items_with_an_answer() -> None:
    low = [outcome([1], True), outcome([1, 2], False), outcome([7], None), outcome([1], True)]
    ar = [outcome([1], each.correct and True) for each in low]
    ar[1] = outcome([1], True)
    point = low_point(found_of(ar, low))
    value, below, above = (100 * part for part in proportion(2, 3))
    assert (point["quality"], point["quality_low"], point["quality_high"]) == (value, below, above)
    assert point["right"] == "101"
    lost = paired_difference([True, True, True], [True, False, True])
    assert point["loss"] == pytest.approx({k: 100 * getattr(lost, k) for k in lost._fields})
    assert point["divergence"] == {"num_outputs": 4, "num_diverged": 2, "num_tokens": 1 + 2 + 1 + 1}
    (window,) = point["windows"]
    assert window == {"num_masks": 4, "tokens_per_forward": 5 / 4, "positions_per_row": 2}
    assert point["log_likelihood"] == pytest.approx({"value": -2, "low": -2, "high": -2})


def test_without_answers_other_texts_that_are_as_likely_are_no_loss() -> None:
    ar = [outcome([1, 2], None), outcome([3], None), outcome([4], None)]
    others = [outcome([1, 7], None), outcome([8], None), outcome([4, 4], None)]
    same = low_point(found_of(ar, others, log_p=-1.0))
    assert same["divergence"]["num_diverged"] == 3
    assert same["loss"] == pytest.approx({"value": 0, "low": 0, "high": 0}, abs=1e-9)
    assert (same["quality"], same["quality_low"]) == (pytest.approx(100), pytest.approx(100))
    worse = low_point(found_of(ar, others, log_p=-1.05))
    assert worse["loss"]["value"] == pytest.approx(100 * (1 - math.exp(-0.05)))
    likelier = low_point(found_of(ar, others, log_p=-0.9))
    assert (likelier["quality"], likelier["quality_high"]) == (100, 100)
    assert likelier["loss"]["value"] < 0
    plain = point_of(found_of(ar, others), ONE_TOKEN, [], BLOCK_SIZE)
    assert (plain["quality"], plain["quality_low"], plain["quality_high"]) == (100, 100, 100)
    assert "loss" not in plain


@pytest.mark.parametrize("num_items", [100, 600])
def test_the_loss_that_is_counted_is_rarely_below_the_true_one(num_items: int) -> None:
    """A true loss of 1.5 points: 3% of the items are lost and 1.5% gained."""
    random = Random(num_items)
    num_runs = num_zero = num_below = 0
    for _ in range(400):
        ar, low = [], []
        for _ in range(num_items):
            draw = random.random()
            ar.append(outcome([1], draw < 0.8))
            is_right = 0.03 <= draw < 0.8 or draw > 1 - 0.015
            low.append(outcome([1], is_right))
        point = low_point(found_of(ar, low))
        counted = max(point["loss"]["high"], 0.0)
        num_runs += 1
        num_zero += counted == 0.0
        num_below += counted < 1.5
    assert num_zero == 0
    assert num_below / num_runs <= 0.04


def test_mean_cached_tokens_are_a_mean_over_passes() -> None:
    items = [EvalItem("a", (0,) * 10, None, False), EvalItem("b", (0,) * 20, None, False)]
    outs = [outcome([1] * 4, None), outcome([1] * 12, None)]
    assert mean_cached_tokens(items, outs) == (4 * 12 + 12 * 26) / 16


def test_a_contradiction_is_reported_and_the_figures_are_kept(
    checkpoint: Checkpoint, items: list[EvalItem]
) -> None:
    working = WorkingFile(checkpoint.path, "key")
    measure_frontier(checkpoint, items, OPTIONS, working, Seen())
    outcomes = dict(working.kept.outcomes)
    # τ 0.5 seems to have taken fewer passes than τ 0.05
    outcomes["τ 0.5"] = tuple(
        replace(out, num_passes=max(1, out.num_tokens // 4)) for out in outcomes["τ 0.5"]
    )
    working.keep(outcomes=outcomes)
    with pytest.raises(UserError) as caught:
        measure_frontier(checkpoint, items, OPTIONS, working, Seen())
    message = str(caught.value)
    assert message.startswith("frontier: windows of τ 0.05: tokens_per_forward must not be more")
    assert "that of τ 0.5" in message
    assert "measure more conversations (--data, --max-items)" in message
    assert message.endswith(f"what is kept in {checkpoint.path / WORKING_FILE}")
    kept, seen = WorkingFile(checkpoint.path, "key"), Seen()
    assert kept.kept == working.kept
    without = replace(OPTIONS, thresholds=(0.05,))
    measured = measure_frontier(checkpoint, items, without, kept, seen)
    assert [point.threshold for point in measured.frontier.points] == [1, 0.05, 1]
    assert seen.titles == []


def made_up() -> MeasuredFrontier:
    """Return a frontier whose steps take twice as long with 100 positions as with none."""
    frontier = frontier_of(
        point("ar", 1.0, 80.0, 1.0, 1.0),
        point("threshold", 0.9, 79.0, 2.0, 4.0),
        point("threshold", 0.5, 60.0, 2.1, 4.0),
        point("exact", 1.0, 80.0, 1.5, 9.0),
        weights="w",
        seconds=((1e-3, 1e-3), (2e-3, 2e-3)),
    )
    return MeasuredFrontier(frontier, 4, 20.0)


def test_figures_hold_the_ladder_and_break_even() -> None:
    measured = made_up()
    figures = frontier_figures(measured, Path("frontier.json"))
    ar, high, low, exact = figures["rungs"]
    time = StepTime((0, 100), (1e-3, 2e-3))
    assert figures["base"] == "mode exact"
    assert ar["tokens_per_s"] == pytest.approx(4 / time.at(4))
    assert high["tokens_per_s"] == pytest.approx(8 / time.at(16))
    assert high["gain"] == pytest.approx(8 / time.at(16) * time.at(36) / 6)
    assert (high["loss"], low["loss"], exact["loss"]) == (3.0, 22.0, 0.0)
    # 2 / (1 + 4b / 100) > 1 / (1 + b / 100) up to b = 50, where both are equal
    assert (ar["break_even_batch"], high["break_even_batch"]) == (None, 49)
    assert exact["break_even_batch"] == 6  # 1.5 (1 + b / 100) > 1 + 9b / 100 up to b = 6.67
    assert [each["useful"] for each in (ar, high, low, exact)] == [False, True, True, True]
    assert [rung.threshold for rung in useful_rungs(measured)] == [1.0, 0.9, 0.5]
    assert figures["points"][1]["quality"] == 79.0


def test_the_work_to_come_is_that_of_all_later_phases() -> None:
    told: list[float] = []
    show = with_work_to_come(
        lambda *_, to_come: told.append(to_come), {"a": 10.0, "b": 30.0, "c": 60.0}
    )
    for title, done, total in [("a", 1, 100), ("b", 1, 3), ("c", 1, 2)]:
        show(title, done, total)
    assert told == [900, 6, 0]  # in parts of the phase that runs
