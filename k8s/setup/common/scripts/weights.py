"""Copies checkpoints and checks them against their manifests before they are used.

    weights.py verify DIRECTORY         checks every file that manifest.json lists
    weights.py store DIRECTORY PLACE    copies a checkpoint to PLACE, a path or URL, with a manifest
    weights.py fetch URL DIRECTORY      downloads a stored checkpoint and checks every file

A manifest lists sizes and SHA-256 sums; `marsray train` writes one with each model. The files that
`marsray calibrate` writes beside the weights are not checked, since they may change later.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mars_platform.checkpoint.manifest import Damaged
from mars_platform.errors import UserError
from mars_train.storage.directories import SaveFailed, SingleWriter, Storage, copy_into


def verify(directory: str) -> str:
    """Compare a directory, or the target of a link, with its manifest.

    Raises:
        UserError: the directory is missing or damaged, or has no manifest.
    """
    path = Path(directory)
    if not path.is_dir():
        raise UserError(
            f"{path} is no directory; train and promote a model, or copy one there with "
            "`weights.py store`"
        )
    storage, name = _place(str(path.resolve()))
    try:
        storage.verify(name)
    except Damaged as error:
        raise UserError(
            f"{path} does not match its manifest ({error}); copy it again from its source, or "
            "point to the previous checkpoint"
        ) from error
    return f"{path} ({path.resolve()}) matches its manifest"


def store(directory: str, place: str) -> str:
    """Copy a directory to a new path or URL, with a manifest.

    Raises:
        UserError: the directory is missing, or the place exists or cannot be written.
    """
    source = Path(directory)
    if not source.is_dir():
        raise UserError(f"{source} is no directory; name the one that holds config.json")
    storage, name = _place(place)
    if storage.file_system.exists(storage.file_path(name)):
        raise UserError(f"{place} exists already; name another place, or remove it first")
    if storage.is_local:
        Path(storage.root).mkdir(parents=True, exist_ok=True)
    try:
        storage.save(name, lambda target: copy_into(target, source), SingleWriter())
    except SaveFailed as error:
        raise UserError(f"{error}; free space there, or check the right to write") from error
    return f"{place} is stored, with its manifest"


def fetch(url: str, directory: str) -> str:
    """Download a stored checkpoint into a directory, which is complete once it exists.

    Raises:
        UserError: there is no such checkpoint, or a file did not arrive as it was stored.
    """
    target = Path(directory)
    if target.exists():  # it gets this name only after every file was checked
        return f"{target} is there already"
    storage, name = _place(url)
    if storage.is_local:
        raise UserError(f"{url} is a path; give a URL such as s3://bucket/models/name")
    target.parent.mkdir(parents=True, exist_ok=True)
    # the download is renamed to the target, which works only within one disk
    tempfile.tempdir = str(target.parent)
    try:
        storage.fetch(name).rename(target)
    except Damaged as error:
        raise UserError(f"{url}: {error}; store it again with `weights.py store`") from error
    return f"{url} is in {target} and matches its manifest"


def _place(path_or_url: str) -> tuple[Storage, str]:
    if "://" not in path_or_url:
        path = Path(path_or_url).absolute()
        return Storage(str(path.parent)), path.name
    root, _, name = path_or_url.rstrip("/").rpartition("/")
    return Storage(root), name


def main(arguments: list[str]) -> int:
    """Run a command line and return the exit status, 2 for a mistake of the user."""
    commands: dict[tuple[str, int], Callable[..., str]] = {
        ("verify", 1): verify,
        ("store", 2): store,
        ("fetch", 2): fetch,
    }
    command = commands.get((arguments[0], len(arguments) - 1)) if arguments else None
    if command is None:
        sys.stderr.write(f"{__doc__}")
        return 2
    try:
        message = command(*arguments[1:])
    except UserError as error:
        sys.stderr.write(f"weights: {error}\n")
        return 2
    sys.stdout.write(f"weights: {message}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
