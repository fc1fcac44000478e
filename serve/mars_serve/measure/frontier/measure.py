"""Measures a checkpoint's frontier: quality and speed of each way to decode, and step times here.

Windows do not adapt while it measures: each row feeds all masks that it can use, so that a point's
figures depend on the model and the data alone. Knows no terminal, no Ray and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.model.frontier import Frontier, StepTable
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.config import build_settings
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_serve.engine.engine import Engine
from mars_serve.engine.settings import EngineSettings
from mars_serve.measure.calibration.collect import OnProgress
from mars_serve.measure.evaluation.decoding import (
    ONE_TOKEN,
    DecodedItem,
    DecodingSetting,
    evaluation_engine,
    run_setting,
    widest_row,
)
from mars_serve.measure.evaluation.items import EvalItem
from mars_serve.measure.frontier.likelihood import Text, log_likelihoods
from mars_serve.measure.frontier.points import contradiction, name_of, point_of, stored_tokens
from mars_serve.measure.frontier.step_fit import LinearSteps, fit_steps
from mars_serve.measure.frontier.working_file import Found, Speed, WorkingFile, items_sum

_STORED_TOKENS = 512  # of a row, up to which steps are timed
_STEPS, _SCORES = "step times", "log-likelihoods"


@dataclass(frozen=True)
class FrontierOptions:
    """How to measure."""

    thresholds: tuple[float, ...]
    """τ in (0, 1), each once."""
    max_tokens: int
    """Output tokens of an item; what the context leaves may be less."""
    batch: int
    """Items that decode at once, and slots of the replica whose capacity is computed."""
    repeats: int
    """Runs that each step's median time is taken of."""
    dtype: torch.dtype
    """Of the weights."""
    dtype_name: str
    """The same, as the user knows it."""
    device: str
    """Where to run."""
    hardware: str
    """The device in words."""

    @property
    def settings(self) -> list[DecodingSetting]:
        """Plain AR decoding, mode threshold with falling τ, mode exact."""
        falling = sorted(self.thresholds, reverse=True)
        thresholds = [DecodingSetting(Mode.THRESHOLD, value) for value in falling]
        return [ONE_TOKEN, *thresholds, DecodingSetting(Mode.EXACT, 1.0)]


@dataclass(frozen=True)
class MeasuredFrontier:
    """The frontier, and the load that its capacity is computed for."""

    frontier: Frontier
    max_num_seqs: int
    """Rows of a step at the most."""
    stored_tokens: float
    """Mean tokens that a row reads while it decodes these items in mode ar."""

    @cached_property
    def capacity(self) -> Capacity:
        """What a replica can do with these items as its load."""
        return self.frontier.capacity(self.max_num_seqs, self.stored_tokens)

    @cached_property
    def steps(self) -> LinearSteps | None:
        """The line that comes closest to that replica's step times."""
        return fit_steps(self.capacity.step_time)


def phases_left(options: FrontierOptions, found: Found, num_items: int) -> dict[str, float]:
    """Phases that are to be measured still, in order, and the share of the work of each.

    The unit is what an item takes in mode ar; the others are what they took of a tiny model on a
    CPU.
    """
    phases = dict[str, float]()
    if found.speed is None:
        phases[_STEPS] = float(options.batch * options.repeats)
    for setting in options.settings:
        if name_of(setting) not in found.outcomes:
            phases[name_of(setting)] = num_items * (0.5 if setting.mode is Mode.THRESHOLD else 1.0)
    if phases.keys() - {_STEPS} or _unscored(options, found):
        phases[_SCORES] = float(num_items)
    return phases


def measure_frontier(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    options: FrontierOptions,
    working: WorkingFile,
    on_progress: OnProgress,
) -> MeasuredFrontier:
    """Measure what the working file does not hold yet, keep it there, and make the frontier of it.

    Args:
        checkpoint: a MARS one.
        items: at least two.
        options: how to measure.
        working: takes each part as soon as it is measured.
        on_progress: told how far each of `phases_left` is.

    Raises:
        UserError: the weights cannot be loaded, the working file cannot be written, or the figures
            contradict each other.
    """
    assert checkpoint.metadata is not None
    if phases_left(options, working.found, len(items)):
        _measure(_engine(checkpoint, items, options), items, options, working, on_progress)
    found = working.found
    assert found.speed is not None
    points = [point_of(found, setting) for setting in options.settings]
    num_checkable = sum(item.answer is not None for item in items)
    content = {
        "weights": weights_fingerprint(checkpoint.path),
        "hardware": options.hardware,
        "dtype": options.dtype_name,
        "measure": "accuracy" if num_checkable else "agreement",
        "num_items": num_checkable or len(items),
        "items": items_sum(items),
        "window": checkpoint.metadata.block_size,
        **found.speed.model_dump(),
        "points": points,
    }
    try:
        frontier = build_settings(content, Frontier, source="frontier")
    except UserError as error:
        raise contradiction(str(error), points, working.path) from error
    ar = found.outcomes[name_of(ONE_TOKEN)]
    return MeasuredFrontier(frontier, options.batch, stored_tokens(items, ar))


def _engine(checkpoint: Checkpoint, items: Sequence[EvalItem], options: FrontierOptions) -> Engine:
    assert checkpoint.metadata is not None
    widest = widest_row(checkpoint.metadata.block_size, exact=True)
    return evaluation_engine(
        checkpoint,
        items,
        max_tokens=options.max_tokens,
        max_num_seqs=options.batch,
        exact=True,
        min_pool_tokens=max(
            options.batch * (_STORED_TOKENS + widest), EngineSettings().max_num_batched_tokens
        ),
        dtype=options.dtype,
        device=options.device,
    )


def _measure(
    engine: Engine,
    items: Sequence[EvalItem],
    options: FrontierOptions,
    working: WorkingFile,
    on_progress: OnProgress,
) -> None:
    # steps first: on a GPU that captures them as graphs, with which items are decoded faster
    if working.found.speed is None:
        working.keep(speed=_measure_speed(engine, options, on_progress))
    for setting in options.settings:
        name = name_of(setting)
        if name in working.found.outcomes:
            continue
        outcomes = run_setting(
            engine,
            items,
            setting,
            max_tokens=options.max_tokens,
            on_progress=_counting(on_progress, name, len(items)),
        )
        working.keep(outcomes={**working.found.outcomes, name: tuple(outcomes)})
    unscored = _unscored(options, working.found)
    if unscored:
        scores = _score_outputs(engine, items, unscored, on_progress)
        working.keep(log_likelihoods={**working.found.log_likelihoods, **scores})


def _measure_speed(engine: Engine, options: FrontierOptions, on_progress: OnProgress) -> Speed:
    times = engine.measure_step_times(
        widest_row=widest_row(engine.window, exact=True),
        repeats=options.repeats,
        on_progress=partial(on_progress, _STEPS),
    )
    table = StepTable(positions=times.positions, stored=times.cached_tokens, seconds=times.seconds)
    num_tokens = (
        EngineSettings().max_num_batched_tokens
    )  # a server's chunk where nothing else is set
    rate = engine.measure_prefill(num_tokens, options.repeats)
    return Speed(step_seconds=table, prefill_tokens_per_s=rate)


def _unscored(options: FrontierOptions, found: Found) -> dict[str, tuple[DecodedItem, ...]]:
    wanted = {name_of(setting) for setting in options.settings} - found.log_likelihoods.keys()
    return {name: outcomes for name, outcomes in found.outcomes.items() if name in wanted}


def _score_outputs(
    engine: Engine,
    items: Sequence[EvalItem],
    unscored: Mapping[str, Sequence[DecodedItem]],
    on_progress: OnProgress,
) -> dict[str, tuple[float, ...]]:
    """Log-likelihoods by setting; an output that several settings gave is scored once."""

    def text(item: EvalItem, outcome: DecodedItem) -> Text:
        return item.prompt, outcome.tokens

    texts = {name: [*map(text, items, outcomes)] for name, outcomes in unscored.items()}
    distinct = list(dict.fromkeys(each for line in texts.values() for each in line))
    found = log_likelihoods(engine, distinct, _counting(on_progress, _SCORES, len(distinct)))
    score_of = dict(zip(distinct, found, strict=True))
    return {name: tuple(score_of[each] for each in line) for name, line in texts.items()}


def _counting(on_progress: OnProgress, title: str, total: int) -> Callable[[int], None]:
    return lambda done: on_progress(title, done, total)
