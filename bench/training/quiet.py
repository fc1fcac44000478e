"""Gives the trainer a reporter that shows warnings only, for benches without Ray."""

from __future__ import annotations

from typing import Any

import typer

from mars_train.stage.job import Notice
from mars_train.stage.progress import Progress


class Quiet:
    """A reporter for `StageTrainer` that shows warnings only, and never asks it to stop."""

    def progress(self, progress: Progress) -> None: ...

    def say(self, text: str, *, warning: bool = False) -> None:
        if warning:
            typer.echo(text)

    def notice_due(self) -> bool:
        return False

    def notice(self) -> Notice:
        return Notice()

    def report(self, metrics: dict[str, Any]) -> None: ...
