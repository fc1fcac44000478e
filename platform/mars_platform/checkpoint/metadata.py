"""Finds a checkpoint directory and reads ``mars.json``, without loading transformers.

A command that only passes a checkpoint on starts seconds earlier for it. Directories whose own
files lead a loader to files elsewhere are refused: transformers joins the names in a checkpoint's
JSON to its directory without looking at them, and an adapter names another model altogether.
Imports no Ray, torch or HTTP library.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from fsspec.implementations.local import LocalFileSystem
from pydantic import Field

from mars_platform.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    own_files,
    plain_name,
    read_manifest,
    refuse_links_out,
    refuse_unlisted,
)
from mars_platform.config import Settings, build_settings, read_json
from mars_platform.errors import UserError

MASK_TOKEN = "<|mask|>"  # noqa: S105 - a token of the vocabulary, not a secret
METADATA_FILE = "mars.json"
CHAT_TEMPLATE_FILE = "chat_template.json"
"""Place of the chat template in older multimodal checkpoints, which only processors read."""
ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
DRAFT_HEAD_FILE = "draft_head/weights.safetensors"
"""Place of a draft head's weights. Other servers take all weights that lie directly in a
checkpoint's directory for the model's own."""
_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_REMEDY = "copy the checkpoint's file again"


class DraftHeadSettings(Settings):
    """Low-rank weights by which a mask's draft depends on the token before it (a draft head)."""

    rank: int = Field(default=64, ge=1, le=4096)
    """Rank of what is added to the logits of masks."""
    kind: Literal["static", "gated"] = "gated"
    """static depends on the token before alone; gated also on the mask's hidden state."""


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
    draft_head: DraftHeadSettings | None = Field(
        default=None,
        exclude_if=lambda value: value is None,  # older versions refuse the key
    )
    """Settings of the weights in ``draft_head/weights.safetensors``; left out if there are none."""


def locate_model(model: str) -> Path:
    """Return the directory of a model, downloading a Hugging Face hub model that is not cached.

    ``model`` is a directory, or a hub id that may end in a branch, tag or commit after an ``@``.

    Raises:
        UserError: there is no such model, it is an adapter, it has links to files elsewhere, or the
            hub cannot be reached and the model is not cached.
    """
    path = Path(model)
    if not (path / "config.json").is_file():
        path = _download(model, _DOWNLOADED)
    refuse_links_out(path)
    return path


def pin_model(model: str) -> str:
    """Return a path as `pin_path` does, or a hub id with the commit that it means now.

    Raises:
        UserError: the hub cannot be reached and the model is not cached.
    """
    if Path(model).exists() or _is_path(model):
        return pin_path(model)
    return f"{model.partition('@')[0]}@{_download(model, ['config.json']).name}"


def pin_path(path: str) -> str:
    """Return a path with all links resolved; one that does not exist here stays as it is."""
    return os.path.realpath(path) if Path(path).exists() else path


def _is_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") != 1


def _download(model: str, patterns: list[str]) -> Path:
    path = Path(model)
    if path.exists():
        refuse_adapter(path)
        raise UserError(f"model: {model} holds no config.json, so it is not a model directory")
    if _is_path(model):
        raise UserError(f"model: there is no directory {model}; give an existing one or a hub id")
    from huggingface_hub import snapshot_download  # takes tenths of a second
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    name, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model: {model} is no local directory and cannot be had from the Hugging Face hub "
            f"({type(error).__name__}); check the name, or the network"
        ) from error


def read_metadata_of(model: str | Path) -> tuple[Path, MarsMetadata | None]:
    """Return the directory of a checkpoint, whose files are looked over, and its ``mars.json``.

    ``model`` is a directory or hub id. The metadata is None for a plain AR checkpoint.

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
    """Read ``mars.json`` of a checkpoint directory; None if there is none."""
    file = path / METADATA_FILE
    if not file.is_file():
        return None
    return build_settings(read_json(file, _REMEDY), MarsMetadata, source=str(file))


def check_mask_token(path: Path, metadata: MarsMetadata, found: int | None) -> None:
    """Refuse a checkpoint whose tokenizer has another mask token than ``mars.json``, or none.

    ``found`` is the id of the mask token in the tokenizer, None if there is none.
    """
    if found != metadata.mask_token_id:
        raise UserError(
            f"{path / METADATA_FILE}: mask_token_id is {metadata.mask_token_id}, but the tokenizer "
            f"has {MASK_TOKEN} at {found}; use one checkpoint's files"
        )


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
    """Refuse an adapter where a whole model is needed."""
    if not (path / ADAPTER_FILE).exists():
        return
    remedy = "merge the adapter into its model's weights and give the result"
    if (path / METADATA_FILE).is_file():
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
        refuse_unlisted(manifest, own_files(path))
    except Damaged as error:
        raise UserError(
            f"model: {path}: {error}; remove the file, or, if it belongs there, delete {MANIFEST}: "
            "marsray promote writes a new one"
        ) from error
