"""``marsray calibrate``: measures, and writes ``calibration.json`` and ``frontier.json``.

Takes up what an earlier run of the same kind has left unfinished. Prints nothing but progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console

from mars_autoscale.model.frontier import write_frontier
from mars_platform import __version__
from mars_platform.checkpoint.calibration import CALIBRATION_FILE, write_calibration
from mars_platform.checkpoint.directory import Checkpoint, read_checkpoint
from mars_platform.checkpoint.files import check_writable
from mars_platform.checkpoint.fingerprint import weights_fingerprint
from mars_platform.cli.output_files import check_plot_file
from mars_platform.cli.progress import progress_display
from mars_platform.errors import UserError
from mars_serve.config.hardware import hardware_name
from mars_serve.engine.execution.warm_up import REPEATS
from mars_serve.measure.calibration.collect import (
    Measured,
    OnProgress,
    check_halves,
    measure_calibration,
)
from mars_serve.measure.calibration.plot import plot_calibration
from mars_serve.measure.evaluation.evaluate import DEFAULT_THRESHOLDS
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_serve.measure.frontier.measure import (
    FrontierOptions,
    MeasuredFrontier,
    measure_frontier,
    phases_left,
)
from mars_serve.measure.frontier.progress import WholeProgress
from mars_serve.measure.frontier.working_file import WorkingFile, run_key

_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
_QUICK_ITEMS = 100
_QUICK_THRESHOLDS = (0.95, 0.9, 0.8, 0.7)


@dataclass(frozen=True)
class CalibrateOptions:
    """What ``marsray calibrate`` is asked for."""

    model: str
    """Checkpoint directory or hub id."""
    data: Sequence[Path]
    """JSONL and Parquet files of conversations."""
    max_items: int | None = None
    """Conversations, the first ones of the files."""
    max_cursors: int = 4000
    """Places at which tokens are proposed, over all conversations; at least 2."""
    max_tokens: int = 256
    """Output tokens of a conversation; what the context leaves may be less."""
    batch: int = 32
    """Conversations that decode at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Auto is CUDA where there is a device."""
    dtype: Literal["float32", "bf16"] | None = None
    """Of the weights; None for float32 on the CPU and bf16 on CUDA."""
    plot: Path | None = None
    """Picture to draw; its suffix says the format."""
    thresholds: Sequence[float] = ()
    """τ of the frontier's points; empty for the default ones. Mode ar and exact are always
    measured."""
    quick: bool = False
    """Fewer conversations and thresholds where neither is given, and fewer runs of each step."""

    @property
    def num_rows(self) -> int | None:
        """Rows of the files to read at the most."""
        return _QUICK_ITEMS if self.quick and self.max_items is None else self.max_items

    @property
    def repeats(self) -> int:
        """Runs of each step that is timed."""
        return REPEATS if self.quick else 3 * REPEATS

    @property
    def below_one(self) -> tuple[float, ...]:
        """τ of mode threshold, each once."""
        default = _QUICK_THRESHOLDS if self.quick else DEFAULT_THRESHOLDS
        return tuple({value: None for value in self.thresholds or default if value < 1.0})


@dataclass(frozen=True)
class CalibrationRun:
    """The result."""

    options: CalibrateOptions
    file: Path
    """Where the calibration was written."""
    device: str
    dtype: str
    measured: Measured
    frontier_file: Path
    frontier: MeasuredFrontier


def calibrate_model(options: CalibrateOptions, console: Console) -> CalibrationRun:
    """Measure, write both files, draw the plot if there is to be one; progress on ``console``.

    Raises:
        UserError: the model, the data or an option is unusable, or what was measured contradicts
            itself.
    """
    _check_options(options)
    how = _how(options)
    checkpoint = _mars_checkpoint(options.model)
    items = read_items(
        options.data,
        checkpoint.tokenizer,
        max_length=checkpoint.max_length,
        max_items=options.num_rows,
    )
    check_halves(items)
    working = _working_file(checkpoint, items, options.max_cursors, how)
    if working.found.parts:
        said = f"{working.path}: not measured again: {', '.join(working.found.parts)}"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    num_items = len(items)
    with progress_display(console) as display:
        phases = _phases(working, num_items) | phases_left(how, working.found, num_items)
        on_progress = WholeProgress(display.update, phases).update
        measured = _calibration(checkpoint, items, options.max_cursors, how, working, on_progress)
        file = write_calibration(checkpoint.path, measured.calibration)
        frontier = measure_frontier(checkpoint, items, how, working, on_progress)
    frontier_file = write_frontier(checkpoint.path, frontier.frontier)
    if options.plot is not None:
        plot_calibration(options.model, measured, frontier, options.plot)
    working.remove()
    return CalibrationRun(
        options, file, how.device, how.dtype_name, measured, frontier_file, frontier
    )


def _check_options(options: CalibrateOptions) -> None:
    if options.plot is not None:
        check_plot_file(options.plot)
    for threshold in options.thresholds:
        if not 0.0 < threshold <= 1.0:
            raise UserError(f"--threshold: {threshold} is not in (0, 1]; 1 is plain AR decoding")


def _how(options: CalibrateOptions) -> FrontierOptions:
    device = _device(options.device)
    dtype = options.dtype or ("float32" if device == "cpu" else "bf16")
    return FrontierOptions(
        options.below_one,
        max_tokens=options.max_tokens,
        batch=options.batch,
        repeats=options.repeats,
        dtype=_DTYPES[dtype],
        dtype_name=dtype,
        device=device,
        hardware=hardware_name(device),
    )


def _mars_checkpoint(model: str) -> Checkpoint:
    """A checkpoint that has masks and a directory to write into."""
    # what is replaced need not be readable
    checkpoint = read_checkpoint(model, with_calibration=False)
    if checkpoint.metadata is None:
        raise UserError(
            f"model: {model} is a plain AR checkpoint without mars.json: it proposes one token a "
            "pass and has nothing to calibrate; name one trained with MARS"
        )
    check_writable(checkpoint.path, CALIBRATION_FILE)
    return checkpoint


def _working_file(
    checkpoint: Checkpoint, items: Sequence[EvalItem], max_cursors: int, how: FrontierOptions
) -> WorkingFile:
    """Thresholds may differ between two runs: each one's outcomes are kept by themselves."""
    figures_depend_on = {
        "version": __version__,
        "max_cursors": max_cursors,
        "max_tokens": how.max_tokens,
        "batch": how.batch,
        "repeats": how.repeats,
        "dtype": how.dtype_name,
        "hardware": how.hardware,
    }
    key = run_key(weights_fingerprint(checkpoint.path), items, figures_depend_on)
    return WorkingFile(checkpoint.path, key)


def _phases(working: WorkingFile, num_items: int) -> dict[str, float]:
    """As `phases_left`."""
    if working.found.calibration is not None:
        return {}
    return {"decode": float(num_items), "calibrate": 2.0 * num_items}


def _calibration(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    max_cursors: int,
    how: FrontierOptions,
    working: WorkingFile,
    on_progress: OnProgress,
) -> Measured:
    """The kept one, or one that is measured now."""
    if working.found.calibration is not None:
        return working.found.calibration
    measured = measure_calibration(
        checkpoint,
        items,
        max_tokens=how.max_tokens,
        max_cursors=max_cursors,
        max_num_seqs=how.batch,
        dtype=how.dtype,
        device=how.device,
        on_progress=on_progress,
    )
    working.keep(calibration=measured)
    return measured


def _device(device: str) -> str:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("--device: there is no CUDA device on this machine; use cpu")
    return "cuda" if available and device != "cpu" else "cpu"
