"""The speed of a replica: step times, and the tokens per second that follow from them.

A step's time depends on its positions. A row has one position in mode ar; in mode threshold it has
its accepted tokens and its masks, and in mode exact a group of masks for each outcome of the check.
Several tokens per step are faster only while these positions cost little beside the step's fixed
part. So which way of decoding is the fastest depends on the batch: the *base* is the fastest that
loses no quality, and a way that loses some is of use only where it is faster than the base. Imports
no Ray or torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mars_autoscale.model.step_times import StepTime
from mars_platform.method.mode import Mode

_MAX_BATCH = 1024
"""Highest number of rows at which a break-even batch is searched for."""


@dataclass(frozen=True)
class Window:
    """What a row gets from a step, and what it costs, with a certain number of masks."""

    tokens_per_forward: float
    """Mean number of tokens that a pass gives a row."""
    positions: float
    """Mean positions of a row per step: uncached tokens, drafts and masks."""


ONE_TOKEN = Window(1.0, 1.0)
"""A row without masks."""


@dataclass(frozen=True)
class Rung:
    """A way to decode: a mode, its τ, and the windows that it may use."""

    mode: Mode
    threshold: float
    """τ in (0, 1); 1 in modes ar and exact, which have none."""
    windows: tuple[Window, ...]
    """At least one; a step uses the one that is fastest for its number of rows."""
    loss: float = 0.0
    """Points of quality below plain AR decoding, on a scale to 100, at the pessimistic end of what
    was measured; 0 in modes ar and exact."""


AR = Rung(Mode.AR, 1.0, (ONE_TOKEN,))
"""Plain AR decoding."""


@dataclass(frozen=True)
class Capacity:
    """A replica's speed on each rung of a ladder."""

    step_time: StepTime
    rungs: tuple[Rung, ...]
    """Mode ar, mode exact if it was measured, and mode threshold with falling τ and rising loss."""
    max_num_seqs: int
    """Highest number of rows in a step."""
    prefill_tokens_per_s: float
    """Prompt tokens that a replica computes each second."""
    target_threshold: float = 1.0
    """Highest τ that is used, among those of the rungs; what it loses is taken as granted."""

    def __post_init__(self) -> None:
        thresholds = [rung.threshold for rung in self.rungs]
        assert self.rungs[0].mode is Mode.AR, "plain AR decoding is always possible"
        assert thresholds == sorted(thresholds, reverse=True), "τ falls along the rungs"
        assert self.target_threshold in thresholds, "the target τ was measured"

    @property
    def target(self) -> Rung:
        """The rung of the target τ; what is lost beyond it counts as loss."""
        return next(rung for rung in self.rungs if rung.threshold == self.target_threshold)

    def rung(self, mode: Mode, threshold: float) -> Rung:
        """Return the rung of a mode and τ; at τ = 1 mode threshold is mode ar."""
        if threshold == 1.0 and mode is Mode.THRESHOLD:
            mode = Mode.AR
        for rung in self.rungs:
            if (rung.mode, rung.threshold) == (mode, threshold):
                return rung
        raise KeyError((mode, threshold))

    def window(self, rung: Rung, batch: float | None = None) -> Window:
        """Return the window with which a rung is fastest in steps of ``batch`` rows; None for a
        full one.
        """
        rows = self.max_num_seqs if batch is None else batch
        return max(rung.windows, key=lambda window: self._speed(window, rows))

    def tokens_per_s(self, rung: Rung, batch: float | None = None) -> float:
        """Return the tokens that a replica decodes each second if it computes no prompts; see
        `window`.
        """
        rows = self.max_num_seqs if batch is None else batch
        return max(self._speed(window, rows) for window in rung.windows)

    def _speed(self, window: Window, rows: float) -> float:
        return rows * window.tokens_per_forward / self.step_time.at(rows * window.positions)

    def mixed_tokens_per_s(
        self, parts: Sequence[tuple[float, Rung]], batch: float | None = None
    ) -> float:
        """Return the tokens each second of a batch whose rows decode in several ways.

        Args:
            parts: (share of the output tokens, rung); the shares are positive and sum to 1. Slower
                rows stay longer, and have a larger share of the rows of a step.
            batch: rows of each step; None for a full batch.
        """
        total = self.max_num_seqs if batch is None else batch
        windows = [self.window(rung, batch) for _, rung in parts]
        rows = [
            share / each.tokens_per_forward for (share, _), each in zip(parts, windows, strict=True)
        ]
        positions = math.fsum(row * each.positions for row, each in zip(rows, windows, strict=True))
        sum_rows = math.fsum(rows)
        return self._speed(Window(1 / sum_rows, positions / sum_rows), total)

    def base(self, batch: float | None = None) -> Rung:
        """Return the fastest rung that loses no more quality than the target τ.

        With a target of 1 it is the fastest lossless one: mode exact while arithmetic is idle, and
        plain AR decoding past that. All gains count from it.
        """
        allowed = [rung for rung in self.rungs if rung.threshold >= self.target_threshold]
        return max(allowed, key=lambda rung: self.tokens_per_s(rung, batch))

    def gain(self, rung: Rung, batch: float | None = None) -> float:
        """Return a rung's gain over the base: the ratio of their speeds at the same batch."""
        return self.tokens_per_s(rung, batch) / self.tokens_per_s(self.base(batch), batch)

    def busy_s(self, output_tokens: float, prompt_tokens: float, gain: float = 1.0) -> float:
        """Return the seconds that a replica with a full batch takes for a number of tokens.

        ``gain`` is the decoding speed as a multiple of the base's; no τ makes prompts faster.
        """
        decode_s = output_tokens / (gain * self._full_tokens_per_s)
        return decode_s + prompt_tokens / self.prefill_tokens_per_s

    @cached_property
    def _full_tokens_per_s(self) -> float:
        return self.tokens_per_s(self.base())

    def ladder(self, min_gain: float, batch: float | None = None) -> tuple[Rung, ...]:
        """Return the rungs that are worth their loss at a number of rows; None for a full batch.

        These are the base, and of the rungs below the target τ those on the upper concave hull of
        speed over loss that are ``min_gain``, at least 1, times as fast as the base. Below it lies
        the dead zone, where masks cost more than they give.
        """
        base = self.base(batch)
        candidates = [base]
        for rung in self.rungs:
            gain = self.gain(rung, batch)
            is_lower = rung.threshold < self.target_threshold
            if is_lower and gain >= min_gain and gain > self.gain(candidates[-1], batch):
                candidates.append(rung)
        return tuple(_upper_hull(candidates, [self.gain(each, batch) for each in candidates]))

    def break_even_batch(self, rung: Rung) -> int:
        """Return the most rows at which a rung is faster than the others at or above the target τ.

        It is 0 if there is no such number, or no limit to it that is worth naming, as for plain AR
        decoding: the more rows, the better it compares.
        """
        others = [
            each for each in self.rungs if each.threshold >= self.target_threshold and each != rung
        ]
        if not others or rung.mode is Mode.AR:
            return 0
        for batch in range(_MAX_BATCH, 0, -1):
            if self.tokens_per_s(rung, batch) > max(self.tokens_per_s(o, batch) for o in others):
                return batch
        return 0


def _upper_hull(rungs: Sequence[Rung], speeds: Sequence[float]) -> list[Rung]:
    """Return the rungs on the upper concave hull of speed over loss.

    A mixture of two rungs on the hull has the speed of any other rung at a lower loss.
    """
    hull = list[int]()
    for i, rung in enumerate(rungs):
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            rise = (speeds[b] - speeds[a]) * (rung.loss - rungs[a].loss)
            if rise > (speeds[i] - speeds[a]) * (rungs[b].loss - rungs[a].loss):
                break
            hull.pop()
        hull.append(i)
    return [rungs[i] for i in hull]
