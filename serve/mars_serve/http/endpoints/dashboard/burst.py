"""``POST /admin/burst`` sends a bounded load to a model that is paced, to watch how it scales.

The load goes through the application as the caller's own requests: with the caller's key, through
all checks and limits, and into all metrics. The authentication middleware has already checked that
the caller is an administrator.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Scope

from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.schema import Shape, errors_described
from mars_serve.config.served import ServedModel
from mars_serve.http.endpoints.information import find_model

_MAX_AT_ONCE = 512
"""Number of a burst's requests that have not ended, from which on none is sent."""
_PASSED_ON = frozenset({b"host", b"authorization", b"origin"})
"""Headers of the order that its requests are sent with."""
_PATH = "/v1/chat/completions"


class BurstOrder(BaseModel):
    """An order to send a burst."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: str
    """Model to send it to; it must be paced, with ``rehearsal`` in its settings."""
    requests_per_s: float = Field(gt=0, le=100, allow_inf_nan=False)
    """Requests sent each second."""
    seconds: float = Field(default=30, ge=1, le=60, allow_inf_nan=False)
    """Seconds for which they are sent."""
    max_tokens: int = Field(default=96, ge=1, le=1024)
    """Largest number of output tokens of each request."""


class BurstBegun(Shape):
    """A burst that has begun."""

    model: str
    requests_per_s: float
    seconds: float


def burst_router(models: Mapping[str, ServedModel]) -> APIRouter:
    """Return the router of the endpoint that sends a burst."""
    router = APIRouter(responses=errors_described())
    running = set[asyncio.Task[None]]()

    @router.post("/admin/burst", status_code=202, responses={202: {"model": BurstBegun}})
    async def send_burst(body: BurstOrder, request: Request) -> JSONResponse:
        """Send a load to a paced model, one burst at a time; the response comes at its begin."""
        model = find_model(models, body.model)
        if model.settings.rehearsal is None:
            raise invalid_value(
                "model",
                f"{body.model!r} is not paced, and a burst would slow its users down; give it "
                "rehearsal in the server's settings, or send load with marsray bench load",
            )
        other = await model.backend.begin_burst(body.requests_per_s, body.seconds)
        if other is not None:
            left_s = max(other[1].ends_s - time.time(), 1.0)
            raise ApiError(
                409,
                f"a burst to {other[0]!r} runs for {left_s:.0f} s more; wait for its end",
                code="burst_running",
                headers={"Retry-After": f"{left_s:.0f}"},
            )
        task = asyncio.create_task(_send_all(request.app, request.scope, body))
        running.add(task)
        task.add_done_callback(running.discard)
        fields = ("model", "requests_per_s", "seconds")
        return JSONResponse({name: getattr(body, name) for name in fields}, status_code=202)

    return router


async def _send_all(app: ASGIApp, order: Scope, body: BurstOrder) -> None:
    """Send a burst's requests at even intervals, and wait until they have ended."""
    loop, random = asyncio.get_running_loop(), Random()
    begun_s, sent = loop.time(), set[asyncio.Task[None]]()
    for number in range(max(int(body.requests_per_s * body.seconds), 1)):
        await asyncio.sleep(max(begun_s + number / body.requests_per_s - loop.time(), 0.0))
        if loop.time() - begun_s > body.seconds:
            break
        if len(sent) < _MAX_AT_ONCE:
            task = asyncio.create_task(_send(app, order, _content(body, random)))
            sent.add(task)
            task.add_done_callback(sent.discard)
    await asyncio.gather(*sent, return_exceptions=True)


def _content(body: BurstOrder, random: Random) -> bytes:
    """Return a request with a prompt of its own, so that no prefix is cached."""
    steps = " ".join(f"{random.choice('+-')}{random.randint(1, 5)}" for _ in range(8))
    thing = random.choice(("hats", "shells", "books", "coins", "stamps"))
    prompt = f"Start with {random.randint(50, 99)} {thing}. Steps: {steps}"
    messages = [{"role": "user", "content": prompt}]
    return json.dumps(
        {"model": body.model, "messages": messages, "max_tokens": body.max_tokens, "stream": True}
    ).encode()


async def _send(app: ASGIApp, order: Scope, content: bytes) -> None:
    """Send one request through the application; its response is counted there and dropped."""
    headers = [pair for pair in order["headers"] if pair[0] in _PASSED_ON]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    copied = ("asgi", "http_version", "scheme", "client", "server", "root_path")
    root = order.get("root_path", "")
    scope: dict[str, Any] = {
        **{name: order[name] for name in copied if name in order},
        "type": "http",
        "method": "POST",
        "path": root + _PATH,
        "raw_path": (root + _PATH).encode(),
        "query_string": b"",
        "headers": headers,
    }
    has_ended, is_read = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": content, "more_body": False}
        await has_ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            has_ended.set()

    try:
        await app(scope, receive, send)
    finally:
        has_ended.set()
