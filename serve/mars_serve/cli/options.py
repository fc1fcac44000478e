"""Defines the options of ``marsray generate`` and ``marsray serve``.

Imports no Ray, torch or HTTP library.
"""

import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from mars_platform.config import Settings
from mars_platform.method.mode import Mode
from mars_serve.measure.options import MAX_SEED, Adapter, Model, Temperature, TopP


class GenerateOptions(Settings):
    """Options of ``marsray generate``."""

    model: Model
    prompt: str
    """Prompt to complete."""
    adapter: Adapter = None
    mode: Mode | None = None
    """Decoding mode; by default threshold with --threshold, else exact."""
    threshold: float | None = Field(default=None, gt=0, le=1)
    """Confidence threshold in (0, 1]; 0.95 in mode threshold."""
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Sampling seed; by default random."""
    stop: tuple[str, ...] = ()
    """End the output before this string. May be repeated."""
    json_schema: Path | None = None
    """File with a JSON schema that the output must satisfy."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of output tokens; by default 256 if the context has room."""
    raw: bool = False
    """Continue the prompt without a chat template."""


class ServeOptions(Settings):
    """Options of ``marsray serve``."""

    config: Annotated[Path | None, typer.Argument()] = None
    """YAML file with the settings."""
    models: Annotated[tuple[str, ...], typer.Option("--model")] = ()
    """Checkpoint directory or hub id, or NAME=DIR. May be repeated."""
    adapters: Annotated[tuple[str, ...], typer.Option("--adapter")] = ()
    """Directory of an adapter of the model, or NAME=DIR where there are several models."""
    host: str | None = None
    """Address to listen on."""
    port: int | None = None
    """Port to listen on."""
    replicas: int | None = Field(default=None, ge=1)
    """Number of replicas of each model."""
    insecure: bool = False
    """Allow other addresses than loopback without keys."""
    overrides: Annotated[tuple[str, ...], typer.Option("--set")] = ()
    """Override a setting: key.sub=value. May be repeated."""


def let_idle_threads_sleep() -> None:
    """Make CPU kernels that are loaded later let their idle threads sleep.

    Threads that spin while idle slow a run down many times if other processes need their cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
