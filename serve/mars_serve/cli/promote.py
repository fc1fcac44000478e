"""The command ``marsray promote``."""

from pathlib import Path
from typing import Annotated

import typer

from mars_platform.cli.options import AsJson, with_options
from mars_serve.measure.options import Gate


@with_options
def promote(
    candidate: Annotated[
        Path, typer.Argument(help="Directory of a checkpoint or an adapter, with frontier.json.")
    ],
    service: Annotated[
        Path,
        typer.Option(help="Symbolic link to the checkpoint in service; it is created if missing."),
    ],
    gate: Gate,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Do not compare the checkpoints, for going back to an older one."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put a checkpoint in service unless it is worse.

    Compares the candidate with the checkpoint that is in service. Both must have been calibrated on
    the same conversations, with an answer in each row. The candidate's files are checked against
    its manifest, which is written if it is missing. The link changes atomically; deploy servers
    again to serve the new checkpoint.
    """
    import json

    from rich.console import Console

    from mars_platform.cli.progress import working
    from mars_platform.cli.report import Column, interval, jsonable, say, table_of
    from mars_serve.measure.promote import promote as put_in_service

    before = service.resolve() if service.is_symlink() else None
    with working(f"comparing and checking {candidate}"):
        compared = put_in_service(candidate, service, None if force else gate)
    if as_json:
        found = [
            {
                "setting": pair.name,
                "quality": pair.candidate.quality,
                "quality_in_service": pair.current.quality,
                "points_lost": pair.loss,
                "points_allowed": pair.allowed_loss,
                "tokens_per_forward": pair.candidate.tokens_per_forward,
                "tokens_per_forward_in_service": pair.current.tokens_per_forward,
            }
            for pair in compared
        ]
        names = {"service": service, "checkpoint": service.resolve(), "before": before}
        typer.echo(json.dumps(jsonable({**names, "compared": found})))
        return
    console = Console()
    if compared:
        columns = [
            Column("", "name"),
            Column("quality", "candidate.quality", ".1f"),
            Column("in service", "current.quality", ".1f"),
            Column("points lost", lambda pair: interval(pair.loss, ".1f")),
            Column("allowed", "allowed_loss", ".1f"),
            Column("tokens a pass", "candidate.tokens_per_forward", ".2f"),
            Column("in service", "current.tokens_per_forward", ".2f"),
        ]
        console.print(table_of(columns, compared))
        console.print(
            "Points lost are paired by conversation, with their 95% interval. More than what is "
            "allowed is refused, and with it at most 5% of candidates that are as good.",
            highlight=False,
        )
    say(console, f"{service} is now {service.resolve()}")
    if before is not None:
        say(console, f"before, it was {before}")
