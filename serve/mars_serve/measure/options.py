"""Defines the options of the commands ``eval``, ``calibrate`` and ``promote``.

Imports no Ray, torch or HTTP library.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import Field

from mars_platform.checkpoint.number_type import NumberType
from mars_platform.cli.options import complete_directories
from mars_platform.config import Settings
from mars_platform.method.mode import Mode
from mars_serve.engine.decoding_options import Outcomes, Sampling

DEFAULT_THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
MAX_SEED = 2**63 - 1
_QUICK_THRESHOLDS = (0.95, 0.9, 0.8, 0.7)
_QUICK_ITEMS = 100
_REPEATS, _QUICK_REPEATS = 18, 6

Model = Annotated[
    str,
    typer.Argument(help="Checkpoint directory or hub id.", autocompletion=complete_directories),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        help="Directory of an adapter of the checkpoint, by marsray train; it acts at masks only.",
        autocompletion=complete_directories,
    ),
]
Dtype = Annotated[
    NumberType | None,
    typer.Option(help="Type of the weights; by default the one that the model is stored in."),
]
Temperature = Annotated[
    float,
    Field(ge=0, le=2),  # as in REST requests
    typer.Option(help="Sampling temperature in [0, 2]; 0 is greedy."),
]
TopP = Annotated[
    float,
    Field(gt=0, le=1),
    typer.Option(help="Probability of the likeliest tokens to sample from, in (0, 1]."),
]


class _MeasureOptions(Settings):
    """Options of ``marsray eval`` and ``marsray calibrate``."""

    model: Model
    data: tuple[Path, ...]
    """Files of conversations. May be repeated."""
    adapter: Adapter = None
    max_items: int | None = Field(default=None, ge=1)
    """Largest number of conversations; the first ones are used."""
    max_tokens: int = Field(default=256, ge=1)
    """Largest number of output tokens, if the context has room."""
    batch: int = Field(default=32, ge=1)
    """Conversations that run at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; auto is cuda if available."""
    dtype: Dtype = None


class EvalOptions(_MeasureOptions):
    """Options of ``marsray eval``."""

    thresholds: Annotated[tuple[float, ...], typer.Option("--threshold")] = ()
    """Confidence threshold in (0, 1]. May be repeated; by default 1, .95, .9, .8, .7, .6 and .5."""
    modes: Annotated[tuple[Mode, ...], typer.Option("--mode")] = ()
    """Decoding mode. May be repeated; mode ar is always measured."""
    outcomes: tuple[Outcomes, ...] = ()
    """In mode exact, the outcomes that get masks. May be repeated; by default all."""
    calibrated: bool = False
    """Compare calibrated confidence with thresholds."""
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    """Sampling seed of the first conversation."""

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of all settings."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, seed=self.seed)


class CalibrateOptions(_MeasureOptions):
    """Options of ``marsray calibrate``."""

    model: Model
    """Checkpoint directory or hub id, with mars.json or an adapter."""
    thresholds: Annotated[tuple[float, ...], typer.Option("--threshold")] = ()
    """Confidence threshold in (0, 1] to measure. May be repeated; by default .95, .9, .8, .7, .6
    and .5."""
    batch: int = Field(default=32, ge=1)
    """Conversations that run at once; set it to a replica's batch."""
    max_cursors: int = Field(default=4000, ge=2)
    """Largest number of positions at which proposals are scored."""
    quick: Annotated[bool, typer.Option("--quick")] = False
    """Measure less precisely: 100 conversations, thresholds down to .7."""
    examples: bool = True
    """Write the first prompts into the checkpoint, for the playground of whoever may use the
    model."""

    @property
    def num_rows(self) -> int | None:
        """Most rows of the files to read; None reads all."""
        return _QUICK_ITEMS if self.quick and self.max_items is None else self.max_items

    @property
    def repeats(self) -> int:
        """Number of runs of each timed step."""
        return _QUICK_REPEATS if self.quick else _REPEATS

    @property
    def below_one(self) -> tuple[float, ...]:
        """Values of τ for mode threshold, each once."""
        default = _QUICK_THRESHOLDS if self.quick else DEFAULT_THRESHOLDS
        return tuple({value: None for value in self.thresholds or default if value < 1.0})


class Gate(Settings):
    """How much worse than the checkpoint in service ``marsray promote`` lets a candidate be."""

    max_loss: float = Field(default=1.0, ge=0, le=100)
    """Largest loss of quality, in points, at the upper end of its interval."""
    max_slower: float = Field(default=0.05, ge=0, lt=1)
    """Largest relative loss of tokens per pass."""
