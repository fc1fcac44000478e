"""Checks the files of a checkpoint without loading it. Imports no Ray, torch or HTTP library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from mars_platform.checkpoint.inspection import (
    check_chat_template,
    check_weights,
    read_mask_token_id,
)
from mars_platform.checkpoint.manifest import MANIFEST, MEASURED, Damaged, check_size, read_manifest
from mars_platform.checkpoint.metadata import (
    MASK_TOKEN,
    METADATA_FILE,
    MarsMetadata,
    check_mask_token,
    read_metadata,
)
from mars_platform.checkpoint.number_type import stored_dtype
from mars_platform.checkpoint.references import refuse_foreign_files
from mars_platform.config import read_json
from mars_platform.errors import UserError
from mars_serve.cli.doctor.finding import Finding, failed, ok, warning

_REMEDY = "copy the checkpoint's file again"
_INDEX = "model.safetensors.index.json"
_NO_TEMPLATE = "add the model's as chat_template.jinja, or ask /v1/completions only"


def check_checkpoint(path: Path, *, has_adapter: bool = False) -> Iterator[Finding]:
    """Check each of a checkpoint's files, whatever the others are like.

    Args:
        path: the directory.
        has_adapter: whether an adapter's ``mars.json`` holds in place of the checkpoint's.
    """
    if not path.is_dir():
        yield failed(
            "checkpoint", f"there is no directory {path}", "name a local checkpoint directory"
        )
        return
    for name, look in _LOOKS.items():
        if has_adapter and name == METADATA_FILE:
            continue
        yield from _refused(name, look, path)


def weights_bytes(path: Path) -> int:
    """Return the size of a checkpoint's weights in bytes; 0 if there are none."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors") if file.is_file())


def _refused(name: str, look: Callable[[Path], Iterator[Finding]], path: Path) -> Iterator[Finding]:
    """Yield what a look at a checkpoint finds, and its refusal, if any, as a failure."""
    try:
        yield from look(path)
    except UserError as error:
        found, _, remedy = str(error).removeprefix("model: ").rpartition("; ")
        yield failed(name, found or remedy, remedy if found else _REMEDY)


def _config(path: Path) -> Iterator[Finding]:
    refuse_foreign_files(path)
    config = read_json(path / "config.json", _REMEDY)
    context = config.get("max_position_embeddings")
    yield ok("config", f"{config.get('model_type')}, context of {context} tokens")


def _weights(path: Path) -> Iterator[Finding]:
    found = check_weights(path)
    index = path / _INDEX
    if index.is_file() and "model.safetensors" not in found:
        named = read_json(index, _REMEDY)["weight_map"]
        lost = [name for name, file in named.items() if name not in found[file]]
        if lost:
            raise UserError(
                f"{index} names {len(lost)} tensors that its files lack, such as {lost[0]}; copy "
                "all of the checkpoint's files from one place"
            )
    size = weights_bytes(path)
    num = sum(map(len, found.values()))
    yield ok("weights", f"{num} tensors in {len(found)} files, {size / 2**20:,.1f} MiB")


def _manifest(path: Path) -> Iterator[Finding]:
    """Compare sizes with the manifest; the sums of large files would take minutes."""
    from fsspec.implementations.local import LocalFileSystem

    if not (path / MANIFEST).is_file():
        yield ok("manifest", "there is none; marsray promote writes one")
        return
    system = LocalFileSystem()
    try:
        files = read_manifest(system, str(path)).files
        for name, entry in files.items():
            if name not in MEASURED:
                if not (path / name).exists():
                    raise Damaged(f"{name} is missing")
                check_size(system, str(path / name), name, entry)
    except Damaged as error:
        yield failed("manifest", str(error), "copy the checkpoint again from where it came")
    else:
        yield ok("manifest", f"{len(files)} files have the sizes that it lists")


def _number_type(path: Path) -> Iterator[Finding]:
    yield ok("number type", stored_dtype(path))


def _tokenizer(path: Path) -> Iterator[Finding]:
    if not (path / "tokenizer.json").is_file():
        yield warning(
            "tokenizer",
            "there is no tokenizer.json, and transformers has to make one of other files",
            "save the tokenizer with transformers' save_pretrained",
        )
        return
    found = read_mask_token_id(path)
    yield ok("tokenizer", f"{MASK_TOKEN} is token {found}" if found else f"without {MASK_TOKEN}")


def _mars(path: Path) -> Iterator[Finding]:
    metadata = read_metadata(path)
    if metadata is None:
        yield warning(
            METADATA_FILE,
            "there is none: a plain AR model, which decodes one token a pass",
            "train it with a stage of objective mars",
        )
        return
    if (path / "tokenizer.json").is_file():
        check_mask_token(path, metadata, read_mask_token_id(path))
    _refuse_mask_beyond_embedding(path, metadata)
    yield ok(
        METADATA_FILE,
        f"block size {metadata.block_size}, mask token {metadata.mask_token_id}",
    )


def _refuse_mask_beyond_embedding(path: Path, metadata: MarsMetadata) -> None:
    rows = read_json(path / "config.json", _REMEDY).get("vocab_size")
    if isinstance(rows, int) and metadata.mask_token_id >= rows:
        raise UserError(
            f"{path / METADATA_FILE}: mask_token_id is {metadata.mask_token_id}, but the model has "
            f"{rows} embeddings; use one checkpoint's files"
        )


def _chat_template(path: Path) -> Iterator[Finding]:
    try:
        check_chat_template(path)
    except UserError as error:
        found = str(error).removeprefix("model: ").rpartition("; ")[0]
        yield warning("chat template", found, _NO_TEMPLATE)
    else:
        yield ok("chat template", "there is one")


_LOOKS = {
    "config": _config,
    "weights": _weights,
    "manifest": _manifest,
    "number type": _number_type,
    "tokenizer": _tokenizer,
    METADATA_FILE: _mars,
    "chat template": _chat_template,
}
"""Function that looks at a part of a checkpoint, by the part's name."""
