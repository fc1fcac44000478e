"""``marsray eval``: one checkpoint on some files, a row for each mode and threshold."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.cli.progress import ProgressDisplay, progress_display
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import Estimate
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Outcomes, Sampling
from mars_serve.measure.evaluation.scoring import (
    ONE_TOKEN,
    EvalItem,
    Outcome,
    Score,
    Setting,
    evaluation_engine,
    read_items,
    run_setting,
    score,
)

DEFAULT_THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_WARM_UP_TOKENS = 4
_MAX_TEMPERATURE = 2.0


@dataclass(frozen=True)
class EvalOptions:
    """What ``marsray eval`` is asked for."""

    model: str
    """Checkpoint directory or hub id."""
    data: Sequence[Path]
    """JSONL and Parquet files of conversations."""
    thresholds: Sequence[float] = ()
    """τ of the rows; empty for the default ones. One-token decoding is always measured."""
    modes: Sequence[Mode] = ()
    """Empty for mode ar and, with a MARS checkpoint, threshold; exact is measured where named."""
    outcomes: Sequence[Outcomes] = ()
    """A row of mode exact for each; empty for all outcomes. The engine's own choice among them goes
    by a step's time, which is no matter of quality."""
    calibrated: bool = False
    """Measure mode threshold with calibrated confidence."""
    sampling: Sampling = field(default_factory=Sampling)
    """Of all rows; see `Setting`."""
    max_items: int | None = None
    """Conversations, the first ones of the files."""
    max_tokens: int = 256
    """Output tokens of a conversation; what the context leaves may be less."""
    batch: int = 32
    """Conversations that run at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Auto is CUDA where there is a device."""
    dtype: Literal["float32", "bf16"] | None = None
    """Of weights, keys and values; None for float32 on the CPU and bf16 on CUDA."""


@dataclass(frozen=True)
class Row:
    """One setting's result."""

    setting: Setting
    score: Score
    tokens_per_s: float
    """Output tokens a second over the whole set, prompts' time included."""


@dataclass(frozen=True)
class Evaluation:
    """The result; the first row is one-token decoding, which the others are compared with."""

    options: EvalOptions
    device: str
    dtype: str
    rows: list[Row]
    num_unstated: int
    """Rows whose own final turn does not end with their answer."""


def evaluate(options: EvalOptions, console: Console) -> Evaluation:
    """Measure every setting, with progress on ``console``.

    Raises:
        UserError: the model, the data or an option is unusable.
    """
    _check_ranges(options)
    device = _device(options.device)
    dtype = options.dtype or ("float32" if device == "cpu" else "bf16")
    checkpoint = read_checkpoint(options.model)
    settings = settings_to_run(checkpoint, options)
    items = read_items(
        options.data,
        checkpoint.tokenizer,
        max_length=checkpoint.max_length,
        max_items=options.max_items,
    )
    engine = evaluation_engine(
        checkpoint,
        items,
        max_tokens=options.max_tokens,
        max_num_seqs=options.batch,
        exact=any(setting.mode is Mode.EXACT for setting in settings),
        dtype=_DTYPES[dtype],
        device=device,
    )
    run_setting(engine, items[: options.batch], settings[-1], max_tokens=_WARM_UP_TOKENS)
    with progress_display(console) as display:
        rows = _measure(engine, items, settings, options.max_tokens, display)
    num_unstated = sum(item.answer is not None and not item.states_answer for item in items)
    return Evaluation(options, device, dtype, rows, num_unstated)


def settings_to_run(checkpoint: Checkpoint, options: EvalOptions) -> list[Setting]:
    """One-token decoding, then what is asked for, the highest threshold first.

    Raises:
        UserError: the checkpoint cannot decode so, or an option belongs to no mode asked for.
    """
    modes = options.modes or [Mode.AR if checkpoint.metadata is None else Mode.THRESHOLD]
    below_one = sorted({value for value in options.thresholds if value < 1.0}, reverse=True)
    if checkpoint.metadata is None and (below_one or {*modes} != {Mode.AR}):
        raise UserError(
            f"model: {options.model} is a plain AR checkpoint without mars.json and decodes in "
            "mode ar only; leave out other modes and thresholds under 1"
        )
    _check_modes(options, modes, below_one)
    settings = [ONE_TOKEN]
    if Mode.THRESHOLD in modes:
        values = below_one if options.thresholds else DEFAULT_THRESHOLDS
        settings += [
            Setting(Mode.THRESHOLD, value, calibrated=options.calibrated) for value in values
        ]
    if Mode.EXACT in modes:
        layouts = options.outcomes or [Outcomes.ALL]
        settings += [Setting(Mode.EXACT, 1.0, outcomes=layout) for layout in layouts]
    return [replace(setting, sampling=options.sampling) for setting in settings]


def print_evaluation(evaluation: Evaluation, console: Console, *, as_json: bool) -> None:
    """Print the result as a table with its notes, or as JSON."""
    if as_json:
        console.print_json(json.dumps(_figures(evaluation)))
        return
    console.print(_table(evaluation))
    for note in _notes(evaluation):
        console.print(note, style="dim", highlight=False, markup=False)


def _check_ranges(options: EvalOptions) -> None:
    for threshold in options.thresholds:
        if not 0.0 < threshold <= 1.0:
            raise UserError(f"--threshold: {threshold} is not in (0, 1]; 1 is plain AR decoding")
    sampling = options.sampling
    if not 0.0 <= sampling.temperature <= _MAX_TEMPERATURE:
        limits = f"[0, {_MAX_TEMPERATURE:g}]"
        raise UserError(f"--temperature: {sampling.temperature} is not in {limits}; 0 is greedy")
    if not 0.0 < sampling.top_p <= 1.0:
        raise UserError(f"--top-p: {sampling.top_p} is not in (0, 1]; 1 is all tokens")


def _check_modes(options: EvalOptions, modes: Sequence[Mode], below_one: Sequence[float]) -> None:
    if Mode.THRESHOLD not in modes:
        if below_one:
            raise UserError(
                f"--threshold: mode {modes[0]} knows no threshold and {below_one[0]:g} is under 1; "
                "add --mode threshold or leave it out"
            )
        if options.calibrated:
            raise UserError(
                "--calibrated: only mode threshold goes by a confidence; add --mode threshold or "
                "leave it out"
            )
    if options.outcomes and Mode.EXACT not in modes:
        raise UserError("--outcomes: only mode exact has outcomes; add --mode exact")


def _device(device: str) -> str:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("--device: there is no CUDA device on this machine; use cpu")
    return "cuda" if available and device != "cpu" else "cpu"


def _measure(
    engine: Engine,
    items: list[EvalItem],
    settings: list[Setting],
    max_tokens: int,
    display: ProgressDisplay,
) -> list[Row]:
    rows: list[Row] = []
    baseline: list[Outcome] | None = None
    for setting in settings:
        title = " ".join(_names(setting))
        started = time.monotonic()
        outcomes = run_setting(
            engine,
            items,
            setting,
            max_tokens=max_tokens,
            on_progress=partial(display.update, title, total=len(items)),
        )
        seconds = time.monotonic() - started
        num_tokens = sum(outcome.num_tokens for outcome in outcomes)
        rows.append(Row(setting, score(outcomes, baseline), num_tokens / seconds))
        baseline = baseline or outcomes
    return rows


def _names(setting: Setting) -> tuple[str, str]:
    """What a row is called: its mode, and its τ or its outcomes."""
    if setting.mode is Mode.EXACT:
        return setting.mode, setting.outcomes or ""
    return setting.mode, f"{setting.threshold:g}"


def _table(evaluation: Evaluation) -> Table:
    checkable = evaluation.rows[0].score.num_checkable > 0
    table = Table()
    for title in ("mode", "τ"):
        table.add_column(title, no_wrap=True)
    quality = ("accuracy", "difference") if checkable else ()
    for title in (*quality, "tok/fwd", "pos/fwd", "identical", "cut off", "tok/s"):
        table.add_column(title, justify="right", overflow="fold")
    for row in evaluation.rows:
        result = row.score
        cells = [_percent(result.accuracy), _points(result.difference)] if checkable else []
        table.add_row(
            *_names(row.setting),
            *cells,
            _plain(result.tokens_per_forward),
            f"{result.positions_per_forward.value:.2f}",
            "" if result.identical is None else f"{100 * result.identical:.1f}%",
            f"{100 * result.cut_off:.1f}%",
            f"{row.tokens_per_s:,.0f}",
        )
    return table


def _notes(evaluation: Evaluation) -> list[str]:
    first, options = evaluation.rows[0].score, evaluation.options
    notes = [
        f"{first.num_items} conversations, at most {options.max_tokens} output tokens, "
        f"{first.mean_tokens:.1f} on average in mode ar; batch {options.batch}, "
        f"{evaluation.dtype} on {evaluation.device}. Brackets are 95% intervals.",
        *_decoding_notes(evaluation),
    ]
    if first.num_checkable == 0:
        notes.append("No row has an answer, so that accuracy cannot be measured.")
        return notes
    notes.append(
        f"Accuracy is over the {first.num_checkable} conversations with an answer; differences are "
        "in points, paired with mode ar."
    )
    if evaluation.num_unstated:
        notes.append(
            f"{evaluation.num_unstated} of these do not state their answer at the end of their own "
            "final turn, behind 'Answer:' or '####'; outputs that do the same count as wrong."
        )
    return notes


def _decoding_notes(evaluation: Evaluation) -> list[str]:
    notes, options, sampling = list[str](), evaluation.options, evaluation.options.sampling
    if any(row.setting.mode is Mode.EXACT for row in evaluation.rows):
        notes.append(
            "Mode exact feeds masks for all outcomes of a check, or for the last one, where all "
            "drafts are right."
        )
    if options.calibrated:
        notes.append("Mode threshold compares τ with calibrated confidence.")
    if sampling.temperature > 0:
        notes.append(
            f"Sampled at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, seed "
            f"{sampling.seed} plus the conversation's number, counted from 0."
        )
    return notes


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    value, low, high = (100 * part for part in estimate)
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]"


def _points(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    value, low, high = (100 * part for part in estimate)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


def _plain(estimate: Estimate) -> str:
    value, low, high = estimate
    return f"{value:.2f} [{low:.2f}, {high:.2f}]" if math.isfinite(low) else f"{value:.2f}"


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "model": evaluation.options.model,
        "data": [str(path) for path in evaluation.options.data],
        "max_tokens": evaluation.options.max_tokens,
        "batch": evaluation.options.batch,
        "device": evaluation.device,
        "dtype": evaluation.dtype,
        "calibrated": evaluation.options.calibrated,
        "temperature": evaluation.options.sampling.temperature,
        "top_p": evaluation.options.sampling.top_p,
        "seed": evaluation.options.sampling.seed,
        "num_unstated": evaluation.num_unstated,
        "rows": [
            {
                "mode": row.setting.mode,
                "threshold": row.setting.threshold,
                "outcomes": row.setting.outcomes,
                **{key: _jsonable(value) for key, value in asdict(row.score).items()},
                "tokens_per_s": row.tokens_per_s,
            }
            for row in evaluation.rows
        ],
    }


def _jsonable(value: Any) -> Any:
    """Estimates as objects; JSON knows no infinity, so that an endless interval has null ends."""
    if not isinstance(value, Estimate):
        return value
    return {key: part if math.isfinite(part) else None for key, part in value._asdict().items()}
