"""``/admin/dashboard/events``: the picture of every model that the dashboard shows, as a stream.

The first event holds an hour of history, or what was added since a time that the client names;
further ones come once a second. The governor makes the picture, so that all ingress replicas give
the same one, and each of them asks for it once a second for all its watchers together.

The authentication middleware has already checked that the caller is an administrator.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response

from mars_platform import __version__
from mars_serve.api.errors import ApiError
from mars_serve.api.schema import EVENT_STREAM, errors_described
from mars_serve.config.served import Picture, ServedModel
from mars_serve.http.batches.runner import BatchRunner
from mars_serve.http.endpoints.event_stream import EventStream

_PERIOD_S = 1.0
"""Seconds between two events."""
_ANSWER_S = 3.0
"""Longest wait in seconds for the governor's picture."""
_MAX_WATCHERS = 64
"""Number of streams at once, for each ingress replica."""
_MAX_BEHIND = 20
"""Number of events that a watcher may be behind; one that is slower is cut off, and goes on where
it was with a new request."""
_MAX_STREAM_S = 8.0
"""Seconds after which a stream ends. A server that stops waits for its streams, and a page that
goes on with a new request loses nothing."""

_log = logging.getLogger(__name__)


class Watchers:
    """The watchers of one ingress replica, and the pictures that they get."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        batches: BatchRunner | None = None,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._models = models
        self._batches = batches
        self._period_s = period_s
        self._queues = set[asyncio.Queue[bytes]]()
        self._asking: asyncio.Task[None] | None = None

    async def watch(self, since_s: int | None) -> tuple[bytes, AsyncGenerator[bytes]]:
        """Begin to watch: return the first event and the source of the others.

        Raises:
            ApiError: status 429: there are too many watchers.
        """
        if len(self._queues) >= _MAX_WATCHERS:
            raise ApiError(
                429,
                f"{_MAX_WATCHERS} dashboards are open at this ingress replica; close some",
                code="too_many_watchers",
                headers={"Retry-After": "20"},
            )
        queue = asyncio.Queue[bytes](_MAX_BEHIND)
        self._queues.add(queue)  # before the first event, so that nothing between them is missed
        try:
            since: dict[str, int | None] = dict.fromkeys(self._models, since_s)
            first = await self._event(since, is_first=True)
        except BaseException:
            self._queues.discard(queue)
            raise
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_on(since))
        return first, self._rest(queue)

    @property
    def number(self) -> int:
        """Number of watchers."""
        return len(self._queues)

    async def _rest(self, queue: asyncio.Queue[bytes]) -> AsyncGenerator[bytes]:
        ends_s = time.monotonic() + _MAX_STREAM_S
        try:
            while queue in self._queues and time.monotonic() < ends_s:
                yield await queue.get()
        finally:
            self._queues.discard(queue)

    async def _ask_on(self, since: dict[str, int | None]) -> None:
        """Ask the governor once a second, as long as somebody watches, and note what was sent."""
        while self._queues:
            await asyncio.sleep(self._period_s)
            if not self._queues:
                return
            event = await self._event(since)
            for queue in list(self._queues):
                if queue.full():
                    self._queues.discard(queue)  # its stream ends
                else:
                    queue.put_nowait(event)

    async def _event(self, since: dict[str, int | None], *, is_first: bool = False) -> bytes:
        """Return an event with all models' pictures, and note up to which time each one goes."""
        parts = await asyncio.gather(*(self._part(name, since) for name in self._models))
        about = f'"about":{json.dumps(_about(self._models))},' if is_first else ""
        batches = json.dumps(self._batches and asdict(self._batches.unfinished))
        content = f'"batches":{batches},"models":{{{",".join(parts)}}}'
        return f'data: {{{about}"now_s":{time.time():.3f},{content}}}\n\n'.encode()

    async def _part(self, name: str, since: dict[str, int | None]) -> str:
        """Return a model's name and picture as JSON, or why there is none."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                picture: Picture = await self._models[name].backend.picture(since[name])
        except Exception as error:
            # whatever keeps the governor from answering, the page says so and the stream goes on
            _log.warning("the dashboard has no picture of %s: %r", name, error)
            problem = f"the governor does not answer ({type(error).__name__}); trying again"
            return f"{json.dumps(name)}:{json.dumps({'problem': problem})}"
        since[name] = picture.last_s or since[name]
        return f"{json.dumps(name)}:{picture.text}"


def dashboard_router(models: Mapping[str, ServedModel], batches: BatchRunner | None) -> APIRouter:
    """Return the router of the dashboard's stream of events."""
    router, watchers = APIRouter(responses=errors_described()), Watchers(models, batches)

    @router.get(
        "/admin/dashboard/events",
        response_class=Response,
        responses={200: {"content": {"text/event-stream": EVENT_STREAM}}},
    )
    async def dashboard_events(
        since_s: Annotated[int | None, Query(ge=0, le=2**40)] = None,
    ) -> Response:
        """Stream the dashboard's picture: an hour of history at first, then an event each second.

        ``since_s`` is the time of the latest row that the client has, to go on where it was. The
        stream ends after some seconds, and at once if the client reads too slowly.
        """
        first, rest = await watchers.watch(since_s)
        return EventStream(first, rest, {})

    return router


def _about(models: Mapping[str, ServedModel]) -> dict[str, Any]:
    return {
        "version": __version__,
        "models": {name: _about_model(model) for name, model in models.items()},
    }


def _about_model(model: ServedModel) -> dict[str, Any]:
    settings = model.settings
    scaling = settings.autoscaling
    return {
        "has_threshold": model.checkpoint.metadata is not None,
        "is_scaled": scaling is not None,
        "num_replicas": settings.num_replicas if scaling is None else scaling.min_replicas,
        "max_replicas": settings.most_replicas,
        "audit_share": settings.audit.share,
    }
