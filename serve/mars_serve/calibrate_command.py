"""The command ``marsray calibrate``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

_FILE_WIDTH = 120  # of tables that go to a file or pipe, where rich assumes 80


def calibrate(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id, with mars.json.")],
    data: Annotated[
        list[Path], typer.Option(help="Conversations, JSONL or Parquet; may be repeated.")
    ],
    max_items: Annotated[
        int | None, typer.Option(min=1, help="Conversations at the most, the first ones.")
    ] = None,
    max_cursors: Annotated[
        int, typer.Option(min=2, help="Places at the most at which tokens are proposed.")
    ] = 4000,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens at the most, within what the context leaves.")
    ] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Conversations that run at once.")] = 32,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Auto is cuda where there is one.")
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bf16"] | None,
        typer.Option(help="Of the weights; else float32 on the CPU, bf16 on CUDA."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw confidence against accuracy, as .png or .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Make a checkpoint's confidence mean what it says, on held-out conversations.

    Fits a temperature for each depth, so that of the proposed tokens with confidence .95 as many
    are right as that says: mode ar gives the same token there. Half of the conversations are
    fitted on, the figures come from the other half. Writes calibration.json into the checkpoint.
    """
    # Spinning threads make a run many times slower once another process wants a core. The kernels
    # read this when they are loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from rich.console import Console

    from mars_serve.calibration_report import (
        CalibrateOptions,
        calibrate_model,
        print_calibration,
    )

    options = CalibrateOptions(
        model,
        data,
        max_items=max_items,
        max_cursors=max_cursors,
        max_tokens=max_tokens,
        batch=batch,
        device=device,
        dtype=dtype,
        plot=plot,
    )
    run = calibrate_model(options, Console(stderr=True))
    output = Console()
    if not output.is_terminal:
        output.width = _FILE_WIDTH
    print_calibration(run, output, as_json=as_json)
