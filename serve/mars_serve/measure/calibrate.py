"""Runs ``marsray calibrate``: measures, and writes ``calibration.json`` and ``frontier.json``.

A run continues an earlier one with the same model, data, machine and options that was stopped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from mars_autoscale.model.frontier import FORMAT_VERSION, write_frontier
from mars_platform import __version__
from mars_platform.checkpoint.adapted import read_model
from mars_platform.checkpoint.calibration import CALIBRATION_FILE, write_calibration
from mars_platform.checkpoint.directory import Checkpoint
from mars_platform.checkpoint.examples import write_examples
from mars_platform.checkpoint.files import check_writable
from mars_platform.cli.progress import progress_display
from mars_platform.errors import UserError
from mars_platform.method.mode import check_threshold
from mars_serve.config.hardware import hardware_name
from mars_serve.measure.calibration.collect import (
    MeasuredCalibration,
    OnProgress,
    check_halves,
    measure_calibration,
)
from mars_serve.measure.evaluation.decoding import device_and_dtype
from mars_serve.measure.evaluation.items import EvalItem, read_items
from mars_serve.measure.frontier.measure import (
    FrontierOptions,
    MeasuredFrontier,
    measure_frontier,
    phases_left,
)
from mars_serve.measure.frontier.working_file import WorkingFile, run_key
from mars_serve.measure.options import CalibrateOptions


@dataclass(frozen=True)
class CalibrationRun:
    """The result of ``marsray calibrate``."""

    options: CalibrateOptions
    file: Path
    device: str
    dtype: str
    measured: MeasuredCalibration
    frontier_file: Path
    frontier: MeasuredFrontier


def calibrate_model(options: CalibrateOptions, console: Console) -> CalibrationRun:
    """Measure, with progress on ``console``, and write both files.

    Raises:
        UserError: the model, the data or an option is unusable, a file cannot be written, or the
            measured figures contradict each other.
    """
    for threshold in options.thresholds:
        check_threshold("--threshold", threshold)
    checkpoint = _mars_checkpoint(options)
    how = _frontier_options(options, checkpoint)
    items = read_items(
        options.data,
        checkpoint.tokenizer,
        max_length=checkpoint.max_length,
        max_items=options.num_rows,
    )
    check_halves(items)
    working = _working_file(checkpoint, items, options.max_cursors, how)
    if working.kept.parts:
        text = f"{working.path}: not measured again: {', '.join(working.kept.parts)}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    num_items = len(items)
    with progress_display(console) as display:
        phases = phases_left(how, working.kept, num_items)
        if working.kept.calibration is None:
            phases = {"decode": num_items, "calibrate": 2.0 * num_items} | phases
        on_progress = with_work_to_come(display.update, phases)
        measured = _calibration(checkpoint, items, options.max_cursors, how, working, on_progress)
        file = write_calibration(checkpoint.own_path, measured.calibration)
        frontier = measure_frontier(checkpoint, items, how, working, on_progress)
    frontier_file = write_frontier(checkpoint.own_path, frontier.frontier)
    if options.examples:
        write_examples(checkpoint.own_path, (item.messages for item in items))
    working.remove()
    return CalibrationRun(
        options=options,
        file=file,
        device=how.device,
        dtype=how.dtype_name,
        measured=measured,
        frontier_file=frontier_file,
        frontier=frontier,
    )


def with_work_to_come(update: Callable[..., None], phases: Mapping[str, float]) -> OnProgress:
    """Return a function that shows phases by ``update``, with the time left for all of them.

    ``phases`` has the expected work of each phase by its title, in any unit and in order.
    """

    def show(title: str, done: int, total: int, quality: str = "", /) -> None:
        later = list(phases).index(title) + 1
        to_come = total * sum(list(phases.values())[later:]) / phases[title]
        update(title, done, total, quality, to_come=to_come)

    return show


def _frontier_options(options: CalibrateOptions, checkpoint: Checkpoint) -> FrontierOptions:
    assert checkpoint.metadata is not None
    device, dtype = device_and_dtype(options.device, options.dtype, options.model)
    return FrontierOptions(
        options.below_one,
        max_tokens=options.max_tokens,
        batch=options.batch,
        repeats=options.repeats,
        dtype=getattr(torch, dtype),
        dtype_name=dtype,
        device=device,
        hardware=hardware_name(device),
        block_size=checkpoint.metadata.block_size,
    )


def _mars_checkpoint(options: CalibrateOptions) -> Checkpoint:
    # The old calibration need not be readable: it is replaced.
    checkpoint = read_model(options.model, options.adapter, with_calibration=False)
    if checkpoint.metadata is None:
        raise UserError(
            f"model: {options.model} is a plain AR checkpoint without mars.json: it proposes one "
            "token a pass and has nothing to calibrate; name one trained with MARS, or give an "
            "--adapter"
        )
    check_writable(checkpoint.own_path, CALIBRATION_FILE)
    return checkpoint


def _working_file(
    checkpoint: Checkpoint, items: Sequence[EvalItem], max_cursors: int, how: FrontierOptions
) -> WorkingFile:
    """Open the working file of a run; runs with other thresholds may share it."""
    conditions = {
        "version": [__version__, FORMAT_VERSION],
        "max_cursors": max_cursors,
        "max_tokens": how.max_tokens,
        "batch": how.batch,
        "repeats": how.repeats,
        "dtype": how.dtype_name,
        "hardware": how.hardware,
    }
    key = run_key(checkpoint.fingerprint, items, conditions)
    return WorkingFile(checkpoint.own_path, key)


def _calibration(
    checkpoint: Checkpoint,
    items: Sequence[EvalItem],
    max_cursors: int,
    how: FrontierOptions,
    working: WorkingFile,
    on_progress: OnProgress,
) -> MeasuredCalibration:
    """Return the calibration that an earlier run kept, or measure it."""
    if working.kept.calibration is not None:
        return working.kept.calibration
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
