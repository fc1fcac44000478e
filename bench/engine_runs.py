"""Decodes requests with an engine in this process and measures the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mars_platform.checkpoint.directory import Checkpoint
from mars_serve.engine.drafting.drafter import Drafter
from mars_serve.engine.engine import Engine
from mars_serve.engine.request import Request
from mars_serve.engine.settings import EngineSettings


class EngineRun(NamedTuple):
    """Result of decoding some requests from beginning to end."""

    outputs: list[list[int]]
    """Output tokens of each request."""
    num_passes: int
    """Forward passes of the target model, counted per request."""
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Number of output tokens of all requests."""
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_forward(self) -> float:
        """Output tokens per forward pass; the passes that read prompts are counted too."""
        return self.num_tokens / self.num_passes


def settings_for(checkpoint: Checkpoint, batch: int) -> EngineSettings:
    """Return settings with room for ``batch`` requests of any length, without prefix caching."""
    page_size = EngineSettings().page_size_on("cpu")
    num_pages = batch * -(-checkpoint.max_length // page_size)
    return EngineSettings(max_num_seqs=batch, num_pages=num_pages, enable_prefix_caching=False)


def warm_engine(
    checkpoint: Checkpoint,
    settings: EngineSettings,
    drafter: Drafter | None = None,
    dtype: torch.dtype = torch.float32,
) -> Engine:
    """Return an engine on the CPU that is warmed up."""
    engine = Engine(checkpoint, settings, drafter=drafter, dtype=dtype)
    engine.warm_up()
    return engine


def decode(engine: Engine, requests: Sequence[Request]) -> EngineRun:
    """Add all requests to the engine at once and step it until they are finished."""
    num_passes, begin = 0, time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        num_passes += len(engine.step())
    seconds = time.perf_counter() - begin
    return EngineRun([each.tokens[each.num_prompt :] for each in requests], num_passes, seconds)
