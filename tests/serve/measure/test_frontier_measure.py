"""The frontier that ``marsray calibrate`` measures, and ``frontier.json``."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mars_autoscale.model.capacity import StepTime, linear_step_time
from mars_autoscale.model.frontier import FRONTIER_FILE, Frontier, read_frontier, write_frontier
from mars_platform.checkpoint.directory import Checkpoint, load_model, read_checkpoint
from mars_platform.cli import main as cli
from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import proportion, ratio_of_totals
from mars_serve.engine.decoding_options import FinishReason
from mars_serve.engine.execution.warm_up import measure_prefill, measure_steps
from mars_serve.engine.pages import PagePool
from mars_serve.engine.scheduled_row import ScheduledRow
from mars_serve.measure.calibration.run import CalibrateOptions
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_serve.measure.evaluation.scoring import score
from mars_serve.measure.frontier.likelihood import log_likelihoods
from mars_serve.measure.frontier.measure import (
    FrontierOptions,
    MeasuredFrontier,
    measure_frontier,
    phases_left,
)
from mars_serve.measure.frontier.points import point_of, stored_tokens
from mars_serve.measure.frontier.progress import WholeProgress
from mars_serve.measure.frontier.report import frontier_figures, frontier_notes, useful_rungs
from mars_serve.measure.frontier.step_fit import fit_steps
from mars_serve.measure.frontier.working_file import WORKING_FILE, Found, WorkingFile, run_key

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
)
NAMES = ["mode ar", "τ 0.5", "τ 0.05", "mode exact"]


@pytest.fixture(name="data")
def _data(tmp_path: Path) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} plus {n * n}?"},
                {"role": "assistant", "content": "7"},
            ]
        }
        for n in range(8)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(name="model_dir")
def _model_dir(mars_dir: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, for its files."""
    return shutil.copytree(mars_dir, tmp_path / "model")


@pytest.fixture(name="checkpoint")
def _checkpoint(model_dir: Path) -> Checkpoint:
    return read_checkpoint(model_dir)


@pytest.fixture(name="items")
def _items(checkpoint: Checkpoint, data: Path) -> list[EvalItem]:
    return read_items([data], checkpoint.tokenizer, max_length=checkpoint.max_length)


class Seen:
    """Progress as it was told."""

    def __init__(self, stop_at: str | None = None) -> None:
        self.titles: list[str] = []
        self._stop_at = stop_at

    def __call__(self, title: str, done: int, total: int) -> None:
        assert 0 < done <= total
        if title == self._stop_at:
            raise KeyboardInterrupt
        if title not in self.titles:
            self.titles.append(title)


# A whole run


def test_a_run_writes_a_file_that_is_taken(checkpoint: Checkpoint, items: list[EvalItem]) -> None:
    working, seen = WorkingFile(checkpoint.path, "key"), Seen()
    measured = measure_frontier(checkpoint, items, OPTIONS, working, seen)
    write_frontier(checkpoint.path, measured.frontier)
    frontier = read_frontier(checkpoint.path)
    assert frontier == measured.frontier
    assert seen.titles == ["step times", *NAMES, "log-likelihoods"]
    assert seen.titles == list(phases_left(OPTIONS, Found(key=""), len(items)))
    assert (frontier.hardware, frontier.dtype) == ("a machine", "float32")
    assert (frontier.measure, frontier.num_items) == ("agreement", len(items))
    assert frontier.window == BLOCK_SIZE
    steps = frontier.step_seconds
    assert steps.positions[0] == 1
    assert steps.positions[-1] == OPTIONS.batch * (BLOCK_SIZE + 1) ** 2
    assert frontier.prefill_tokens_per_s > 0
    ar, _, low, exact = frontier.points
    assert (ar.quality, ar.tokens_per_forward, ar.positions_per_row) == (100, 1, 1)
    assert exact.quality == 100
    assert low.quality < 100
    assert low.tokens_per_forward > 1.1


def test_points_are_what_decoding_by_itself_gives(
    checkpoint: Checkpoint, items: list[EvalItem]
) -> None:
    measured = measure_frontier(
        checkpoint, items, OPTIONS, WorkingFile(checkpoint.path, "key"), Seen()
    )
    engine = evaluation_engine(checkpoint, items, max_tokens=MAX_TOKENS, max_num_seqs=8, exact=True)
    for setting, point in zip(OPTIONS.settings, measured.frontier.points, strict=True):
        outcomes = run_setting(engine, items, setting, max_tokens=MAX_TOKENS)
        result = score(outcomes)
        assert (point.mode, point.threshold) == (setting.mode, setting.threshold)
        assert point.tokens_per_forward == result.tokens_per_forward.value
        assert point.positions_per_row == result.positions_per_forward.value
        expected = ratio_of_totals(
            directly(
                checkpoint, [(item.prompt, out.tokens) for item, out in pairs(items, outcomes)]
            ),
            [out.num_tokens for out in outcomes],
        )
        assert point.log_likelihood is not None
        found = point.log_likelihood
        assert (found.mean, found.low, found.high) == pytest.approx(expected, abs=1e-4)


def pairs(items: Sequence[EvalItem], outcomes: Sequence[DecodedItem]) -> list[tuple[Any, Any]]:
    return list(zip(items, outcomes, strict=True))


@torch.inference_mode()
def directly(checkpoint: Checkpoint, texts: Sequence[Any]) -> list[float]:
    """Log-likelihoods from transformers' own logits."""
    model, found = load_model(checkpoint.path), []
    for prompt, output in texts:
        lines = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0].log_softmax(-1)
        before = lines[len(prompt) - 1 : -1]
        found.append(float(before.gather(1, torch.tensor(output)[:, None]).sum()))
    return found


def test_log_likelihoods_of_texts_that_begin_alike(
    checkpoint: Checkpoint, items: list[EvalItem]
) -> None:
    long = items[0].prompt * 4
    texts = [(long, (20,)), (long, (20, 30, 40)), (long[:-1], (long[-1], 20)), (long[:1], (9, 9))]
    engine = evaluation_engine(checkpoint, items, max_tokens=90, max_num_seqs=2)
    counts: list[int] = []
    found = log_likelihoods(engine, texts, counts.append)
    assert found == pytest.approx(directly(checkpoint, texts), abs=1e-4)
    assert counts[-1] == len(texts)
    assert log_likelihoods(engine, [], counts.append) == []


# Taking up what was left


def test_a_stopped_run_is_taken_up(checkpoint: Checkpoint, items: list[EvalItem]) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure_frontier(
            checkpoint, items, OPTIONS, WorkingFile(checkpoint.path, "key"), Seen("τ 0.05")
        )
    working, seen = WorkingFile(checkpoint.path, "key"), Seen()
    assert working.found.parts == ["step times", "mode ar", "τ 0.5"]
    before = working.found
    assert list(phases_left(OPTIONS, before, 8)) == ["τ 0.05", "mode exact", "log-likelihoods"]
    measured = measure_frontier(checkpoint, items, OPTIONS, working, seen)
    assert seen.titles == ["τ 0.05", "mode exact", "log-likelihoods"]
    assert before.speed is not None
    assert measured.frontier.step_seconds == before.speed.step_seconds
    again = Seen()
    complete = WorkingFile(checkpoint.path, "key")
    assert measure_frontier(checkpoint, items, OPTIONS, complete, again) == measured
    assert again.titles == []
    further = replace(OPTIONS, thresholds=(0.5, 0.05, 0.3))
    measure_frontier(checkpoint, items, further, complete, again)
    assert again.titles == ["τ 0.3", "log-likelihoods"]
    complete.remove()
    assert not (checkpoint.path / WORKING_FILE).exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"key": "key", "speed": 3}', '{"key": "other", "outcomes": {}}']
)
def test_what_cannot_be_taken_up_counts_for_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / WORKING_FILE).write_text(content)
    working = WorkingFile(tmp_path, "key")
    assert working.found == Found(key="key")
    working.keep(log_likelihoods={"mode ar": (-1.5,)})
    assert WorkingFile(tmp_path, "key").found.log_likelihoods == {"mode ar": (-1.5,)}


def test_a_run_is_known_by_all_that_its_figures_depend_on() -> None:
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


# Points


def outcome(tokens: Sequence[int], correct: bool | None, passes: int = 1) -> DecodedItem:
    return DecodedItem("", tuple(tokens), passes, 2 * passes, FinishReason.STOP, correct)


def found_of(ar: Sequence[DecodedItem], low: Sequence[DecodedItem]) -> Found:
    return Found(
        key="",
        outcomes={"mode ar": tuple(ar), "τ 0.5": tuple(low)},
        log_likelihoods={
            "mode ar": tuple(-1.0 for _ in ar),
            "τ 0.5": tuple(-2.0 * out.num_tokens for out in low),
        },
    )


def test_accuracy_is_over_the_items_with_an_answer() -> None:
    low = [outcome([1], True), outcome([1, 2], False), outcome([7], None), outcome([1], True)]
    point = point_of(found_of([outcome([1], True)] * 4, low), DecodingSetting(Mode.THRESHOLD, 0.5))
    value, below, above = (100 * part for part in proportion(2, 3))
    assert (point["quality"], point["quality_low"], point["quality_high"]) == (value, below, above)
    assert point["tokens_per_forward"] == 5 / 4
    assert point["positions_per_row"] == 2
    assert point["log_likelihood"] == pytest.approx({"mean": -2, "low": -2, "high": -2})


def test_without_answers_agreement_is_over_all_items() -> None:
    ar = [outcome([1, 2], None), outcome([3], None), outcome([4], None)]
    found = found_of(ar, [outcome([1, 2], None), outcome([3], None), outcome([4, 4], None)])
    low = point_of(found, DecodingSetting(Mode.THRESHOLD, 0.5))
    assert low["quality"] == pytest.approx(100 * 2 / 3)
    assert low["quality_low"] == 100 * proportion(2, 3).low
    same = point_of(found, ONE_TOKEN)
    assert (same["quality"], same["quality_high"]) == (100, 100)
    assert same["quality_low"] < 100


def test_stored_tokens_are_a_mean_over_passes() -> None:
    items = [EvalItem("a", (0,) * 10, None, False), EvalItem("b", (0,) * 20, None, False)]
    outs = [outcome([1] * 4, None), outcome([1] * 12, None)]
    assert stored_tokens(items, outs) == (4 * 12 + 12 * 26) / 16


# Contradictions


def test_a_contradiction_is_told_and_the_figures_are_kept(
    checkpoint: Checkpoint, items: list[EvalItem]
) -> None:
    working = WorkingFile(checkpoint.path, "key")
    measure_frontier(checkpoint, items, OPTIONS, working, Seen())
    outcomes = dict(working.found.outcomes)
    # mode threshold at .5 is said to have taken half as many passes as at .05
    outcomes["τ 0.5"] = tuple(
        replace(out, num_passes=max(1, out.num_tokens // 4)) for out in outcomes["τ 0.5"]
    )
    working.keep(outcomes=outcomes)
    with pytest.raises(UserError) as caught:
        measure_frontier(checkpoint, items, OPTIONS, working, Seen())
    message = str(caught.value)
    assert message.startswith("frontier: tokens_per_forward of τ 0.05, ")
    assert "more than 2% below" in message
    assert "that of τ 0.5" in message
    assert "measure more conversations (--data, --max-items)" in message
    assert message.endswith(f"what is kept in {checkpoint.path / WORKING_FILE}")
    kept, seen = WorkingFile(checkpoint.path, "key"), Seen()
    assert kept.found == working.found
    without = replace(OPTIONS, thresholds=(0.05,))
    measured = measure_frontier(checkpoint, items, without, kept, seen)
    assert [point.threshold for point in measured.frontier.points] == [1, 0.05, 1]
    assert seen.titles == []


# Times of steps


def pool_and_run() -> tuple[
    PagePool, list[list[ScheduledRow]], Callable[[Sequence[ScheduledRow]], object]
]:
    steps: list[list[ScheduledRow]] = []
    return PagePool(200, 4), steps, lambda works: steps.append(list(works))


@pytest.mark.parametrize(("max_length", "num_rows"), [(1000, 1), (65, 2), (64, 3), (20, 7)])
def test_prefill_steps_are_full_of_prompts(max_length: int, num_rows: int) -> None:
    pool, steps, run = pool_and_run()
    rate = measure_prefill(run, pool, num_tokens=128, max_length=max_length, repeats=3)
    assert rate > 0
    assert len(steps) == 4
    for works in steps:
        assert len(works) == num_rows
        assert sum(work.num_positions for work in works) == 128
        assert all(work.num_masks == 0 and work.request.num_cached == 0 for work in works)
        assert all(work.num_tokens <= max_length for work in works)
    assert pool.num_free == pool.num_pages


def test_a_small_pool_holds_what_prefill_feeds() -> None:
    _, steps, run = pool_and_run()
    pool = PagePool(3, 4)
    measure_prefill(run, pool, num_tokens=128, max_length=1000, repeats=1)
    assert 0 < sum(work.num_positions for work in steps[0]) <= 12


def test_steps_are_timed_up_to_the_widest_row() -> None:
    pool, steps, run = pool_and_run()
    times = measure_steps(
        run,
        pool,
        max_num_seqs=4,
        max_num_batched_tokens=1000,
        max_length=100,
        window=4,
        widest_row=25,
        repeats=2,
    )
    assert times.positions[-1] == 100
    assert times.positions[-2] == 64  # not 96: the last piece is no mere noise
    assert {len(works) for works in steps} == {1, 2, 3, 4}
    assert max(sum(work.num_positions for work in works) for works in steps) == 100
    assert len(steps) == 3 * (4 + len(times.positions))
    assert pool.num_free == pool.num_pages


# What is shown


def made_up() -> MeasuredFrontier:
    """Steps take a millisecond and twice that with 40 positions more."""
    rows = [("ar", 1.0, 90.0, 1.0, 1.0), ("threshold", 0.9, 89.0, 2.0, 4.0)]
    rows += [("threshold", 0.5, 70.0, 2.1, 4.0), ("exact", 1.0, 90.0, 1.5, 9.0)]
    keys = ("mode", "threshold", "quality", "tokens_per_forward", "positions_per_row")
    points = [dict(zip(keys, row, strict=True)) for row in rows]
    content = {
        "weights": "w",
        "hardware": "h",
        "dtype": "float32",
        "measure": "accuracy",
        "num_items": 100,
        "window": 4,
        "step_seconds": {
            "positions": [0, 40],
            "stored": [0, 100],
            "seconds": [[1e-3, 1e-3], [2e-3, 2e-3]],
        },
        "prefill_tokens_per_s": 1000,
        "points": [
            point | {"quality_low": point["quality"] - 5, "quality_high": point["quality"] + 5}
            for point in points
        ],
    }
    return MeasuredFrontier(build_settings(content, Frontier, source="made up"), 4, 20.0)


def test_figures_hold_hull_and_break_even() -> None:
    measured = made_up()
    figures = frontier_figures(measured, Path("frontier.json"))
    ar, high, low, exact = figures["rungs"]
    time = StepTime((0, 40), (1e-3, 2e-3))
    assert ar["tokens_per_s"] == pytest.approx(4 / time.at(4))
    assert high["tokens_per_s"] == pytest.approx(8 / time.at(16))
    assert high["gain"] == pytest.approx(8 / time.at(16) * time.at(4) / 4)
    # 2 / (1 + 4b / 40) > 1 / (1 + b / 40) up to b = 20, where both are equal
    assert (ar["break_even_batch"], high["break_even_batch"]) == (None, 19)
    assert exact["break_even_batch"] == 2  # 1.5 (1 + b / 40) > 1 + 9b / 40 up to b = 2.67
    assert [each["useful"] for each in (ar, high, low, exact)] == [True, True, True, False]
    assert [rung.threshold for rung in useful_rungs(measured)] == [1.0, 0.9, 0.5]
    assert figures["points"][1]["quality"] == 89.0


def test_steps_come_down_to_two_numbers() -> None:
    exact = linear_step_time(0.032, 128)
    grid = (1.0, 4.0, 16.0, 64.0, 256.0)
    found = fit_steps(StepTime(grid, tuple(map(exact.at, grid))))
    assert found is not None
    assert (found.t0_s, found.positions_to_double) == pytest.approx((0.032, 128))
    assert found.error_max == pytest.approx(0, abs=1e-9)


def test_the_line_is_as_close_to_short_steps_as_to_long_ones() -> None:
    # by hand: 1 and 1.1 ms at 10 positions, 10 and 11 ms at 1000; halfway, in shares of each
    steps = StepTime((10.0, 10.0001, 1000.0, 1000.0001), (1e-3, 1.1e-3, 1e-2, 1.1e-2))
    found = fit_steps(steps)
    assert found is not None
    share = (1 + 1 / 1.1) / (1 + 1 / 1.1**2)  # that minimises (1 - x)^2 + (1 - x / 1.1)^2
    assert found.t0_s + 10 * found.t0_s / found.positions_to_double == pytest.approx(1e-3 * share)
    errors = share - 1, 1 - share / 1.1
    assert found.error_max == pytest.approx(max(errors), rel=1e-3)
    assert found.error_mean == pytest.approx(sum(errors) / 2, rel=1e-3)


def test_steps_that_do_not_grow_and_steps_that_grow_too_fast() -> None:
    flat = fit_steps(StepTime((1.0, 9.0, 99.0), (2e-3, 2.1e-3, 1.9e-3)))
    assert flat is not None
    assert flat.t0_s == pytest.approx(2e-3, rel=0.02)
    assert flat.positions_to_double == math.inf
    assert fit_steps(StepTime((1.0, 10.0, 100.0), (1e-5, 1e-3, 1e-1))) is None


@pytest.mark.parametrize(
    ("seconds", "said", "told"),
    [
        (
            ((1e-3, 1e-3), (2e-3, 2e-3)),
            "t0 1 ms, K 40; measured steps are off by 0% on average, 0% at the most.",
            (pytest.approx(1e-3), pytest.approx(40)),
        ),
        (((1e-3, 1e-3), (1e-3, 1e-3)), "K none, steps do not grow", (pytest.approx(1e-3), None)),
    ],
)
def test_t0_and_k_stand_under_the_table(
    seconds: tuple[tuple[float, ...], ...], said: str, told: tuple[Any, Any]
) -> None:
    measured = made_up()
    table = measured.frontier.step_seconds.model_copy(update={"seconds": seconds})
    frontier = measured.frontier.model_copy(update={"step_seconds": table})
    measured = replace(measured, frontier=frontier)
    (line,) = [each for each in frontier_notes(measured, Path("f")) if "t0 * (1 +" in each]
    assert said in line
    found = frontier_figures(measured, Path("f"))["step_time"]
    assert (found["t0_s"], found["positions_to_double"]) == told


def test_time_left_is_for_the_whole() -> None:
    told: list[tuple[str, int, int, str]] = []
    now = [100.0]
    progress = WholeProgress(
        lambda *each: told.append(each), {"a": 10, "b": 30, "c": 60}, clock=lambda: now[0]
    )
    for seconds, *step in [(1, "a", 1, 100), (20, "a", 4, 4), (40, "b", 1, 3), (3e4, "c", 1, 2)]:
        now[0] = 100.0 + seconds
        progress.update(*step)
    progress.update("c", 2, 2)
    assert [left for *_, left in told] == [
        "",
        "about 3 min left in all",  # 20 s for a tenth
        "about 3 min left in all",  # 40 s for a fifth
        "about 4 h left in all",
        "",
    ]


def test_quick_gives_way_to_what_is_asked_for() -> None:
    quick = CalibrateOptions("m", [], quick=True)
    assert (quick.num_rows, quick.below_one) == (100, (0.95, 0.9, 0.8, 0.7))
    full = CalibrateOptions("m", [])
    assert (full.num_rows, full.below_one) == (None, (0.95, 0.9, 0.8, 0.7, 0.6, 0.5))
    assert quick.repeats < full.repeats
    asked = replace(quick, max_items=7, thresholds=(0.8, 1.0, 0.8))
    assert (asked.num_rows, asked.below_one) == (7, (0.8,))


# The command


def run(*arguments: Any) -> int:
    return cli.run(["calibrate", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command sets it where it is not set


def test_the_command_from_end_to_end(
    model_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", data, "--max-tokens", MAX_TOKENS, "--batch", 2, "--quick"]
    options += ["--threshold", 0.5, "--threshold", 0.05, "--threshold", 1]
    (model_dir / FRONTIER_FILE).mkdir()
    assert run(model_dir, *options) == 2
    output = capsys.readouterr()
    assert output.err.splitlines()[-1].startswith("error: model: frontier.json cannot be written")
    assert (model_dir / WORKING_FILE).exists()

    (model_dir / FRONTIER_FILE).rmdir()
    (model_dir / FRONTIER_FILE).write_text("{")  # what is replaced need not be readable
    plot = tmp_path / "plot.svg"
    assert run(model_dir, *options, "--json", "--plot", plot) == 0
    output = capsys.readouterr()
    parts = "calibration, step times, mode ar, τ 0.5, τ 0.05, mode exact"
    assert output.err == f"{model_dir / WORKING_FILE}: not measured again: {parts}\n"
    printed = json.loads(output.out)["frontier"]
    frontier = read_frontier(model_dir)
    assert printed.items() >= frontier.model_dump(mode="json").items()
    assert [point.threshold for point in frontier.points] == [1, 0.5, 0.05, 1]
    assert printed["num_slots"] == 2
    assert "step_time" in printed
    assert "step_time" not in json.loads((model_dir / FRONTIER_FILE).read_text())
    assert not (model_dir / WORKING_FILE).exists()
    assert "<svg" in plot.read_text()


def test_the_command_prints_a_table(
    model_dir: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_dir, "--data", data, "--max-tokens", 4, "--threshold", 0.1, "--quick") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for title in ("agreement, %", "log p / token", "tok/fwd", "pos/row", "break-even", "hull"):
        assert title in printed
    assert "│ τ 0.1 │ " in printed
    assert "No row has an answer" in printed
    assert printed.endswith(f"Written to {model_dir / FRONTIER_FILE}")


@pytest.mark.parametrize("threshold", ["0", "1.1", "-1", "nan"])
def test_a_threshold_out_of_range_is_refused(
    model_dir: Path, data: Path, threshold: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model_dir, "--data", data, "--threshold", threshold) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: --threshold: ")
    assert "is not in (0, 1]" in message
