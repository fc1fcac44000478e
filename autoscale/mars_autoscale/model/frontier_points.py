"""The points of a frontier: the quality and the speed of one way to decode each.

Quality is compared item by item with plain AR decoding of the same items. What an interval leaves
open counts as lost: `FrontierPoint.pessimistic_loss` is the upper end.
"""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from mars_platform.config import Settings
from mars_platform.method.mode import Mode

_Percent = Annotated[float, Field(ge=0, le=100)]
_AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class Interval(Settings):
    """A measured value with its 95% interval."""

    model_config = ConfigDict(allow_inf_nan=False)
    value: float
    """Estimate."""
    low: float
    """Lower end; at most the value."""
    high: float
    """Upper end; at least the value."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"low and high must enclose value, {self.value:g}")
        return self


class WindowPoint(Settings):
    """Speed with a fixed number of masks."""

    num_masks: int = Field(ge=0)
    """Masks of a row per step; in mode exact, masks of each outcome."""
    tokens_per_forward: _AtLeastOne
    """Mean number of tokens that a pass gives a row."""
    positions_per_row: _AtLeastOne
    """Mean number of positions of a row in a step."""


class Divergence(Settings):
    """Outputs that differ from those of plain AR decoding."""

    num_outputs: int = Field(ge=1)
    """Outputs that were compared."""
    num_diverged: int = Field(ge=0)
    """Those that differ in any token."""
    num_tokens: int = Field(ge=0)
    """Tokens up to the first that differs, and all of the outputs that do not differ."""

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        if self.num_diverged > self.num_outputs:
            raise ValueError(f"num_diverged must be at most num_outputs, {self.num_outputs}")
        return self


class FrontierPoint(Settings):
    """Measured quality and speed of one way to decode."""

    mode: Mode
    """Decoding mode."""
    threshold: float = Field(gt=0, le=1)
    """τ, below 1 in mode threshold; 1 in the other modes, which have none."""
    quality: _Percent
    """Quality by the frontier's measure, in points."""
    quality_low: _Percent
    """Lower end of the quality's 95% interval."""
    quality_high: _Percent
    """Upper end of the quality's 95% interval."""
    right: str | None = Field(default=None, pattern="^[01]*$")
    """Whether each item with an answer was right (1) or wrong (0), in order; None if no item has
    one."""
    loss: Interval | None = Field(default=None, validate_default=True)
    """Points of quality below plain AR decoding, paired by item; None for plain AR decoding."""
    divergence: Divergence | None = None
    """How its outputs differ from those of plain AR decoding; None if that was not measured."""
    log_likelihood: Interval | None = None
    """Mean log-likelihood of an output token under the plain AR model, in nats; None if it was not
    measured."""
    windows: tuple[WindowPoint, ...] = Field(min_length=1)
    """Speeds with several numbers of masks, rising; the quality is that of the last."""

    @field_validator("threshold")
    @classmethod
    def _check_threshold(cls, threshold: float, info: ValidationInfo) -> float:
        mode = info.data.get("mode")
        if mode == Mode.THRESHOLD and threshold == 1.0:
            raise ValueError("must be below 1 in mode threshold; at 1 that is mode ar")
        if mode in (Mode.AR, Mode.EXACT) and threshold != 1.0:
            raise ValueError(f"must be 1 in mode {mode}")
        return threshold

    @field_validator("quality_low", "quality_high")
    @classmethod
    def _check_interval(cls, end: float, info: ValidationInfo) -> float:
        quality = info.data.get("quality", end)
        if end > quality if info.field_name == "quality_low" else end < quality:
            raise ValueError(f"the interval must hold quality, {quality:g}")
        return end

    @field_validator("loss")
    @classmethod
    def _check_loss(cls, loss: Interval | None, info: ValidationInfo) -> Interval | None:
        if (loss is None) != (info.data.get("mode") == Mode.AR):
            raise ValueError("is what is lost against mode ar, which alone has none")
        return loss

    @field_validator("windows")
    @classmethod
    def _check_windows(cls, windows: tuple[WindowPoint, ...]) -> tuple[WindowPoint, ...]:
        numbers = [window.num_masks for window in windows]
        if numbers != sorted(set(numbers)):
            raise ValueError("num_masks must rise")
        return windows

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of a pass with all masks."""
        return self.windows[-1].tokens_per_forward

    @property
    def pessimistic_loss(self) -> float:
        """Upper end of the loss, at least 0; 0 in the modes that lose nothing by construction."""
        if self.loss is None or self.mode is not Mode.THRESHOLD:
            return 0.0
        return max(self.loss.high, 0.0)
