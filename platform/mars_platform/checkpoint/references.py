"""Refuses checkpoint directories whose own files lead a loader to files elsewhere.

Transformers joins the names in a checkpoint's JSON to its directory without looking at them, and a
checkpoint of an adapter names another model altogether. Imports no Ray, torch or HTTP library.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from mars_platform.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    local_files,
    plain_name,
    read_manifest,
    refuse_unlisted,
)
from mars_platform.config import read_json
from mars_platform.errors import UserError

_REMEDY = "copy the checkpoint's file again"
ADAPTER_FILE = "adapter_config.json"
_METADATA = "mars.json"  # without it, an adapter acts at all positions


def refuse_foreign_files(path: Path) -> None:
    """Refuse a checkpoint that would be read from files that are not its own.

    Nothing is summed here, so that this takes no longer than reading the names. A directory without
    a manifest, such as one from the Hugging Face hub, may hold any files.

    Raises:
        UserError: a file names one elsewhere, the manifest does not list a file, or the checkpoint
            is an adapter of another model; the message names the file and the remedy.
    """
    refuse_adapter(path)
    for source, name in _named(path):
        try:
            _refuse_hidden(plain_name(name))
        except ValueError as error:
            raise UserError(f"{source}: {error}; {_REMEDY}") from error
    _refuse_unlisted_files(path)


def refuse_adapter(path: Path) -> None:
    """Refuse an adapter where a whole model is needed.

    Raises:
        UserError: the directory holds an adapter; the message says how to use it.
    """
    if not (path / ADAPTER_FILE).exists():
        return
    remedy = "merge the adapter into its model's weights and give the result"
    if (path / _METADATA).is_file():
        remedy = "give its model here, and the adapter beside it: --adapter, or adapter in a file"
    raise UserError(
        f"model: {path / ADAPTER_FILE} makes this an adapter of another model, not a model; "
        f"{remedy}"
    )


def _named(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the names that transformers takes from a directory's JSON files, with their source."""
    for index in sorted(path.glob("*.index.json")):
        named = read_json(index, _REMEDY).get("weight_map")
        for name in sorted(set(_texts(index, "weight_map", named))):
            yield index, name
    file = path / "tokenizer_config.json"
    if file.is_file():
        named = read_json(file, _REMEDY).get("fast_tokenizer_files", [])
        for name in _texts(file, "fast_tokenizer_files", named):
            yield file, name


def _texts(file: Path, key: str, content: Any) -> list[str]:
    values = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{file}: {key} has to name files; {_REMEDY}")
    return values


def _refuse_hidden(name: str) -> None:
    if any(part.startswith(".") for part in PurePosixPath(name).parts):
        raise ValueError(f"the file name {name[:80]!r} is that of a hidden file")


def _refuse_unlisted_files(path: Path) -> None:
    try:
        manifest = read_manifest(LocalFileSystem(), str(path))
    except Damaged:  # none, or another program's, which promises nothing about marsray's files
        return
    try:
        refuse_unlisted(manifest, local_files(path))
    except Damaged as error:
        raise UserError(
            f"model: {path}: {error}; remove the file, or, if it belongs there, delete {MANIFEST}: "
            "marsray promote writes a new one"
        ) from error
