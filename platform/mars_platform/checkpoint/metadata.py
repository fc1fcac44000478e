"""Finds a checkpoint directory and reads ``mars.json``, without loading transformers.

A command that only passes a checkpoint on starts seconds earlier for it. Imports no Ray, torch or
HTTP library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mars_platform.checkpoint.references import refuse_adapter, refuse_foreign_files
from mars_platform.config import Settings, build_settings, read_json
from mars_platform.errors import UserError

MASK_TOKEN = "<|mask|>"  # noqa: S105 - a token of the vocabulary, not a secret
METADATA_FILE = "mars.json"
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_REMEDY = "copy the checkpoint's file again"


class MarsMetadata(Settings):
    """Content of ``mars.json``: data that decoding needs beyond the Hugging Face files."""

    format_version: Literal[1] = 1
    """Version of this file's layout."""
    block_size: int = Field(ge=1)
    """Block size B of the training, in tokens; also the most masks that a step may feed."""
    mask_token_id: int = Field(ge=0)
    """Id of the ``<|mask|>`` token."""
    provenance: dict[str, Any] = Field(default_factory=dict)
    """How the checkpoint was made: base model, recipe, versions."""


def locate_model(model: str) -> Path:
    """Return the directory of a model, downloading a Hugging Face hub model that is not cached.

    Args:
        model: directory or hub id.

    Raises:
        UserError: there is no such model, it is an adapter, or the hub cannot be reached and the
            model is not cached.
    """
    path = Path(model)
    if (path / "config.json").is_file():
        return path
    if path.exists():
        refuse_adapter(path)
        raise UserError(f"model: {model} holds no config.json, so it is not a model directory")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"model: there is no directory {model}; give an existing one or a hub id")
    from huggingface_hub import snapshot_download  # takes tenths of a second
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=_DOWNLOADED))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model: {model} is no local directory and cannot be had from the Hugging Face hub "
            f"({type(error).__name__}); check the name, or the network"
        ) from error


def read_metadata_of(model: str | Path) -> tuple[Path, MarsMetadata | None]:
    """Find a checkpoint, look over its files and read ``mars.json``.

    Args:
        model: directory or hub id.

    Returns:
        The directory and the metadata, which is None for a plain AR checkpoint.

    Raises:
        UserError: a file is missing or is none of the checkpoint's own, or ``mars.json`` is
            invalid.
    """
    path = locate_model(str(model))
    refuse_foreign_files(path)
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(f"model: {path} has no tokenizer; add its tokenizer.json")
    return path, read_metadata(path)


def read_metadata(path: Path) -> MarsMetadata | None:
    """Read ``mars.json`` of a checkpoint directory; None if there is none.

    Raises:
        UserError: the file is invalid.
    """
    file = path / METADATA_FILE
    if not file.is_file():
        return None
    return build_settings(read_json(file, _REMEDY), MarsMetadata, source=str(file))


def check_mask_token(path: Path, metadata: MarsMetadata, found: int | None) -> None:
    """Refuse a checkpoint whose ``mars.json`` and tokenizer disagree about the mask token.

    Args:
        path: the checkpoint directory.
        metadata: content of its ``mars.json``.
        found: id of the mask token in its tokenizer; None if that has none.

    Raises:
        UserError: the ids differ.
    """
    if found != metadata.mask_token_id:
        raise UserError(
            f"{path / METADATA_FILE}: mask_token_id is {metadata.mask_token_id}, but the tokenizer "
            f"has {MASK_TOKEN} at {found}; use one checkpoint's files"
        )
