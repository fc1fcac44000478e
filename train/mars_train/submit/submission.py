"""Plans the job that trains a recipe on a cluster: the files to upload and the command to run.

Relative paths name files of this machine, which are uploaded. Absolute paths and URLs name files
that the cluster has already.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

from mars_platform import __version__
from mars_platform.config import load_settings
from mars_platform.errors import UserError
from mars_train.recipe import Recipe
from mars_train.submit import check as submit_check

MAX_UPLOAD_MIB = 96
"""Largest upload of a job; a head's dashboard accepts less than 100 MiB in one request."""
_PACKAGES = ("mars_platform", "mars_train", "mars_serve", "mars_autoscale")
_CHECK_FILE = "check_marsray.py"
_MIB = 2**20


@dataclass(frozen=True)
class Submission:
    """A recipe that is ready to be submitted."""

    run: str
    """Name of the run: the last part of ``output``."""
    output: str
    """Directory of the run on the cluster."""
    config: Path
    """File of the recipe."""
    overrides: tuple[str, ...]
    """Settings that replace the recipe's, as ``key.sub=value``."""
    uploads: dict[str, Path]
    """Files of this machine, by their path in the job's working directory."""
    on_cluster: tuple[str, ...]
    """``setting: path or URL`` of everything that is expected on the cluster."""

    @property
    def num_bytes(self) -> int:
        """Total size of the uploads."""
        return sum(file.stat().st_size for file in self.uploads.values())

    def job_id(self, now: datetime) -> str:
        """Return a job id made of the run's name and the time in seconds."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", self.run)
        return f"{name}-{now.astimezone(UTC):%Y%m%d-%H%M%S}"

    def entrypoint(self, *, ship_code: bool) -> str:
        """Return the job's shell command: check marsray's version, then ``marsray train``.

        Args:
            ship_code: whether the packages come with the job; there is no ``marsray`` script then.
        """
        check = shlex.join(["python", _CHECK_FILE, __version__])
        marsray = ["python", "-m", "mars_platform"] if ship_code else ["marsray"]
        settings = [part for override in self.overrides for part in ("--set", override)]
        train = shlex.join([*marsray, "train", self.config.name, *settings])
        return f"{check} && exec {train}"  # exec: stopping the job signals the trainer

    def write_archive(self, target: Path) -> None:
        """Write the job's working directory as a .zip file.

        Ray's own packaging would leave out files that a .gitignore names, often the data.

        Raises:
            UserError: a file cannot be read.
        """
        packed = {**self.uploads, _CHECK_FILE: Path(submit_check.__file__)}
        with zipfile.ZipFile(
            target, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
        ) as archive:
            for name, file in sorted(packed.items()):
                try:
                    archive.write(file, name)
                except OSError as error:
                    raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def plan(
    config: Path, overrides: Sequence[str], *, name: str | None = None, working_dir: Path
) -> Submission:
    """Check a recipe and find the files to upload with it.

    Args:
        config: the recipe.
        overrides: settings as ``key.sub=value``; see `mars_platform.config.apply_overrides`.
        name: name of the run; it replaces the last part of ``output``.
        working_dir: where the recipe's relative paths start from.

    Raises:
        UserError: the recipe is invalid, a file of this machine is missing or too large, or the
            output would be deleted with the job.
    """
    recipe = load_settings(config, Recipe, overrides)
    output = recipe.output if name is None else recipe.output.parent / _checked_name(name)
    _check_outlives(recipe, output)
    uploads: dict[str, Path] = {}
    on_cluster = [f"output: {output}"]
    if recipe.checkpoints.storage is not None:
        on_cluster.append(f"checkpoints.storage: {recipe.checkpoints.storage}")
    sizes: dict[str, int] = {}
    for setting, source in _sources(recipe):
        if _is_elsewhere(source):
            on_cluster.append(f"{setting}: {source}")
            continue
        found = _local_files(setting, source, working_dir)
        if not found:
            on_cluster.append(f"{setting}: {source}, from the Hugging Face hub")
        sizes[f"{setting}: {source}"] = sum(file.stat().st_size for file in found.values())
        uploads |= found
    uploads[config.name] = config
    _check_size(sizes)
    named = [] if name is None else [f"output={json.dumps(str(output))}"]
    return Submission(
        run=output.name,
        output=str(output),
        config=config,
        overrides=(*overrides, *named, "cluster.address=auto"),
        uploads=uploads,
        on_cluster=tuple(on_cluster),
    )


def shipped_packages(directory: Path) -> list[Path]:
    """Return the directories of the four packages and of metadata that registers their commands.

    Args:
        directory: the directory to write the metadata to.

    Raises:
        UserError: marsray can be imported here but is not installed.
    """
    try:
        commands = distribution("marsray").read_text("entry_points.txt")
    except PackageNotFoundError as error:
        raise UserError("--ship-code: marsray is not installed here; pip install it") from error
    info = directory / f"marsray-{__version__}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: marsray\nVersion: {__version__}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    (info / "entry_points.txt").write_text(commands or "", encoding="utf-8")
    return [*(Path(str(files(name))) for name in _PACKAGES), info]


def _checked_name(name: str) -> str:
    if Path(name).name != name or name in {"", ".."}:
        raise UserError(f"--name: {name!r} cannot be the name of a directory; leave out the path")
    return name


def _check_outlives(recipe: Recipe, output: Path) -> None:
    """Refuse output in the job's working directory, which Ray deletes with the job."""
    storage = recipe.checkpoints.storage
    for setting, path in (("output", str(output)), ("checkpoints.storage", storage)):
        if path is not None and not _is_elsewhere(path):
            urls = " or URL" if setting == "checkpoints.storage" else ""
            raise UserError(
                f"{setting}: {path} is relative to the job's working directory, which is deleted "
                f"with the job; give an absolute path{urls} that all nodes reach, such as "
                f"--set {setting}=/shared/{Path(path).name}"
            )


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield setting and value of everything that the recipe reads."""
    if recipe.model.base is not None:
        yield "model.base", recipe.model.base
    for source in recipe.data.train:
        yield "data.train", source
    for source in recipe.evaluation.data if recipe.evaluation is not None else ():
        yield "evaluation.data", source


def _is_elsewhere(source: str) -> bool:
    return "://" in source or Path(source).is_absolute()


def _local_files(setting: str, source: str, working_dir: Path) -> dict[str, Path]:
    """Return the files of a relative path, by path from ``working_dir``; none for a hub id."""
    path = working_dir / source
    if setting == "model.base":
        found = _model_files(source, path)
    else:
        from mars_train.data.files import find_files  # takes a second to import

        found = [Path(file) for file in find_files([str(path)], setting)]
    by_path = {os.path.relpath(file, working_dir): file for file in found}
    if any(path.startswith("..") for path in by_path):
        raise UserError(
            f"{setting}: {source} is outside of the directory that the job gets; write it relative "
            "to a directory that holds it, and name that one with --working-dir"
        )
    return by_path


def _model_files(source: str, path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    if source.startswith((".", "~")) or source.count("/") != 1:
        raise UserError(
            f"model.base: there is no directory {path}; give an existing one, an absolute path on "
            "the cluster, or a hub id"
        )
    return []


def _check_size(sizes: dict[str, int]) -> None:
    if sum(sizes.values()) <= MAX_UPLOAD_MIB * _MIB:
        return
    largest = max(sizes, key=lambda source: sizes[source])
    raise UserError(
        f"{largest} has {sizes[largest] / _MIB:,.0f} MiB, and a job can bring "
        f"{MAX_UPLOAD_MIB} MiB in all; put it where every node can read it, and give its absolute "
        "path there or its URL (s3://...)"
    )
