"""Options that several of the server's commands share."""

from __future__ import annotations

import os
from glob import escape as glob_escaped
from glob import glob
from pathlib import Path
from typing import Annotated, Literal

import typer

from mars_platform.checkpoint.number_type import NumberType

MAX_SEED = 2**63 - 1


def complete_directories(incomplete: str) -> list[str]:
    """Return the directories that a word in the shell may become."""
    found = glob(f"{glob_escaped(os.path.expanduser(incomplete))}*/")  # noqa: PTH111, PTH207
    return sorted(each.rstrip("/") for each in found)


Model = Annotated[
    str,
    typer.Argument(help="Checkpoint directory or hub id.", autocompletion=complete_directories),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        help="Directory of an adapter of the checkpoint, by marsray train; it acts at masks only.",
        autocompletion=complete_directories,
    ),
]
Data = Annotated[
    list[Path], typer.Option(help="Conversations in JSONL or Parquet. May be repeated.")
]
MaxItems = Annotated[
    int | None,
    typer.Option(min=1, help="Largest number of conversations; the first ones are used."),
]
MaxTokens = Annotated[
    int, typer.Option(min=1, help="Largest number of output tokens, if the context has room.")
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature in [0, 2]; 0 is greedy.")]
TopP = Annotated[
    float, typer.Option(help="Probability of the likeliest tokens to sample from, in (0, 1].")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Device to run on; auto is cuda if available."),
]
Dtype = Annotated[
    NumberType | None,
    typer.Option(help="Type of the weights; by default the one that the model is stored in."),
]
KeyEnv = Annotated[
    str | None, typer.Option(help="Environment variable that holds the server's key.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def let_idle_threads_sleep() -> None:
    """Make CPU kernels that are loaded later let their idle threads sleep.

    Threads that spin while idle slow a run down many times if other processes need their cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
