"""``marsray submit``: trains a recipe as a job of a Ray cluster, and manages such jobs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from mars_platform.cli.main import show_help_without_command
from mars_train.cli.commands import AsJson, Overrides

if TYPE_CHECKING:
    from mars_platform.cluster.jobs import Job, Jobs
    from mars_train.submit.submission import Submission

_SUBMIT = "CONFIG"
_INTERRUPTED = 130
_FILE_WIDTH = 160  # columns of a table written to a file or pipe; rich assumes 80


class _ConfigOrCommand(TyperGroup):
    """A command group that also accepts a recipe as its first word, as in ``submit CONFIG``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        commands = set(self.commands) - {_SUBMIT}
        if args and args[0] not in {*commands, *ctx.help_option_names}:
            args = [_SUBMIT, *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.commands[_SUBMIT].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


class _Unnamed(TyperCommand):
    """The group's default command; its usage is shown as the group's."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **rest: Any) -> Any:
        return super().make_context(
            parent.info_name or info_name, args, parent=parent.parent, **rest
        )


submit = typer.Typer(cls=_ConfigOrCommand, subcommand_metavar="CONFIG | COMMAND [ARGS]...")

_Address = Annotated[
    str | None,
    typer.Option(
        help="URL of the head's dashboard, such as http://HEAD:8265; by default the value of "
        "RAY_API_SERVER_ADDRESS or RAY_ADDRESS."
    ),
]
_Follow = Annotated[
    bool,
    typer.Option(help="Show the log until the job has ended; exit with status 1 if it failed."),
]
_Id = Annotated[str, typer.Argument(help="Id of the job, as shown by `list`.", metavar="ID")]


@submit.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    """Run a training recipe as a job on a Ray cluster.

    The recipe's relative paths are uploaded; absolute ones and URLs are taken to be the cluster's.
    A run has the name of its output directory: submitted again, an unfinished one is resumed.
    """
    show_help_without_command(context)


@submit.command(_SUBMIT, cls=_Unnamed, hidden=True)
def _submit(
    config: Annotated[Path, typer.Argument(help="Recipe, a YAML file.")],
    address: _Address = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run; it replaces the last part of `output`."),
    ] = None,
    follow: _Follow = False,
    set_: Overrides = None,
    working_dir: Annotated[
        Path, typer.Option(help="Directory that relative paths in the recipe start from.")
    ] = Path(),
    ship_code: Annotated[
        bool,
        typer.Option(
            "--ship-code", help="Upload marsray too; without it the cluster must have marsray."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the stages of a training recipe as a job of a Ray cluster."""
    from mars_train.submit.submission import plan

    planned = plan(config, set_ or [], name=name, working_dir=working_dir)
    jobs = _connect(address)
    for line in planned.on_cluster:
        typer.echo(f"taken from the cluster: {line}", err=as_json)
    size = f"{len(planned.uploads)} files, {planned.num_bytes / 2**20:.1f} MiB"
    typer.echo(f"uploading: {size}", err=as_json)
    job = _started(jobs, planned, ship_code=ship_code)
    typer.echo(f"job {job.id}: {job.run} in {job.output}", err=as_json)
    if follow:
        job = _follow(jobs, job.id, as_json=as_json)
    else:
        command = f"marsray submit logs {job.id} --follow --address {jobs.address}"
        typer.echo(f"to follow it: {command}", err=as_json)
    if as_json:
        typer.echo(json.dumps(job.to_json()))
    if follow:
        _tell_end(job)


@submit.command()
def status(job_id: _Id, address: _Address = None, as_json: AsJson = False) -> None:
    """Show the status of a job."""
    job = _connect(address).find(job_id)
    if as_json:
        typer.echo(json.dumps(job.to_json()))
        return
    for name, value in job.to_json().items():
        if value:
            typer.echo(f"{name}: {value}")


@submit.command()
def logs(
    job_id: _Id,
    address: _Address = None,
    follow: _Follow = False,
) -> None:
    """Show the log of a job."""
    jobs = _connect(address)
    if follow:
        _tell_end(_follow(jobs, job_id, as_json=False))
    else:
        typer.echo(jobs.log(job_id), nl=False)


@submit.command()
def stop(job_id: _Id, address: _Address = None, as_json: AsJson = False) -> None:
    """Stop a job; its run saves a checkpoint and can be resumed."""
    jobs = _connect(address)
    job = jobs.find(job_id)
    if job.has_ended:
        typer.echo(f"job {job.id} had ended already", err=True)
    else:
        typer.echo("stopping: the run saves a checkpoint first", err=True)
        job = jobs.stop(job_id)
    typer.echo(json.dumps(job.to_json()) if as_json else f"job {job.id}: {job.status}")


@submit.command("list")
def list_jobs(address: _Address = None, as_json: AsJson = False) -> None:
    """List the cluster's training jobs, newest first."""
    from rich.console import Console
    from rich.table import Table

    jobs = _connect(address).all()
    if as_json:
        typer.echo(json.dumps([job.to_json() for job in jobs]))
        return
    table = Table("job", "status", "started", "took", "output")
    for job in jobs:
        started = "" if job.started is None else f"{job.started.astimezone():%Y-%m-%d %H:%M}"
        took = job.ended - job.started if job.ended and job.started else None
        shown = "" if took is None else str(took).partition(".")[0]
        table.add_row(job.id, job.status, started, shown, job.output)
    terminal = Console()
    Console(width=None if terminal.is_terminal else _FILE_WIDTH).print(table)


def _connect(address: str | None) -> Jobs:
    from mars_platform.cluster.jobs import Jobs

    return Jobs(address)


def _started(jobs: Jobs, planned: Submission, *, ship_code: bool) -> Job:
    """Start the job.

    Raises:
        UserError: another job is working on the same run.
    """
    from datetime import UTC, datetime
    from tempfile import TemporaryDirectory

    from mars_platform.cluster.jobs import JobRequest
    from mars_platform.errors import UserError
    from mars_train.submit.submission import shipped_packages

    for other in jobs.all():
        if other.output == planned.output and not other.has_ended:
            raise UserError(
                f"output: job {other.id} works in {other.output} now; wait for it, stop it "
                f"(marsray submit stop {other.id}), or give the new run another --name"
            )
    with TemporaryDirectory(prefix="marsray-") as temporary:
        archive = Path(temporary) / "working-dir.zip"
        planned.write_archive(archive)
        request = JobRequest(
            id=planned.job_id(datetime.now(UTC)),
            run=planned.run,
            output=planned.output,
            entrypoint=planned.entrypoint(ship_code=ship_code),
            working_dir=archive,
            py_modules=shipped_packages(Path(temporary)) if ship_code else (),
        )
        jobs.submit(request)
    return jobs.find(request.id)


def _follow(jobs: Jobs, job_id: str, *, as_json: bool) -> Job:
    try:
        return jobs.follow(job_id, partial(typer.echo, nl=False, err=as_json))
    except KeyboardInterrupt:
        command = f"marsray submit stop {job_id} --address {jobs.address}"
        typer.echo(f"\nthe job goes on; to stop it: {command}", err=True)
        raise typer.Exit(_INTERRUPTED) from None


def _tell_end(job: Job) -> None:
    """Print how a job ended; exit with status 1 unless it succeeded."""
    if job.status == "SUCCEEDED":
        typer.echo(f"job {job.id} succeeded", err=True)
        return
    reason = job.message.partition(", last available logs")[0]  # the log has been shown
    typer.echo(f"job {job.id} {job.status.lower()}: {reason}", err=True)
    typer.echo("submitted again, the run is resumed from its last checkpoint", err=True)
    raise typer.Exit(1)
