"""The command ``marsray batch``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from mars_platform.cli.options import AsJson, with_options
from mars_platform.config import Settings, apply_overrides
from mars_platform.errors import UserError
from mars_serve.measure.options import Adapter

_TELL_S = 10.0
"""Seconds between two lines that tell of progress."""


class _BatchOptions(Settings):
    data: Annotated[tuple[str, ...], typer.Argument()]
    """Files, directories or URLs of requests: lines of a batch, or rows with messages or prompt."""
    model: str
    """Checkpoint directory or hub id, of the model that answers whatever lines name."""
    output: Annotated[Path, typer.Option("--output", "-o")]
    """JSONL file to append answers to; lines that it has are not answered again."""
    adapter: Adapter = None
    replicas: int | None = Field(default=None, ge=1)
    """Number of engines; by default one for each GPU of the cluster, or one on the CPU."""
    overrides: Annotated[tuple[str, ...], typer.Option("--set")] = ()
    """Field of every request whose line does not give it: key=value. May be repeated."""


@with_options
def batch(options: _BatchOptions, as_json: AsJson = False) -> None:
    """Answer files of requests without a server, on all GPUs.

    Lines have the form of /v1/batches, or are rows of JSONL or Parquet with messages or prompt. A
    run that was stopped goes on with the same command.
    """
    import time

    import ray
    from rich.console import Console

    from mars_platform.cli.report import say
    from mars_platform.cluster.session import ray_session
    from mars_platform.cluster.settings import ClusterSettings
    from mars_serve.config.settings import ModelSettings
    from mars_serve.deploy.offline import Tally, answer_files

    fields: dict[str, Any] = {}
    apply_overrides(fields, options.overrides)
    console = Console(stderr=True)
    with ray_session(ClusterSettings(), min_cpus=(options.replicas or 1) + 2):
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        model = ModelSettings(
            name="model",
            path=options.model,
            adapter=options.adapter and str(options.adapter),
            num_gpus=min(num_gpus, 1),
        )
        num_engines = options.replicas or max(num_gpus, 1)
        if num_gpus and num_engines > num_gpus:
            raise UserError(
                f"--replicas: {num_engines} engines need as many GPUs; there are {num_gpus}"
            )
        told_s = time.monotonic()

        def tell(tally: Tally) -> None:
            nonlocal told_s
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                say(console, f"{tally.done:,} lines have an answer, {tally.errors:,} new errors")

        tally = answer_files(options.data, options.output, model, fields, num_engines, tell)
    if as_json:
        Console().print_json(data=asdict(tally))
        return
    repeated = f"; {tally.repeated:,} repeat an id and were left alone" if tally.repeated else ""
    say(console, f"{options.output}: {tally.done:,} lines, {tally.errors:,} new errors{repeated}")
