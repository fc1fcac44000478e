"""The command ``marsray calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mars_serve.cli.options import (
    Adapter,
    AsJson,
    Data,
    Device,
    Dtype,
    MaxItems,
    MaxTokens,
    let_idle_threads_sleep,
)

_FILE_WIDTH = 120  # columns of a table in a file or pipe


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory or hub id, with mars.json or an adapter.")
    ],
    data: Data,
    adapter: Adapter = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option(
            help="Confidence threshold in (0, 1] to measure. May be repeated; by default .95, .9, "
            ".8, .7, .6 and .5."
        ),
    ] = None,
    max_items: MaxItems = None,
    max_cursors: Annotated[
        int, typer.Option(min=2, help="Largest number of positions at which proposals are scored.")
    ] = 4000,
    max_tokens: MaxTokens = 256,
    batch: Annotated[
        int,
        typer.Option(min=1, help="Conversations that run at once; set it to a replica's batch."),
    ] = 32,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Measure less precisely: 100 conversations, thresholds down to .7."
        ),
    ] = False,
    examples: Annotated[
        bool,
        typer.Option(
            help="Write the first prompts into the checkpoint, for the playground of whoever may "
            "use the model."
        ),
    ] = True,
    device: Device = "auto",
    dtype: Dtype = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot reliability and frontier into this .png or .svg file.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="HTML page to write, with figure and tables.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a checkpoint's confidence, quality and speed.

    First fits a temperature for each depth, so that 95 % of the tokens proposed with confidence .95
    are right, which means that mode ar gives the same token. Temperatures are fitted on one half of
    the held-out conversations and evaluated on the other. They are written to calibration.json in
    the checkpoint, or beside the adapter.

    Then measures quality and tokens per forward pass in each mode and at each threshold, and step
    times on this machine, and writes frontier.json for the autoscaler. A stopped run continues when
    it is started again.
    """
    let_idle_threads_sleep()

    from rich.console import Console

    from mars_platform.cli.pictures import write_pictures
    from mars_platform.cli.report import check_output_files, output_console
    from mars_serve.measure.calibration.plot import picture_of
    from mars_serve.measure.calibration.report import print_calibration
    from mars_serve.measure.calibration.run import CalibrateOptions, calibrate_model

    check_output_files({"--html": page})
    options = CalibrateOptions(
        model,
        data,
        adapter=adapter,
        max_items=max_items,
        max_cursors=max_cursors,
        max_tokens=max_tokens,
        batch=batch,
        device=device,
        dtype=dtype,
        plot=plot,
        thresholds=threshold or (),
        examples=examples,
        quick=quick,
    )
    run = calibrate_model(options, Console(stderr=True))
    output = output_console(_FILE_WIDTH)
    print_calibration(run, output, as_json=as_json)
    write_pictures(
        lambda: picture_of(model, run.measured, run.frontier),
        title=f"marsray calibrate {model}",
        show=lambda console: print_calibration(run, console, as_json=False),
        plot=None,
        page=page,
    )
