"""Runs engines in tests, with the plain decoder and the plain attention to compare them with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from mars_platform.checkpoint.directory import SpecialTokens
from mars_platform.method import reference
from mars_platform.method.mode import Mode
from mars_platform.mixing.probe import record
from mars_platform.mixing.specs import AttentionSpec
from mars_serve.engine.attention.interface import group_layers
from mars_serve.engine.attention.mixed import MixedPagedAttention
from mars_serve.engine.attention.paged import PagedAttention
from mars_serve.engine.attention.plan import Tiling
from mars_serve.engine.engine import Engine
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

Models = Callable[[str], PreTrainedModel]
Engines = Callable[..., Engine]
Outputs = dict[str, list[StepOutput]]
Passes = dict[str, list[list[int]]]


def run(
    engine: Engine,
    requests: Iterable[Request],
    *,
    at_once: int | None = None,
    checks_each_step: bool = True,
) -> Outputs:
    """Run requests to their end, with at most ``at_once`` of them in the engine at a time.

    The pages are checked at the end and, unless thousands of waiting requests make that slow, in
    each step; all must be free afterwards.
    """
    queue, outputs = deque(requests), Outputs()
    while queue or engine.has_work:
        while queue and (at_once is None or engine.status().num_requests < at_once):
            request = queue.popleft()
            outputs[request.id] = []
            engine.add(request)
        for output in engine.step():
            outputs[output.request_id].append(output)
        if checks_each_step:
            engine.check_integrity()
    engine.check_integrity()
    assert engine.status().num_free_pages == engine.num_pages
    return outputs


def poison_windows(engine: Engine) -> None:
    """Put NaN into the pages of windows that were given back and that no request may find."""
    windows = engine._memory.windows
    if windows is None:
        return
    for backend in getattr(engine.attention, "backends", [engine.attention]):
        if backend._layers.is_bounded:
            for part in (backend.keys, backend.values):
                part[:, windows.pool._free] = torch.nan


def passes_of(outputs: Outputs) -> Passes:
    """Return the tokens of each forward pass, by request id."""
    return {name: [output.tokens for output in each] for name, each in outputs.items()}


def prompt_of(request: Request) -> list[int]:
    return request.tokens[: request.num_prompt]


def output_of(request: Request) -> list[int]:
    return request.tokens[request.num_prompt :]


def oracle(
    model: PreTrainedModel,
    request: Request,
    special: SpecialTokens,
    *,
    num_masks: int = 4,
    mask: int = 3,
) -> list[list[int]]:
    """Return the passes of the plain decoder, with the request's own τ."""
    options = request.options
    return reference.decode(
        model,
        prompt_of(request),
        special,
        max_tokens=options.max_tokens,
        threshold=options.threshold if options.mode is Mode.THRESHOLD else 1.0,
        num_masks=num_masks,
        mask_token_id=mask,
    ).passes


def paged_attention(
    model: PreTrainedModel,
    specs: Sequence[AttentionSpec] | None = None,
    _settings: object = None,
    *,
    page_size: int,
    num_pages: int,
    num_window_pages: int | None = None,
    tiling: Tiling | None = None,
) -> Any:
    """Return attention that reads pages in place, on a CPU by the kernel's twin."""
    ids = torch.ones(1, 4, dtype=torch.long, device=model.device)
    specs = specs or record(model, ids).attention
    groups, places = group_layers(specs)
    options: dict[str, Any] = {"page_size": page_size, "tiling": tiling}
    options |= {"dtype": model.dtype, "device": model.device}
    num_window_pages = num_pages if num_window_pages is None else num_window_pages
    counts = [num_window_pages if group.is_bounded else num_pages for group in groups]
    backends = [
        PagedAttention(group, num_pages=count, **options)
        for group, count in zip(groups, counts, strict=True)
    ]
    if all(place == (0, layer, True) for layer, place in places.items()):
        return backends[0]
    return MixedPagedAttention(backends, places)
