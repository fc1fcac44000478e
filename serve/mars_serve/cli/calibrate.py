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
    threshold: Annotated[
        list[float] | None,
        typer.Option(
            help="Confidence threshold in (0, 1] to measure; may be repeated. Else .95, .9, .8, "
            ".7, .6, .5."
        ),
    ] = None,
    max_items: Annotated[
        int | None, typer.Option(min=1, help="Conversations at the most, the first ones.")
    ] = None,
    max_cursors: Annotated[
        int, typer.Option(min=2, help="Places at the most at which tokens are proposed.")
    ] = 4000,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens at the most, within what the context leaves.")
    ] = 256,
    batch: Annotated[
        int, typer.Option(min=1, help="Conversations that run at once, as on a replica.")
    ] = 32,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Less exact: 100 conversations, thresholds down to .7."),
    ] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Auto is cuda where there is one.")
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bf16"] | None,
        typer.Option(help="Of the weights; else float32 on the CPU, bf16 on CUDA."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw reliability and frontier, as .png or .svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Measure on held-out conversations what a checkpoint's confidence and thresholds are worth.

    Fits a temperature for each depth, so that of the proposed tokens with confidence .95 as many
    are right as that says: mode ar gives the same token there. Half of the conversations are
    fitted on, the figures come from the other half. Writes calibration.json into the checkpoint.

    Then measures quality and tokens a forward pass in each mode and at each threshold, and what
    steps take on this machine, and writes frontier.json for the autoscaler. A run that was
    stopped goes on where it was when it is started again.
    """
    # Spinning threads make a run many times slower once another process wants a core. The kernels
    # read this when they are loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from rich.console import Console

    from mars_serve.measure.calibration.report import print_calibration
    from mars_serve.measure.calibration.run import CalibrateOptions, calibrate_model

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
        thresholds=threshold or (),
        quick=quick,
    )
    run = calibrate_model(options, Console(stderr=True))
    output = Console()
    if not output.is_terminal:
        output.width = _FILE_WIDTH
    print_calibration(run, output, as_json=as_json)
