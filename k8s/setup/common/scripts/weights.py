"""Checks a checkpoint against its manifest before anything is served or trained from it.

    weights.py verify DIRECTORY          every file of manifest.json is there, and is what it says
    weights.py store DIRECTORY PLACE     copies it to PLACE, a path or URL, with a manifest
    weights.py fetch URL DIRECTORY       downloads what was stored, and checks each file

Knows no model: a manifest holds sizes and SHA-256 sums. `marsray train` writes one with each model.
What `marsray calibrate` writes beside the weights may change after the manifest was made.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mars_platform.errors import UserError
from mars_train.storage.directories import Alone, Damaged, SaveFailed, Storage, copy_into


def verify(directory: str) -> str:
    """Compare a directory, or what a link points to, with its manifest.

    Raises:
        UserError: it is missing or damaged, or has no manifest.
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
            f"{path} is not what its manifest says ({error}); copy it again from where it came, or "
            "point to the checkpoint before it"
        ) from error
    return f"{path} ({path.resolve()}) is what its manifest says"


def store(directory: str, place: str) -> str:
    """Copy a directory to a path or URL where there is nothing yet.

    Raises:
        UserError: there is no such directory, the place is taken, or it cannot be written.
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
        storage.save(name, lambda target: copy_into(target, source), Alone())
    except SaveFailed as error:
        raise UserError(f"{error}; make room, or check the rights to write there") from error
    return f"{place} is stored, with its manifest"


def fetch(url: str, directory: str) -> str:
    """Download into a directory that is complete or absent.

    Raises:
        UserError: it is not there, or did not arrive as it was stored.
    """
    target = Path(directory)
    if target.exists():  # it got its name only after it was checked
        return f"{target} is there already"
    storage, name = _place(url)
    if storage.is_local:
        raise UserError(f"{url} is a path; give a URL such as s3://bucket/models/name")
    target.parent.mkdir(parents=True, exist_ok=True)
    # what is downloaded is then renamed, for which it has to be on the same disk
    tempfile.tempdir = str(target.parent)
    try:
        storage.fetch(name).rename(target)
    except Damaged as error:
        raise UserError(f"{url}: {error}; store it again with `weights.py store`") from error
    return f"{url} is in {target}, and is what its manifest says"


def _place(path_or_url: str) -> tuple[Storage, str]:
    if "://" not in path_or_url:
        path = Path(path_or_url).absolute()
        return Storage(str(path.parent)), path.name
    root, _, name = path_or_url.rstrip("/").rpartition("/")
    return Storage(root), name


def main(arguments: list[str]) -> int:
    """Run one of the three; returns the exit status, 2 for a mistake of the user's."""
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
