"""``marsray submit``: sends a recipe with its files to a Ray cluster as one of Ray's own jobs."""

from __future__ import annotations

import json
import os
import re
import shlex
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from mars_platform import __version__
from mars_platform.checkpoint.manifest import refuse_links_out
from mars_platform.cli.options import AsJson, Overrides
from mars_platform.data.sources import is_remote
from mars_platform.errors import UserError, one_line

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from mars_train.recipe import Recipe

MAX_UPLOAD_MIB = 96
"""Largest upload of a job; a head's dashboard accepts less than 100 MiB in one request."""
_STOP_WAIT_S = 600  # enough to save a checkpoint
_AFTER_END = "submitted again, the run is resumed from its last checkpoint"
_AFTER_CUT = "the connection to the log has ended; the job goes on, and `ray job logs` shows more"


def submit(
    config: Annotated[Path, typer.Argument(help="Recipe, a YAML file.")],
    address: Annotated[
        str | None,
        typer.Option(
            help="URL of the head's dashboard, such as http://HEAD:8265; by default the value of "
            "RAY_API_SERVER_ADDRESS or RAY_ADDRESS, else the cluster that runs on this machine."
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(help="Show the log until the job has ended; exit with status 1 if it failed."),
    ] = False,
    set_: Overrides = None,
    working_dir: Annotated[
        Path, typer.Option(help="Directory that relative paths in the recipe start from.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Run the stages of a training recipe as a job of a Ray cluster.

    The recipe's relative paths are uploaded; absolute ones and URLs are taken to be the cluster's.
    A run has the name of its output directory: submitted again, an unfinished one is resumed. The
    job is followed and stopped by Ray's own commands, which are printed.
    """
    from mars_platform.cluster.ray_private import job_variables
    from mars_platform.config import load_settings
    from mars_train.recipe import Recipe

    recipe = load_settings(config, Recipe, set_ or [])
    uploads = {**files_of(recipe, working_dir), config.name: config}
    client = _connect(address)
    run = re.sub(r"[^A-Za-z0-9_.-]", "-", recipe.output.name)
    with TemporaryDirectory(prefix="marsray-") as temporary:
        archive = Path(temporary) / "working-dir.zip"
        pack(uploads, archive)
        job = client.submit_job(
            submission_id=f"{run}-{datetime.now(UTC):%Y%m%d-%H%M%S}",
            entrypoint=entrypoint(config.name, set_ or []),
            runtime_env={"working_dir": str(archive), "env_vars": job_variables(_STOP_WAIT_S)},
        )
    typer.echo(f"job {job} trains into {recipe.output} on the cluster", err=as_json)
    for command in ("logs --follow", "status", "stop"):
        typer.echo(f"  ray job {command} --address {client.get_address()} {job}", err=as_json)
    if follow:
        _follow(client, job, to_stderr=as_json)
    if as_json:
        found = {"id": job, "output": str(recipe.output), "status": client.get_job_status(job)}
        typer.echo(json.dumps(found))
    if follow and (status := client.get_job_status(job)) != "SUCCEEDED":
        typer.echo(_AFTER_END if status.is_terminal() else _AFTER_CUT, err=True)
        raise typer.Exit(1)


def files_of(recipe: Recipe, working_dir: Path) -> dict[str, Path]:
    """Return the files of this machine that a recipe names, by their path in the job's directory.

    Raises:
        UserError: a file is missing, outside of the directory or too large, or the run's output
            would be deleted with the job.
    """
    storage = recipe.checkpoints.storage
    for setting, path in (("output", str(recipe.output)), ("checkpoints.storage", storage)):
        if path is not None and not _is_elsewhere(path):
            raise UserError(
                f"{setting}: {path} is relative to the job's working directory, which is deleted "
                "with the job; give an absolute path that all nodes reach, such as --set "
                f"{setting}=/shared/{Path(path).name}"
            )
    found = dict[str, Path]()
    for setting, source in _sources(recipe):
        for file in () if _is_elsewhere(source) else _local_files(setting, source, working_dir):
            name = os.path.relpath(file, working_dir)
            if name.startswith(".."):
                raise UserError(
                    f"{setting}: {source} is outside of the directory that the job gets; write it "
                    "relative to a directory that holds it, and name that one with --working-dir"
                )
            found[name] = file
    num_mib = sum(file.stat().st_size for file in found.values()) / 2**20
    if num_mib > MAX_UPLOAD_MIB:
        largest = max(found, key=lambda name: found[name].stat().st_size)
        raise UserError(
            f"{largest} and the recipe's other files have {num_mib:,.0f} MiB, and a job can bring "
            f"{MAX_UPLOAD_MIB} MiB; put it where every node can read it, and give its absolute "
            "path there or its URL (s3://...)"
        )
    return found


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.model.base is not None:
        yield "model.base", recipe.model.base
    for source in recipe.data.train:
        yield "data.train", source
    for source in recipe.evaluation.data if recipe.evaluation is not None else ():
        yield "evaluation.data", source


def _is_elsewhere(source: str) -> bool:
    return is_remote(source) or Path(source).is_absolute()


def _local_files(setting: str, source: str, working_dir: Path) -> list[Path]:
    """Return the files of a relative path; none for a model's id on the hub."""
    path = working_dir / source
    if setting != "model.base":
        from mars_platform.data.files import find_files  # takes a second to import

        return [Path(file) for file in find_files([str(path)], setting)]
    if not path.is_dir() and (source.startswith((".", "~")) or source.count("/") != 1):
        raise UserError(
            f"model.base: there is no directory {path}; give an existing one, an absolute path on "
            "the cluster, or a hub id"
        )
    if path.is_dir():
        refuse_links_out(path, "model.base")
    return [file for file in path.rglob("*") if file.is_file()]


def pack(uploads: Mapping[str, Path], archive: Path) -> None:
    """Write the job's working directory, a .zip file.

    Ray's own packaging would leave out files that a .gitignore names, often the data.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as packed:
        for name, file in sorted(uploads.items()):
            packed.write(file, name)


def entrypoint(config: str, overrides: Sequence[str]) -> str:
    """Return the job's shell command, ``marsray train`` on a recipe in the job's working directory.

    Another version of marsray is refused.
    """
    settings = [part for each in (*overrides, "cluster.address=auto") for part in ("--set", each)]
    error = f"error: the cluster needs marsray {__version__}, as here; install it there"
    refusal = f"{{ echo {shlex.quote(error)} >&2; exit 2; }}"
    check = f'[ "$(marsray --version)" = "marsray {__version__}" ] || {refusal}'
    train = shlex.join(["marsray", "train", config, *settings])
    return f"{check}; exec {train}"  # exec: stopping the job signals the trainer


def _connect(address: str | None) -> JobSubmissionClient:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    if address is not None:
        # Ray prefers the variable to an argument
        os.environ["RAY_API_SERVER_ADDRESS"] = address.rstrip("/")
    try:
        return JobSubmissionClient()
    except AuthenticationError as error:
        raise UserError(
            "--address: the cluster refuses the token, or its absence; set RAY_AUTH_MODE=token, "
            "and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH for a file (~/.ray/auth_token by default)"
        ) from error
    except (OSError, RuntimeError, KeyError) as error:
        raise UserError(
            f"--address: no Ray head's dashboard answers ({one_line(error)}); give its URL, such "
            "as http://HEAD:8265, and check the port-forward if there is one"
        ) from error


def _follow(client: JobSubmissionClient, job: str, *, to_stderr: bool) -> None:
    import asyncio

    async def show() -> None:
        async for text in client.tail_job_logs(job):
            typer.echo(text, nl=False, err=to_stderr)

    try:
        asyncio.run(show())
    except KeyboardInterrupt:
        typer.echo(_AFTER_CUT, err=True)
        raise
