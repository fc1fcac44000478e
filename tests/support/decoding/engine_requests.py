"""The one builder of engine requests for tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.request import Request
from mars_serve.engine.scheduled_row import ScheduledRow

PROMPT = (5, 9, 17, 33, 2, 40, 11)


def make_request(
    name: str = "r",
    prompt: int | Sequence[int] = PROMPT,
    max_tokens: int = 12,
    *,
    tenant: str = "",
    num_cached: int = 0,
    pages: Sequence[int] = (),
    **options: Any,
) -> Request:
    """Build a request.

    Args:
        name: id of the request.
        prompt: token ids, or the length of a random prompt that depends on the name.
        max_tokens: most output tokens.
        tenant: whose prefixes the request shares.
        num_cached: leading tokens that are in the KV cache.
        pages: pages of the KV cache that the request holds.
        options: any further fields of `DecodingOptions`.
    """
    if isinstance(prompt, int):
        source = random.Random(name)
        prompt = [source.randrange(4, 64) for _ in range(prompt)]
    request = Request(name, list(prompt), DecodingOptions(max_tokens, **options), tenant=tenant)
    request.num_cached, request.pages, request.window_pages = num_cached, list(pages), list(pages)
    return request


def make_row(
    request: Request,
    num_tokens: int | None = None,
    masks: tuple[int, ...] = (0,),
    *,
    reads_logits: bool = True,
) -> ScheduledRow:
    """Build a request's row of a step; by default it feeds all uncached tokens."""
    num_tokens = request.num_uncached if num_tokens is None else num_tokens
    return ScheduledRow(request, num_tokens, masks, reads_logits=reads_logits)


def requested_masks(request: Request, window: int) -> tuple[int, ...]:
    """Return the masks that a request's rows feed unless the engine chooses them."""
    return request.plan.masks(window, request.num_left, len(request.drafts))
