"""The frontier of a checkpoint: the cost in quality and the gain in speed of each threshold.

It is kept in the file ``frontier.json`` beside the checkpoint's weights. ``marsray calibrate``
measures and writes it; the autoscaler and the simulator read it. A file that is damaged,
contradicts itself or belongs to other weights is refused as a whole, because plain AR decoding
is safe and a wrong figure is not.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from mars_autoscale.model.capacity import AR, Capacity, Rung, Window
from mars_autoscale.model.expectations import Expectation
from mars_autoscale.model.frontier_points import FrontierPoint
from mars_autoscale.model.step_times import StepTimes
from mars_platform.checkpoint.files import write_whole
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.config import Settings, build_settings, read_json
from mars_platform.errors import UserError
from mars_platform.method.mode import Mode
from mars_platform.statistics import proportion

FRONTIER_FILE = "frontier.json"
FORMAT_VERSION = 2
MAX_SPEED_DIP = 0.02
"""Share by which a lower threshold may give fewer tokens per pass, as the noise of measuring."""

_REMEDY = "run marsray calibrate again"

_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class StepTable(Settings):
    """Measured seconds of a step, over its positions and the cached tokens that it reads."""

    positions: tuple[_Finite, ...] = Field(min_length=2)
    """Numbers of positions of the whole step, rising."""
    stored: tuple[_Finite, ...] = Field(min_length=2)
    """Numbers of cached tokens that all rows together read, rising."""
    seconds: tuple[tuple[_Positive, ...], ...]
    """Seconds of a step, [positions, stored]."""

    @field_validator("positions", "stored")
    @classmethod
    def _check_rising(cls, grid: tuple[float, ...]) -> tuple[float, ...]:
        if any(low >= high for low, high in pairwise(grid)):
            raise ValueError("each value must be above the one before")
        return grid

    @field_validator("seconds")
    @classmethod
    def _check_shape(
        cls, seconds: tuple[tuple[float, ...], ...], info: ValidationInfo
    ) -> tuple[tuple[float, ...], ...]:
        if not {"positions", "stored"} <= info.data.keys():
            return seconds  # the grids' errors are reported
        rows, columns = len(info.data["positions"]), len(info.data["stored"])
        if [len(row) for row in seconds] != [columns] * rows:
            raise ValueError(f"must be {rows} rows, one a position, of {columns} times each")
        return seconds

    def times(self) -> StepTimes:
        """Return the times, which can be asked for any step."""
        return StepTimes(self.positions, self.stored, self.seconds)


class Frontier(Settings):
    """Content of ``frontier.json`` except its checksum, free of contradictions.

    As τ falls, tokens per pass must not fall by more than `MAX_SPEED_DIP`, and quality must not
    rise by more than the intervals allow. Build one with `mars_platform.config.build_settings`,
    which reports a contradiction as a `UserError`.
    """

    format_version: Literal[2] = 2
    """Version of the file's layout."""
    weights: str
    """`weights_fingerprint` of the measured model."""
    hardware: str
    """Device that the model was measured on, in words."""
    dtype: str
    """Number type of the weights."""
    measure: Literal["accuracy", "likelihood"]
    """Measure of quality in points of 100: the percentage of right answers, or, without answers,
    100 times the likelihood of an output token under plain AR decoding (geometric mean) over that
    of plain AR decoding's own outputs."""
    num_items: int = Field(ge=1)
    """Number of items that quality was measured on."""
    items: str | None = None
    """SHA-256 sum of the items, hexadecimal; two models can be compared only on the same items."""
    window: int = Field(ge=1)
    """Most masks of a row per step, which is the model's block size."""
    step_seconds: StepTable
    """Times of decoding steps."""
    prefill_tokens_per_s: _Positive
    """Prompt tokens that a replica computes each second if it decodes nothing."""
    points: tuple[FrontierPoint, ...]
    """Points in any order: one of mode ar, at most one of mode exact, one for each threshold."""

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        seen = dict[tuple[Mode, float], int]()
        for i, point in enumerate(self.points):
            first = seen.setdefault((point.mode, point.threshold), i)
            if first != i:
                raise ValueError(f"points.{i}: has mode and threshold of points.{first}")
            if (point.right is not None) != (self.measure == "accuracy"):
                raise ValueError(f"points.{i}.right: belongs to measure accuracy, and only to that")
            if point.right is not None and len(point.right) != self.num_items:
                raise ValueError(f"points.{i}.right: must have a digit for each of num_items")
        if (Mode.AR, 1.0) not in seen:
            raise ValueError("points: there must be one of mode ar to compare others with")
        self._check_monotone()
        return self

    def _check_monotone(self) -> None:
        fastest = worst = self._ladder[0]
        for point in self._ladder[1:]:
            where = f"points.{self.points.index(point)}"
            if point.tokens_per_forward < fastest.tokens_per_forward * (1 - MAX_SPEED_DIP):
                raise ValueError(
                    f"{where}.windows: tokens_per_forward must not be more than "
                    f"{MAX_SPEED_DIP:.0%} below {fastest.tokens_per_forward:g}, that of τ "
                    f"{fastest.threshold:g}"
                )
            if point.quality_low > worst.quality_high:
                raise ValueError(
                    f"{where}.quality_low: must not be above {worst.quality_high:g}, the "
                    f"quality_high of τ {worst.threshold:g}"
                )
            fastest = max(fastest, point, key=lambda one: one.tokens_per_forward)
            worst = min(worst, point, key=lambda one: one.quality_high)

    @property
    def _ladder(self) -> list[FrontierPoint]:
        """Points of plain AR decoding and then of mode threshold, with falling τ."""
        points = [point for point in self.points if point.mode is not Mode.EXACT]
        return sorted(points, key=lambda point: -point.threshold)

    @property
    def checksum(self) -> str:
        """SHA-256 sum of the content as JSON with sorted keys and no spaces, hexadecimal."""
        content = self.model_dump(exclude_none=True)
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def rungs(self) -> tuple[Rung, ...]:
        """Return the rungs of mode ar, of mode exact if measured, and of mode threshold.

        τ falls along the rungs of mode threshold. Their losses, which are the upper ends of what
        was measured, and their tokens per pass never fall: measured figures that fall, within the
        noise allowed, are replaced by the closest rising ones (isotonic regression). No rung gives
        fewer tokens per pass than plain AR decoding.
        """
        _, *below = self._ladder
        losses = _rising([point.pessimistic_loss for point in below])
        speeds = [point.tokens_per_forward for point in below]
        exact = [point for point in self.points if point.mode is Mode.EXACT]
        return (
            AR,
            *(Rung(Mode.EXACT, 1.0, _windows(point)) for point in exact),
            *(
                Rung(Mode.THRESHOLD, point.threshold, _windows(point, risen / speed), loss)
                for point, speed, risen, loss in zip(
                    below, speeds, _rising(speeds), losses, strict=True
                )
            ),
        )

    def expectations(self) -> tuple[Expectation, ...]:
        """Return what is expected of outputs with each τ below 1, with falling τ.

        A τ is left out whose divergence from plain AR decoding was not measured. Rates never fall
        as τ does: where measured ones do, the higher one of a higher τ counts.
        """
        found, highest = list[Expectation](), 0.0
        for point in self._ladder[1:]:
            measured = point.divergence
            if measured is not None and measured.num_tokens:
                rate = proportion(measured.num_diverged, measured.num_tokens).high
                highest = max(highest, rate)
                found.append(Expectation(point.threshold, highest))
        return tuple(found)

    def capacity(
        self, max_num_seqs: int, mean_cached_tokens: float = 512, target_threshold: float = 1.0
    ) -> Capacity:
        """Return the speed of a replica on the measured hardware.

        Args:
            max_num_seqs: highest number of rows in a step, at least 1.
            mean_cached_tokens: mean number of cached tokens that a row reads, at least 0; step
                times are those of a full batch of such rows.
            target_threshold: highest τ that is used.

        Raises:
            UserError: the target was not measured.
        """
        assert max_num_seqs >= 1, "a replica has at least one row"
        rungs = self.rungs()
        known = sorted({rung.threshold for rung in rungs}, reverse=True)
        if target_threshold not in known:
            raise UserError(
                f"target_threshold: {target_threshold:g} is not among the measured ones "
                f"({', '.join(f'{threshold:g}' for threshold in known)}); choose one of them"
            )
        step_time = self.step_seconds.times().at_cached(max_num_seqs * mean_cached_tokens)
        return Capacity(step_time, rungs, max_num_seqs, self.prefill_tokens_per_s, target_threshold)


def read_frontier(path: Path) -> Frontier:
    """Read ``frontier.json`` from a directory with the weights that it describes.

    Raises:
        UserError: the file is missing, damaged, of another version or of another model, or its
            figures contradict each other. The message names file, field and remedy.
    """
    file = path / FRONTIER_FILE
    content = read_json(file, _REMEDY)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file}: format_version: it is {version}, but only {FORMAT_VERSION} is read, in which "
            f"losses are paired and have intervals; {_REMEDY}"
        )
    checksum = content.pop("checksum", None)
    frontier = build_settings(content, Frontier, source=str(file), remedy=_REMEDY)
    if checksum != frontier.checksum:
        raise UserError(f"{file}: checksum: it is not that of the other fields; {_REMEDY}")
    if frontier.weights != weights_fingerprint(path):
        raise UserError(f"{file}: weights: it was measured on another model's; {_REMEDY}")
    return frontier


def write_frontier(path: Path, frontier: Frontier) -> Path:
    """Write ``frontier.json`` into a directory, whole or not at all, and replace an existing one.

    Returns:
        The path of the file.
    """
    content = frontier.model_dump(exclude_none=True) | {"checksum": frontier.checksum}
    return write_whole(path, FRONTIER_FILE, json.dumps(content, indent=2) + "\n")


def _rising(values: Sequence[float]) -> list[float]:
    """Return the closest sequence, by least squares, that never falls."""
    pools = list[list[float]]()
    for value in values:
        pools.append([value])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1].extend(last)
    return [fmean(pool) for pool in pools for _ in pool]


def _windows(point: FrontierPoint, factor: float = 1.0) -> tuple[Window, ...]:
    return tuple(
        Window(max(each.tokens_per_forward * factor, 1.0), each.positions_per_row)
        for each in point.windows
    )
