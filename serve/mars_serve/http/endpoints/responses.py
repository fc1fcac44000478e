"""``/v1/responses``: OpenAI's Responses API, over chats and a storage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic_core import from_json, to_json
from starlette.types import Receive, Scope, Send

from mars_serve.api.errors import ApiError, invalid_value, unsupported_value
from mars_serve.api.keys import Caller
from mars_serve.api.outgoing.answer import Answer, Writer
from mars_serve.api.responses.body import NAMES, ResponsesRequest
from mars_serve.api.responses.schema import DeletedResponse, ItemList, ResponseObject
from mars_serve.api.responses.writer import ResponseWriter
from mars_serve.api.schema import Shape, errors_described, generation_described
from mars_serve.api.text_threads import beside
from mars_serve.http.endpoints.generator import Dialect, Generator
from mars_serve.http.endpoints.json_route import JsonRoute
from mars_serve.http.stored_responses import StoredResponse, StoredResponses
from mars_serve.storage.files import page_of
from mars_serve.storage.objects import new_id

_ONE = "/v1/responses/{response_id}"
_JSON = "application/json"


def responses_router(generator: Generator, kept: StoredResponses | None) -> APIRouter:
    """Return the router of responses, which are stored if there is a place for them."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(
        "/v1/responses", response_model=None, responses=generation_described(ResponseObject)
    )
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation of items."""
        body.refuse_unsupported()
        if kept is not None:
            return await _create(generator, kept, body, request)
        _refuse_storing(body)
        dialect = _dialect(body, partial(ResponseWriter, body=body))
        return await generator.chat(body.to_chat(), request, dialect)

    @router.get(_ONE, response_model=None, responses=_described(ResponseObject))
    async def retrieve(
        response_id: str, request: Request, stream: Annotated[bool, Query()] = False
    ) -> Response:
        """Return a stored response."""
        _refuse_stream(stream=stream)
        return await _sent(kept, request, response_id, attrgetter("response"))

    @router.delete(_ONE, response_model=None, responses=_described(DeletedResponse))
    async def delete(response_id: str, request: Request) -> Response:
        """Delete a stored response; one that is being generated is cancelled."""
        stored, found = await _find(kept, request, response_id)
        await stored.delete(request.state.caller, response_id, found)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post(f"{_ONE}/cancel", response_model=None, responses=_described(ResponseObject))
    async def cancel(response_id: str, request: Request) -> Response:
        """Cancel a response that is generated in the background."""
        stored, found = await _find(kept, request, response_id)
        _check_background(response_id, found)
        found = await stored.cancel(request.state.caller, response_id, found)
        return Response(found.response, media_type=_JSON)

    @router.get(f"{_ONE}/input_items", response_model=None, responses=_described(ItemList))
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """Return the items that a stored response answers, some at a time."""
        return await _sent(
            kept, request, response_id, lambda found: _page(found.items, order, limit, after)
        )

    return router


async def _create(
    generator: Generator, kept: StoredResponses, body: ResponsesRequest, request: Request
) -> Response:
    """Answer a request of which stored items may be a part, and store the response."""
    caller: Caller = request.state.caller
    # one in the background comes here twice, the second time to be answered
    answered_as: str | None = getattr(request.state, "background", None)
    name, may_store = answered_as or new_id(), body.store is not False and answered_as is None
    asked = await kept.conversation(request.state.load, body, name, may_store=may_store)
    is_kept = may_store and await kept.check_room(caller, body, asked)
    if body.request_id is not None and is_kept:
        reason = (
            "a stored response has an id of the server's own; leave it out, or set store: false"
        )
        raise invalid_value("request_id", reason)
    is_stored = is_kept or answered_as is not None
    if is_stored:
        asked.chat.request_id = name
    writers = list[ResponseWriter]()

    def writer(answer: Answer) -> ResponseWriter:
        writers.append(ResponseWriter(answer, body, is_stored=is_stored))
        return writers[0]

    async def keep() -> None:
        await kept.keep(caller, name, writers[0].final or {}, asked.items)

    dialect = _dialect(body, writer, keep if is_kept else None)
    if answered_as is not None or not body.background:
        return await generator.chat(asked.chat, request, dialect)
    headers = await generator.check(asked.chat, request, dialect)
    queued = await kept.start(caller, body, name, await request.body(), asked.items)
    request.state.record.queued = True
    return Response(queued, media_type=_JSON, headers=headers)


def _dialect(
    body: ResponsesRequest,
    writer: Callable[[Answer], Writer],
    keep: Callable[[], Awaitable[None]] | None = None,
) -> Dialect:
    return Dialect(body, writer, NAMES, keep=keep, is_whole=True)


def _page(content: bytes, order: str, limit: int, after: str | None) -> bytes:
    """Return some items behind one of an id, or from the first one on."""
    items: list[dict[str, Any]] = from_json(content)
    by_id = {each["id"]: each for each in (items if order == "asc" else items[::-1])}
    ids, has_more = page_of(list(by_id), after, limit)
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    shown = [by_id[each] for each in ids]
    page = {"object": "list", "data": shown, "first_id": first, "last_id": last}
    return to_json({**page, "has_more": has_more})


class _Counted(StreamingResponse):
    """A stored content, which counts as a body of its size until the client has it."""

    def __init__(self, content: bytes, load: ExitStack) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield content  # and the server waits for the client before it sends the end

        super().__init__(pieces(), media_type=_JSON, headers={"content-length": f"{len(content)}"})
        self._load = load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content."""
        with self._load:
            await super().__call__(scope, receive, send)


async def _sent(
    kept: StoredResponses | None,
    request: Request,
    name: str,
    part: Callable[[StoredResponse], bytes],
) -> Response:
    """Return a part of a stored response."""
    stored, found = await _find(kept, request, name)
    with ExitStack() as held:
        load = held.enter_context(stored.threads.load(request.state.caller))
        stored.threads.add(load, found.num_bytes)
        await stored.threads.begin(load)
        content = await beside(load, lambda: part(found))
        stored.threads.end_turn(load)
        return _Counted(content, held.pop_all())


async def _find(
    kept: StoredResponses | None, request: Request, name: str
) -> tuple[StoredResponses, StoredResponse]:
    found = await kept.find(request.state.caller, name) if kept else None
    if kept is None or found is None:
        reason = "there is no such response; it was not stored, was deleted, or is too old"
        raise ApiError(404, f"{name[:80]}: {reason}", code="not_found")
    return kept, found


def _described(model: type[Shape]) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": model}, **errors_described(400, 401, 404, 422)}


def _refuse_stream(*, stream: bool) -> None:
    if stream:
        reason = "stored responses are not streamed; leave it out, and ask again until it ends"
        raise unsupported_value("stream", reason)


def _check_background(name: str, found: StoredResponse) -> None:
    if not found.is_background:
        reason = "it is not generated in the background; close the connection instead"
        raise ApiError(400, f"{name}: {reason}", code="invalid_value")


def _refuse_storing(body: ResponsesRequest) -> None:
    for name in ("store", "previous_response_id", "background"):
        if getattr(body, name):
            reason = "this server stores no responses; leave it out, or set storage.path"
            raise unsupported_value(name, reason)
