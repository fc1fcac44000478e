"""Runs ``marsray eval``: scores one checkpoint on files in each mode and at each threshold."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.console import Console

from mars_platform.checkpoint.adapted import read_model
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.cli.progress import ProgressDisplay, progress_display, working
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode, check_threshold
from mars_serve.engine.decoding_options import Outcomes
from mars_serve.engine.engine import Engine
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    device_and_dtype,
    evaluation_engine,
    run_setting,
)
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_serve.measure.evaluation.scoring import Score, score
from mars_serve.measure.options import DEFAULT_THRESHOLDS, EvalOptions

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class SettingResult:
    """The result of one setting."""

    setting: DecodingSetting
    score: Score
    tokens_per_s: float
    """Output tokens for each second, the time of the prompts included."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    options: EvalOptions
    device: str
    dtype: str
    rows: list[SettingResult]
    num_unstated: int
    """Number of conversations whose own final turn does not end with their answer."""


def evaluate(options: EvalOptions, console: Console) -> Evaluation:
    """Measure every setting, with progress on ``console``."""
    for threshold in options.thresholds:
        check_threshold("--threshold", threshold)
    device, dtype = device_and_dtype(options.device, options.dtype, options.model)
    checkpoint = read_model(options.model, options.adapter)
    settings = settings_to_run(checkpoint, options)
    items = read_items(
        options.data,
        checkpoint.tokenizer,
        max_length=checkpoint.max_length,
        max_items=options.max_items,
    )
    with working("loading the model", console):
        engine = evaluation_engine(
            checkpoint,
            items,
            max_tokens=options.max_tokens,
            max_num_seqs=options.batch,
            exact=any(setting.mode is Mode.EXACT for setting in settings),
            dtype=getattr(torch, dtype),
            device=device,
        )
        run_setting(engine, items[: options.batch], settings[-1], max_tokens=_WARM_UP_TOKENS)
    with progress_display(console) as display:
        rows = _measure(engine, items, settings, options.max_tokens, display)
    num_unstated = sum(item.answer is not None and not item.states_answer for item in items)
    return Evaluation(options, device, dtype, rows, num_unstated)


def settings_to_run(checkpoint: Checkpoint, options: EvalOptions) -> list[DecodingSetting]:
    """Return one-token decoding, then the settings of the options, the highest threshold first.

    Raises:
        UserError: the checkpoint cannot decode so, or no mode of the options uses an option.
    """
    modes = options.modes or [Mode.AR if checkpoint.metadata is None else Mode.THRESHOLD]
    below_one = sorted({value for value in options.thresholds if value < 1.0}, reverse=True)
    if checkpoint.metadata is None and (below_one or Mode.THRESHOLD in modes):
        raise UserError(
            f"model: {options.model} is a plain AR checkpoint without mars.json and decodes in "
            "modes ar and exact only; leave out mode threshold and thresholds under 1"
        )
    _check_modes(options, modes, below_one)
    settings = [ONE_TOKEN]
    if Mode.THRESHOLD in modes:
        values = below_one if options.thresholds else DEFAULT_THRESHOLDS
        settings += [
            DecodingSetting(Mode.THRESHOLD, value, calibrated=options.calibrated)
            for value in values
        ]
    if Mode.EXACT in modes:
        layouts = options.outcomes or [Outcomes.ALL]
        settings += [DecodingSetting(Mode.EXACT, 1.0, outcomes=layout) for layout in layouts]
    return [replace(setting, sampling=options.sampling) for setting in settings]


def setting_names(setting: DecodingSetting) -> tuple[str, str]:
    """Return the name of a setting in two parts: its mode, and its τ or its outcomes."""
    if setting.mode is Mode.EXACT:
        return setting.mode, setting.outcomes or ""
    return setting.mode, f"{setting.threshold:g}"


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


def _show(display: ProgressDisplay, title: str, total: int, done: int, quality: str) -> None:
    display.update(title, done, total, quality)


def _measure(
    engine: Engine,
    items: list[EvalItem],
    settings: list[DecodingSetting],
    max_tokens: int,
    display: ProgressDisplay,
) -> list[SettingResult]:
    rows: list[SettingResult] = []
    baseline: list[DecodedItem] | None = None
    for setting in settings:
        title = " ".join(setting_names(setting))
        started = time.monotonic()
        decoded = run_setting(
            engine,
            items,
            setting,
            max_tokens=max_tokens,
            on_progress=partial(_show, display, title, len(items)),
        )
        seconds = time.monotonic() - started
        num_tokens = sum(each.num_tokens for each in decoded)
        rows.append(SettingResult(setting, score(decoded, baseline), num_tokens / seconds))
        baseline = baseline or decoded
    return rows
