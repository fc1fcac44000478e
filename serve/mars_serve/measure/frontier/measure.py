"""Measures a checkpoint's frontier: quality and speed of each setting, and step times here.

Windows do not adapt during the measurement, so that a point's figures depend on the model and the
data alone: each row feeds all masks that it can use, and some items are decoded with fewer masks
again. Imports no Ray or HTTP library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from mars_autoscale.model.capacity import Capacity
from mars_autoscale.model.frontier import Frontier, StepTable
from mars_platform.checkpoint.directory import Checkpoint
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
from mars_serve.measure.frontier.likelihood import log_likelihoods
from mars_serve.measure.frontier.points import contradiction, mean_cached_tokens, name_of, point_of
from mars_serve.measure.frontier.working_file import (
    KeptMeasurements,
    MeasuredSpeed,
    WorkingFile,
    items_sum,
)

NUM_NARROW_ITEMS = 64
"""Most items that are decoded with fewer masks than the model knows, for their speed alone."""
_OnCount = Callable[..., None]
"""Function called with the number of finished units and, maybe, their quality so far in words."""
_CACHED_TOKENS = 512
"""Most cached tokens of a row in the timed steps."""
_STEPS, _SCORES = "step times", "log-likelihoods"


@dataclass(frozen=True)
class FrontierOptions:
    """Options of the measurement of a frontier."""

    thresholds: tuple[float, ...]
    """Values of τ in (0, 1), each once."""
    max_tokens: int
    """Limit of an item's output tokens; the context may leave fewer."""
    batch: int
    """Number of items that decode at once, and ``max_num_seqs`` of the replica whose capacity is
    computed."""
    repeats: int
    """Number of runs of each step; see `measure_steps`."""
    dtype: torch.dtype
    dtype_name: str
    device: str
    hardware: str
    block_size: int

    @property
    def settings(self) -> list[DecodingSetting]:
        """Settings to measure: plain AR decoding, mode threshold with falling τ, and mode exact."""
        falling = sorted(self.thresholds, reverse=True)
        thresholds = [DecodingSetting(Mode.THRESHOLD, value) for value in falling]
        return [ONE_TOKEN, *thresholds, DecodingSetting(Mode.EXACT, 1.0)]

    def narrower(self, setting: DecodingSetting) -> list[DecodingSetting]:
        """Return a setting with fewer masks than the model knows, the fewest first."""
        if setting.mode is Mode.AR:
            return []
        numbers = sorted({1, self.block_size // 2} - {0, self.block_size})
        return [replace(setting, window=number) for number in numbers]

    @property
    def runs(self) -> list[DecodingSetting]:
        """All settings in which items are decoded, those with fewer masks after their full one."""
        return [each for one in self.settings for each in (one, *self.narrower(one))]


@dataclass(frozen=True)
class MeasuredFrontier:
    """A frontier with the load that its capacity is computed for."""

    frontier: Frontier
    max_num_seqs: int
    cached_tokens: float
    """Mean number of cached tokens that a row reads while it decodes these items in mode ar."""

    @cached_property
    def capacity(self) -> Capacity:
        """Capacity of a replica that has these items as its load."""
        return self.frontier.capacity(self.max_num_seqs, self.cached_tokens)


def phases_left(
    options: FrontierOptions, kept: KeptMeasurements, num_items: int
) -> dict[str, float]:
    """Return the expected work of each phase that is left, in order.

    The unit is the work of an item in mode ar; the other phases are relative to it as they were for
    a tiny model on a CPU.
    """
    phases = dict[str, float]()
    if kept.speed is None:
        phases[_STEPS] = float(options.batch * options.repeats)
    for setting in options.runs:
        if name_of(setting) not in kept.outcomes:
            num_decoded = _num_decoded(setting, num_items)
            phases[name_of(setting)] = num_decoded * (0.5 if setting.mode is Mode.THRESHOLD else 1)
    if phases.keys() - {_STEPS} or _unscored(options, kept):
        phases[_SCORES] = float(num_items)
    return phases


def _num_decoded(setting: DecodingSetting, num_items: int) -> int:
    return num_items if setting.window is None else min(num_items, NUM_NARROW_ITEMS)


def measure_frontier(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    options: FrontierOptions,
    working: WorkingFile,
    on_progress: OnProgress,
) -> MeasuredFrontier:
    """Measure what the working file lacks, keep each part there as soon as it is measured, and
    build the frontier of at least two items.

    ``on_progress`` is told of the progress of each of `phases_left`.

    Raises:
        UserError: the weights cannot be loaded, the working file cannot be written, or the figures
            contradict each other.
    """
    assert checkpoint.metadata is not None
    if phases_left(options, working.kept, len(items)):
        _measure(_engine(checkpoint, items, options), items, options, working, on_progress)
    kept = working.kept
    assert kept.speed is not None
    points = [
        point_of(kept, setting, options.narrower(setting), options.block_size)
        for setting in options.settings
    ]
    num_checkable = sum(item.answer is not None for item in items)
    content = {
        "weights": checkpoint.fingerprint,
        "hardware": options.hardware,
        "dtype": options.dtype_name,
        "measure": "accuracy" if num_checkable else "likelihood",
        "num_items": num_checkable or len(items),
        "items": items_sum(items),
        "window": options.block_size,
        **kept.speed.model_dump(),
        "points": points,
    }
    try:
        frontier = build_settings(content, Frontier, source="frontier")
    except UserError as error:
        raise contradiction(str(error), points, working.path) from error
    ar = kept.outcomes[name_of(ONE_TOKEN)]
    return MeasuredFrontier(frontier, options.batch, mean_cached_tokens(items, ar))


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
            options.batch * (_CACHED_TOKENS + widest), EngineSettings().max_num_batched_tokens
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
    # Steps come first: on a GPU timing captures them as graphs, which speed up the decoding.
    if working.kept.speed is None:
        working.keep(speed=_measure_speed(engine, options, on_progress))
    for setting in options.runs:
        name = name_of(setting)
        if name in working.kept.outcomes:
            continue
        decoded = run_setting(
            engine,
            items[: (number := _num_decoded(setting, len(items)))],
            setting,
            max_tokens=options.max_tokens,
            on_progress=_counting(on_progress, name, number),
        )
        working.keep(outcomes={**working.kept.outcomes, name: tuple(decoded)})
    unscored = _unscored(options, working.kept)
    if unscored:
        scores = _score_outputs(engine, items, unscored, on_progress)
        working.keep(log_likelihoods={**working.kept.log_likelihoods, **scores})


def _measure_speed(
    engine: Engine, options: FrontierOptions, on_progress: OnProgress
) -> MeasuredSpeed:
    times = engine.measure_step_times(
        widest_row=widest_row(engine.window, exact=True),
        repeats=options.repeats,
        on_progress=partial(on_progress, _STEPS),
    )
    table = StepTable(positions=times.positions, stored=times.cached_tokens, seconds=times.seconds)
    # A server feeds its prompts in chunks of this size unless its settings say otherwise.
    rate = engine.measure_prefill(EngineSettings().max_num_batched_tokens, options.repeats)
    return MeasuredSpeed(step_seconds=table, prefill_tokens_per_s=rate)


def _unscored(
    options: FrontierOptions, kept: KeptMeasurements
) -> dict[str, tuple[DecodedItem, ...]]:
    wanted = {name_of(setting) for setting in options.settings} - kept.log_likelihoods.keys()
    return {name: decoded for name, decoded in kept.outcomes.items() if name in wanted}


def _score_outputs(
    engine: Engine,
    items: Sequence[EvalItem],
    unscored: Mapping[str, Sequence[DecodedItem]],
    on_progress: OnProgress,
) -> dict[str, tuple[float, ...]]:
    """Return log-likelihoods by setting; an output that several settings gave is scored once."""
    texts = {
        name: [(item.prompt, each.tokens) for item, each in zip(items, decoded, strict=True)]
        for name, decoded in unscored.items()
    }
    distinct = list(dict.fromkeys(each for line in texts.values() for each in line))
    found = log_likelihoods(engine, distinct, _counting(on_progress, _SCORES, len(distinct)))
    score_of = dict(zip(distinct, found, strict=True))
    return {name: tuple(score_of[each] for each in line) for name, line in texts.items()}


def _counting(on_progress: OnProgress, title: str, total: int) -> _OnCount:
    def count(done: int, quality: str = "") -> None:
        on_progress(title, done, total, quality)

    return count
