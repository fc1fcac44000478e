"""Defines the options of ``marsray bench decode`` and checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mars_platform.checkpoint.metadata import locate_model
from mars_platform.checkpoint.number_type import NumberType, stored_dtype
from mars_platform.errors import UserError
from mars_serve.bench.decode.workload import RaggedShape
from mars_serve.measure.evaluation.decoding import available_device, check_threshold

CONTENDERS = ("ar", "threshold", "exact", "hf-generate")
NEED_MASKS = ("threshold", "exact")
"""Contenders that a plain AR checkpoint cannot serve."""


@dataclass(frozen=True)
class DecodeOptions:
    """Options of ``marsray bench decode``."""

    model: str | None = None
    """Checkpoint directory or hub id; None if ``untrained`` is given."""
    adapter: Path | None = None
    """Directory of an adapter of the model; None for none."""
    untrained: str | None = None
    """Preset or ``config.json`` to make random weights from."""
    prompts: Path | None = None
    """File of conversations to decode; None generates requests."""
    contenders: Sequence[str] = CONTENDERS
    """Names of the contenders to measure."""
    batches: Sequence[int] = (1, 4, 8, 16, 32)
    """Batch sizes to measure."""
    rounds: int = 5
    """Number of times that each contender is timed."""
    num_requests: int = 48
    """Requests of a run, or two batches if that is more."""
    shape: RaggedShape = field(default_factory=RaggedShape)
    """Lengths of generated requests."""
    max_tokens: int = 256
    """Limit of the output tokens of a conversation."""
    threshold: float = 0.95
    """τ in (0, 1]."""
    acceptance: str | None = None
    """File or name of a distribution of accepted runs; None takes the model's own runs, or the
    paper's distribution if the weights are untrained or ``agreement`` is given."""
    agreement: float | None = None
    """Probability, in [0, 1], that a draft of mode exact is drawn as right; None draws from
    ``acceptance`` there, too."""
    seed: int = 0
    """Seed of prompts, lengths, draws and weights."""
    device: str = "cpu"
    """Device to run on, ``cpu`` or ``cuda``."""
    dtype: NumberType = "float32"
    """Type of the weights, ``float32``, ``bfloat16`` or ``float16``."""

    def check(self) -> None:
        """Refuse options that are out of range or contradict each other.

        Raises:
            UserError: an option is bad; names it.
        """
        for name in self.contenders:
            if name not in CONTENDERS:
                known = ", ".join(CONTENDERS)
                raise UserError(f"--contender: there is no {name!r}; choose from {known}")
        for batch in self.batches:
            if batch < 1:
                raise UserError(f"--batch: {batch} is no batch size; give 1 or more")
        check_threshold(self.threshold)
        if self.agreement is not None:
            if not 0.0 <= self.agreement <= 1.0:
                raise UserError(
                    f"--agreement: {self.agreement} is no probability; give one in [0, 1]"
                )
            if "exact" not in self.contenders:
                raise UserError(
                    "--agreement: only contender exact checks drafts; add --contender exact"
                )
        self._check_source()

    def _check_source(self) -> None:
        if (self.model is None) == (self.untrained is None):
            raise UserError("MODEL: name a checkpoint, or give --untrained, one of the two")
        if self.adapter is not None and self.model is None:
            raise UserError("--adapter: untrained weights have none; name a checkpoint")
        available_device(self.device)  # refuses a device that is missing
        if self.prompts is not None and self.untrained is not None:
            raise UserError(
                "--prompts: untrained weights have no tokenizer; leave it out or name a checkpoint"
            )


def default_dtype(model: str | None, device: str) -> NumberType:
    """Return the number type that a model is stored in; for untrained weights, the device's.

    Raises:
        UserError: the model's type is not known.
    """
    if model is not None:
        return stored_dtype(locate_model(model))
    return "bfloat16" if device == "cuda" else "float32"
