"""The command ``marsray doctor``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mars_platform.errors import UserError
from mars_serve.cli.options import AsJson
from mars_serve.measure.options import Adapter

if TYPE_CHECKING:
    from rich.console import Console

    from mars_serve.cli.doctor.finding import Finding

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def doctor(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory to look over as well.")
    ] = None,
    adapter: Adapter = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65_535, help="Port to serve on; by default 8000, if it is free."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the installation, this machine and a checkpoint.

    Prints a line for each check: what was found and, if something is slow or broken, the remedy.
    Works where packages are missing or broken, too. The exit status is 1 if a check failed.
    """
    import json
    from dataclasses import asdict

    from rich.console import Console

    console, errors = Console(soft_wrap=True), Console(stderr=True)
    found = list["Finding"]()
    with errors.status("checking"):  # shown on a terminal only
        for finding in findings(checkpoint, adapter, port):
            found.append(finding)
            if not as_json:
                _print(console, finding)
    counts = {state: sum(each.state == state for each in found) for state in _STYLES}
    if as_json:
        typer.echo(json.dumps({"counts": counts, "checks": [asdict(each) for each in found]}))
    else:
        numbers = ", ".join(f"{count} {state}" for state, count in counts.items())
        console.print(numbers, style="bold", highlight=False)
    if counts["failed"]:
        raise typer.Exit(1)


def findings(checkpoint: Path | None, adapter: Path | None, port: int | None) -> Iterator[Finding]:
    """Run all checks, those that load libraries beside the others.

    Raises:
        UserError: an adapter is given, and no checkpoint that it belongs to.
    """
    from mars_serve.cli.doctor import machine, packages
    from mars_serve.cli.doctor.children import running_children
    from mars_serve.cli.doctor.finding import guarded

    if adapter is not None and checkpoint is None:
        raise UserError("--adapter: give the checkpoint that it belongs to as well")
    present = checkpoint if checkpoint is not None and checkpoint.is_dir() else None
    size = None if present is None else _size(present)
    with running_children(["torch", "Ray"], present, adapter) as children:
        yield from guarded("python", packages.check_python)
        yield from guarded("packages", packages.check_packages)
        yield from guarded("memory", lambda: machine.check_memory(size))
        yield from guarded("shared memory", machine.check_shared_memory)
        yield from guarded("disk", machine.check_disk)
        yield from guarded("open files", machine.check_open_files)
        yield from guarded("temporary directory", machine.check_temporary_directory)
        yield from guarded("port", lambda: machine.check_port(port))
        if checkpoint is not None:
            yield from guarded("checkpoint", lambda: _checkpoint(checkpoint, adapter))
        for child in children:
            yield from guarded(child.group, child.findings)


def _size(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors") if file.is_file())


def _checkpoint(path: Path, adapter: Path | None) -> Iterator[Finding]:
    from mars_serve.cli.doctor.checkpoint_checks import check_checkpoint  # loads tokenizers

    return check_checkpoint(path, has_adapter=adapter is not None)


def _print(console: Console, finding: Finding) -> None:
    from rich.text import Text

    line = Text.assemble(
        (f"{finding.state:<8} ", _STYLES[finding.state]), (f"{finding.check:<20} ", "bold")
    )
    line.append(finding.found)
    if finding.remedy:
        line.append(f"; {finding.remedy}", style=_STYLES[finding.state])
    console.print(line, highlight=False)
