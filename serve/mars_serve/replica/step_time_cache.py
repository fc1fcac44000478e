"""Keeps measured step times in a file of the user's, so that the next start need not measure them.

A file is used for nothing but times, and only for the model, hardware, settings and versions that
it was written for; the engine still checks that they hold. Whatever is wrong with a file or with
the directory costs a measurement and a line in the log, never the start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import torch
import transformers
from platformdirs import user_cache_path
from pydantic import Field, model_validator

from mars_platform import __version__
from mars_platform.checkpoint.files import write_whole
from mars_platform.config import Settings, build_settings, read_json
from mars_platform.errors import UserError
from mars_serve.config.hardware import hardware_name
from mars_serve.config.settings import ModelSettings
from mars_serve.engine.adaptive.step_times import StepTimes
from mars_serve.engine.engine import Engine

_REMEDY = "delete it"
_KEY_LENGTH = 32
_NOT_IN_KEY = {"cache_step_times", "max_requests", "step_timeout_s"}
"""Settings of an engine that do not change its steps."""

_log = logging.getLogger("mars_serve.engine")

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class StepTimesFile(Settings):
    """Content of a file with step times."""

    format_version: Literal[2] = 2
    key: dict[str, str]
    """The engine and machine that were measured, as `describe` gives them."""
    positions: list[int] = Field(min_length=1)
    cached_tokens: list[int] = Field(min_length=1)
    seconds: list[list[_Seconds]]
    mask_s: float = Field(ge=0, allow_inf_nan=False)
    """Seconds that a step takes longer as soon as it feeds a mask."""

    @model_validator(mode="after")
    def _consistent(self) -> StepTimesFile:
        for grid in (self.positions, self.cached_tokens):
            if any(a >= b for a, b in pairwise(grid)):
                raise ValueError("positions and cached_tokens must rise")
        lengths = [len(line) for line in self.seconds]
        if lengths != [len(self.cached_tokens)] * len(self.positions):
            raise ValueError("seconds must have a line for each number of positions")
        return self

    def times(self) -> StepTimes:
        """Return the times as the engine takes them."""
        lines = tuple(tuple(line) for line in self.seconds)
        return StepTimes(tuple(self.positions), tuple(self.cached_tokens), lines, self.mask_s)


@dataclass(frozen=True)
class StepTimeCache:
    """The file for one engine on this machine."""

    directory: Path
    key: dict[str, str]

    @property
    def name(self) -> str:
        """Name of the file in the directory."""
        text = json.dumps(self.key, sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]}.json"

    def read(self) -> StepTimes | None:
        """Return the times in the file; None if there is none that can be used."""
        file = self.directory / self.name
        try:
            if not file.exists():
                return None
            self._refuse_foreign()
            content = build_settings(read_json(file, _REMEDY), StepTimesFile, source=str(file))
        except (UserError, OSError) as error:
            _log.warning("step times are measured anew: %s", error)
            return None
        if content.key != self.key:
            _log.warning("step times are measured anew: %s is of another engine", file)
            return None
        return content.times()

    def write(self, times: StepTimes) -> None:
        """Write times into the file, for the next start."""
        content = StepTimesFile(
            key=self.key,
            positions=list(times.positions),
            cached_tokens=list(times.cached_tokens),
            seconds=[list(line) for line in times.seconds],
            mask_s=times.mask_s,
        )
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_foreign()
            write_whole(self.directory, self.name, content.model_dump_json())
        except (UserError, OSError) as error:
            _log.warning("step times are not kept for the next start: %s", error)

    def _refuse_foreign(self) -> None:
        """Refuse a directory that others own or can write to.

        Raises:
            UserError: somebody else can write to the directory.
        """
        found = self.directory.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise UserError(f"{self.directory} can be written by others; chmod 700 it")


def step_time_cache(settings: ModelSettings, engine: Engine) -> StepTimeCache:
    """Return the cache of an engine's step times, in the user's cache directory."""
    return StepTimeCache(user_cache_path("marsray") / "step-times", describe(settings, engine))


def describe(settings: ModelSettings, engine: Engine) -> dict[str, str]:
    """Return what an engine's step times depend on."""
    config = engine.checkpoint.config.to_json_string(use_diff=False)
    return {
        "weights": engine.checkpoint.fingerprint,
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "window": str(engine.window),
        "max_length": str(engine.max_length),
        "dtype": str(engine.dtype),
        "hardware": hardware_name("cuda" if settings.num_gpus else "cpu"),
        "engine": settings.engine.model_dump_json(exclude=_NOT_IN_KEY),
        "draft": settings.draft.model_dump_json() if settings.draft else "",
        "marsray": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def warm_up(settings: ModelSettings, engine: Engine) -> StepTimes:
    """Warm an engine up, with the step times of an earlier start if they still hold.

    Args:
        settings: the model's settings.
        engine: its engine, which has run no step.

    Returns:
        The times to which its windows adapt.
    """
    if not settings.engine.cache_step_times or settings.rehearsal is not None:
        return engine.warm_up(_log_progress)
    cache = step_time_cache(settings, engine)
    known = cache.read()
    times = engine.warm_up(_log_progress, known)
    if times is known:
        _log.info("warm-up: step times of an earlier start hold (%s)", cache.directory / cache.name)
    else:
        cache.write(times)
    return times


def _log_progress(done: int, total: int) -> None:
    if done == total or done % 16 == 0:
        _log.info("warm-up: %d of %d steps", done, total)
