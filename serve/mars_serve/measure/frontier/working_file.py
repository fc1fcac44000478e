"""What an unfinished ``marsray calibrate`` has measured, in a hidden file beside the weights.

A run that is started again takes up what it finds there, if model, data, machine and options are
the same. Knows no model and no engine.
"""

from __future__ import annotations

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
from mars_serve.measure.calibration.collect import Measured
from mars_serve.measure.evaluation.decoding import DecodedItem
from mars_serve.measure.evaluation.items import EvalItem

WORKING_FILE = ".calibrate.json"


class Speed(Settings):
    """What steps take on this machine."""

    step_seconds: StepTable
    """Times of decoding steps."""
    prefill_tokens_per_s: float
    """Prompt tokens a second of steps that hold nothing else."""


class Found(Settings):
    """Content of the working file."""

    key: str
    """Of the run that measured it, see `run_key`."""
    calibration: Measured | None = None
    """Temperatures, with what is drawn of them."""
    speed: Speed | None = None
    """Step times and prefill rate."""
    outcomes: dict[str, tuple[DecodedItem, ...]] = Field(default_factory=dict)
    """By setting's name, of all items."""
    log_likelihoods: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """By setting's name, of all items' outputs, in nats."""

    @property
    def parts(self) -> list[str]:
        """What there is, in words; scores of outputs go unnamed."""
        named = {"calibration": self.calibration, "step times": self.speed}
        return [*(name for name, part in named.items() if part is not None), *self.outcomes]


class WorkingFile:
    """The working file of one run."""

    def __init__(self, directory: Path, key: str) -> None:
        """Take up what an earlier run with the same key has left; all else counts for nothing.

        Args:
            directory: the checkpoint's.
            key: see `run_key`.
        """
        self.path = directory / WORKING_FILE
        self.found = _read(self.path, key) or Found(key=key)

    def keep(self, **parts: Any) -> None:
        """Add parts of `Found` to the file.

        Raises:
            UserError: it cannot be written.
        """
        self.found = self.found.model_copy(update=parts)
        write_whole(self.path.parent, self.path.name, self.found.model_dump_json())

    def remove(self) -> None:
        """Delete the file: the run is complete."""
        self.path.unlink(missing_ok=True)


def run_key(weights: str, items: Sequence[EvalItem], options: Mapping[str, Any]) -> str:
    """SHA-256 sum, hexadecimal, of all that the figures depend on.

    Args:
        weights: the model's fingerprint.
        items: all of them, in order.
        options: of the run, the machine among them; JSON values.
    """
    parts = [weights, dict(options), items_sum(items)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def items_sum(items: Sequence[EvalItem]) -> str:
    """SHA-256 sum, hexadecimal, of conversations as a tokenizer sees them."""
    content = [[item.prompt, item.answer] for item in items]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(path: Path, key: str) -> Found | None:
    """What a file holds; None where it cannot be used, since all of it can be measured again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = build_settings(content, Found, source=str(path))
    except (OSError, ValueError, RecursionError, UserError):
        return None
    return found if found.key == key else None
