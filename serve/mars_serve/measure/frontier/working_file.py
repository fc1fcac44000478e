"""Keeps what an unfinished ``marsray calibrate`` has measured in a hidden file beside the weights.

A run that is started again continues from that file if model, data, machine and options are the
same.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from mars_autoscale.model.frontier import StepTable
from mars_platform.checkpoint.files import write_whole
from mars_platform.config import Settings, build_settings
from mars_platform.errors import UserError
from mars_serve.measure.calibration.collect import MeasuredCalibration
from mars_serve.measure.evaluation.decoding import DecodedItem
from mars_serve.measure.evaluation.items import EvalItem

WORKING_FILE = ".calibrate.json"


class MeasuredSpeed(Settings):
    """The speed of steps on this machine."""

    step_seconds: StepTable
    """Times of decoding steps."""
    prefill_tokens_per_s: float
    """Prompt tokens for each second in steps that hold nothing else."""


class KeptMeasurements(Settings):
    """The content of the working file."""

    key: str
    """Key of the run that measured it, see `run_key`."""
    calibration: MeasuredCalibration | None = None
    """Calibration with its reliability diagrams."""
    speed: MeasuredSpeed | None = None
    """Step times and prefill rate."""
    outcomes: dict[str, tuple[DecodedItem, ...]] = Field(default_factory=dict)
    """All decoded items, by name of the setting."""
    log_likelihoods: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Log-likelihood of each item's output in nats, by name of the setting."""

    @property
    def parts(self) -> list[str]:
        """Names of the parts that were measured, without the log-likelihoods."""
        named = {"calibration": self.calibration, "step times": self.speed}
        return [*(name for name, part in named.items() if part is not None), *self.outcomes]


class WorkingFile:
    """The working file of one run."""

    def __init__(self, directory: Path, key: str) -> None:
        """Read what an earlier run with the same `run_key` kept; ignore any other content."""
        self.path = directory / WORKING_FILE
        self.kept = _read(self.path, key) or KeptMeasurements(key=key)

    def keep(self, **parts: Any) -> None:
        """Add fields of `KeptMeasurements` to the file."""
        self.kept = self.kept.model_copy(update=parts)
        write_whole(self.path.parent, self.path.name, self.kept.model_dump_json())

    def remove(self) -> None:
        """Delete the file, because the run is complete."""
        self.path.unlink(missing_ok=True)


def run_key(weights: str, items: Sequence[EvalItem], options: Mapping[str, Any]) -> str:
    """Return the SHA-256 sum, in hexadecimal, of everything that the figures depend on.

    These are the weights' fingerprint, the items in order, and the options and the machine as JSON.
    """
    parts = [weights, dict(options), items_sum(items)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def items_sum(items: Sequence[EvalItem]) -> str:
    """Return the SHA-256 sum, in hexadecimal, of the items' token ids and answers."""
    content = [[item.prompt, item.answer] for item in items]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(path: Path, key: str) -> KeptMeasurements | None:
    """Read a working file; None if it cannot be used, since all of it can be measured again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kept = build_settings(content, KeptMeasurements, source=str(path))
    except (OSError, ValueError, RecursionError, UserError):
        return None
    return kept if kept.key == key else None
