"""The command ``marsray calibrate``."""

from pathlib import Path
from typing import Annotated

import typer

from mars_platform.cli.options import AsJson, with_options
from mars_serve.cli.options import let_idle_threads_sleep
from mars_serve.measure.options import CalibrateOptions

_FILE_WIDTH = 120  # columns of a table in a file or pipe


@with_options
def calibrate(
    options: CalibrateOptions,
    plot: Annotated[
        Path | None, typer.Option(help="Plot reliability and frontier into this .png or .svg file.")
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

    from mars_platform.cli.pictures import write_picture
    from mars_platform.cli.report import check_output_files, output_console
    from mars_serve.measure.calibrate import calibrate_model
    from mars_serve.measure.calibration_plot import picture_of
    from mars_serve.measure.calibration_report import print_calibration

    check_output_files({"--plot": plot})
    run = calibrate_model(options, Console(stderr=True))
    print_calibration(run, output_console(_FILE_WIDTH), as_json=as_json)
    write_picture(lambda: picture_of(options.model, run.measured, run.frontier), plot)
