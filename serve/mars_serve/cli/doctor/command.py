"""The command ``marsray doctor``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mars_platform.cli.options import AsJson
from mars_platform.errors import UserError
from mars_serve.cli.doctor.finding import Finding, guarded
from mars_serve.measure.options import Adapter

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_LIMIT_S = 120.0
"""Seconds after which a process is ended; a cold disk may take half of that to load torch."""
_INSTALL = "install marsray and its packages again: pip install --upgrade marsray"


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
    from rich.console import Console

    console, found = Console(soft_wrap=True), list[Finding]()
    with Console(stderr=True).status("checking"):  # shown on a terminal only
        for each in findings(checkpoint, adapter, port):
            found.append(each)
            if not as_json:
                _print(console, each)
    counts = {state: sum(each.state == state for each in found) for state in _STYLES}
    if as_json:
        typer.echo(json.dumps({"counts": counts, "checks": [asdict(each) for each in found]}))
    else:
        numbers = ", ".join(f"{count} {state}" for state, count in counts.items())
        console.print(numbers, style="bold", highlight=False)
    if counts["failed"]:
        raise typer.Exit(1)


def _print(console: Console, finding: Finding) -> None:
    style, remedy = _STYLES[finding.state], f"; {finding.remedy}" if finding.remedy else ""
    console.print(f"{finding.state:<8}", style=style, end=" ")
    console.print(f"{finding.check:<14} {finding.found}{remedy}", markup=False, highlight=False)


def findings(checkpoint: Path | None, adapter: Path | None, port: int | None) -> Iterator[Finding]:
    """Run all checks, those that load libraries beside each other.

    Raises:
        UserError: an adapter is given, and no checkpoint that it belongs to.
    """
    from mars_serve.cli.doctor import machine

    if adapter is not None and checkpoint is None:
        raise UserError("--adapter: give the checkpoint that it belongs to as well")
    present = checkpoint if checkpoint is not None and checkpoint.is_dir() else None
    files = present.glob("*.safetensors") if present is not None else ()
    size = sum(file.stat().st_size for file in files if file.is_file())
    with ThreadPoolExecutor() as pool:
        children = [
            pool.submit(findings_of_child, group, present, adapter) for group in ("torch", "Ray")
        ]
        yield from guarded("versions", machine.check_versions, _INSTALL)
        yield from guarded("memory", partial(machine.check_memory, size), _INSTALL)
        yield from guarded("port", partial(machine.check_port, port), _INSTALL)
        if checkpoint is not present:
            found = f"there is no directory {checkpoint}"
            yield Finding("checkpoint", "failed", found, "name a local checkpoint directory")
        for child in children:
            yield from child.result()


def findings_of_child(group: str, model: Path | None, adapter: Path | None) -> list[Finding]:
    """Run the checks of a library in a process of their own, which loading it may end or block.

    ``group`` is the library's name, ``torch`` or ``Ray``.
    """
    command = [sys.executable, "-m", "mars_serve.cli.doctor.libraries", group]
    paths = [str(path or "") for path in (model, adapter)]
    try:  # our own module, no shell
        done = subprocess.run([*command, *paths], capture_output=True, timeout=_LIMIT_S)  # noqa: S603
    except subprocess.TimeoutExpired:
        remedy = f"run python -c 'import {group.lower()}' to see what it waits for"
        return [Finding(group, "failed", f"its checks took more than {_LIMIT_S:.0f} s", remedy)]
    found = [Finding(**json.loads(line)) for line in done.stdout.splitlines()]
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        told = f"the process that checks it ended with status {done.returncode}: {lines[-1][:200]}"
        found.append(Finding(group, "failed", told, f"install {group.lower()} again"))
    return found
