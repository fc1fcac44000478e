"""``marsray push`` and ``marsray pull``: trained models and adapters on the Hugging Face hub."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mars_platform.errors import UserError, one_line

_DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.md"]


def push(
    directory: Annotated[Path, typer.Argument(help="Directory of a checkpoint or an adapter.")],
    repository: Annotated[str, typer.Argument(help="Repository on the hub, as OWNER/NAME.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository private.")
    ] = False,
    card_only: Annotated[
        bool, typer.Option("--card-only", help="Print the model card, and send nothing.")
    ] = False,
) -> None:
    """Upload a model or adapter to the Hugging Face hub.

    The files are compared with the manifest, and no others are sent. A README.md in the directory
    is the card; otherwise one is written from the run's own figures. Log in by `hf auth login`.
    """
    from mars_platform.checkpoint.metadata import ADAPTER_FILE
    from mars_train.run.model_card import model_card

    if not (directory / "config.json").is_file() and not (directory / ADAPTER_FILE).is_file():
        raise UserError(
            f"{directory} holds neither a checkpoint nor an adapter; name the directory that "
            "marsray train wrote"
        )
    if card_only:
        typer.echo(model_card(directory, repository), nl=False)
        return
    files = _listed_files(directory)
    from huggingface_hub import CommitOperationAdd, HfApi

    from mars_platform.checkpoint.examples import CARD_FILE

    contents: dict[str, str | bytes] = {name: str(directory / name) for name in files}
    contents.setdefault(CARD_FILE, model_card(directory, repository).encode())
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api = HfApi()
    with _told_in_words(repository):
        address = api.create_repo(repository, private=private or None, exist_ok=True)
        api.create_commit(repository, operations, commit_message="Upload by marsray")
    typer.echo(f"{len(operations)} files of {directory} are on {address}")


def pull(
    repository: Annotated[
        str, typer.Argument(help="Repository on the hub, as OWNER/NAME or OWNER/NAME@REVISION.")
    ],
    directory: Annotated[Path, typer.Argument(help="Directory to make.")],
) -> None:
    """Download a model or adapter from the Hugging Face hub.

    Its files are compared with its manifest.
    """
    if directory.exists():
        raise UserError(f"{directory} is there already; name a directory that does not exist")
    from huggingface_hub import snapshot_download

    from mars_platform.checkpoint.files import settle
    from mars_platform.checkpoint.manifest import MANIFEST

    try:
        directory.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory} cannot be made ({one_line(error)}); name another") from error
    name, _, revision = repository.partition("@")
    with tempfile.TemporaryDirectory(dir=directory.absolute().parent) as temporary:
        content = Path(temporary) / "content"
        with _told_in_words(repository):
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=_DOWNLOADED,
                local_dir=content,
            )
        shutil.rmtree(content / ".cache", ignore_errors=True)  # the hub's notes on the download
        is_checked = (content / MANIFEST).is_file()
        if is_checked:
            _verify(content)
        settle(content, directory.absolute())
    text = "its files match its manifest" if is_checked else "it has no manifest to compare with"
    typer.echo(f"{repository} is in {directory}; {text}")


def _listed_files(directory: Path) -> list[str]:
    from fsspec.implementations.local import LocalFileSystem

    from mars_platform.checkpoint.examples import CARD_FILE
    from mars_platform.checkpoint.manifest import MANIFEST, MEASURED, read_manifest
    from mars_platform.checkpoint.metadata import METADATA_FILE
    from mars_platform.data.sources import without_passwords

    _verify(directory)
    further = {name for name in MEASURED if not name.startswith(".")} | {MANIFEST, CARD_FILE}
    listed = set(read_manifest(LocalFileSystem(), str(directory)).files) - MEASURED
    names = sorted(listed | {name for name in further if (directory / name).is_file()})
    for name in {METADATA_FILE, CARD_FILE} & set(names):
        text = (directory / name).read_text(encoding="utf-8", errors="replace")
        if without_passwords(text) != text:
            problem = "it has a URL with a password, key or signature; take it out first"
            raise UserError(f"{directory / name}: {problem}")
    return names


def _verify(directory: Path) -> None:
    from fsspec.implementations.local import LocalFileSystem

    from mars_platform.checkpoint.manifest import Damaged, refuse_links_out, verify

    refuse_links_out(directory)
    try:
        verify(LocalFileSystem(), str(directory))
    except Damaged as error:
        raise UserError(
            f"{directory} is not what its manifest says ({error}); copy it again from where it came"
        ) from error


@contextmanager
def _told_in_words(repository: str) -> Iterator[None]:
    """Turn the hub's errors into one line."""
    from huggingface_hub import errors

    # of the library that the hub's client uses, in whose place others have come before
    broken: type[Exception] = vars(errors)["HTTPError"]

    try:
        yield
    except (broken, errors.HFValidationError, OSError) as error:
        raise UserError(
            f"{repository}: the Hugging Face hub does not give or take it ({one_line(error)}); "
            "check the name, the network and `hf auth login`"
        ) from error
