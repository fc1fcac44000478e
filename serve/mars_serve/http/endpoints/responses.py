"""``/v1/responses``: OpenAI's Responses API, over chats and a storage."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from mars_serve.api.errors import ApiError, invalid_value, unsupported_value
from mars_serve.api.keys import Caller
from mars_serve.api.outgoing.answer import Answer
from mars_serve.api.responses.body import NAMES, ResponsesRequest
from mars_serve.api.responses.items import read_items, stored_items
from mars_serve.api.responses.schema import DeletedResponse, ItemList, ResponseObject
from mars_serve.api.responses.writer import ResponseWriter, echo_of
from mars_serve.api.schema import Shape, errors_described, generation_described
from mars_serve.http.endpoints.generator import Dialect, Generator
from mars_serve.http.endpoints.json_route import JsonRoute
from mars_serve.http.stored_responses import StoredResponse, StoredResponses
from mars_serve.storage.files import page_of
from mars_serve.storage.objects import new_id

_ONE = "/v1/responses/{response_id}"


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
        dialect = Dialect(body, partial(ResponseWriter, body=body), NAMES)
        return await generator.chat(body.to_chat(), request, dialect)

    @router.get(_ONE, response_model=None, responses=_described(ResponseObject))
    async def retrieve(
        response_id: str, request: Request, stream: Annotated[bool, Query()] = False
    ) -> Response:
        """Return a stored response."""
        _refuse_stream(stream=stream)
        _, found = await _find(kept, request, response_id)
        return JSONResponse(found.response)

    @router.delete(_ONE, response_model=None, responses=_described(DeletedResponse))
    async def delete(response_id: str, request: Request) -> Response:
        """Delete a stored response; one that is being generated is cancelled."""
        stored, _ = await _find(kept, request, response_id)
        await stored.delete(request.state.caller, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.post(f"{_ONE}/cancel", response_model=None, responses=_described(ResponseObject))
    async def cancel(response_id: str, request: Request) -> Response:
        """Cancel a response that is generated in the background."""
        stored, found = await _find(kept, request, response_id)
        _check_background(found)
        return JSONResponse((await stored.cancel(request.state.caller, found)).response)

    @router.get(f"{_ONE}/input_items", response_model=None, responses=_described(ItemList))
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """Return the items that a stored response answers, some at a time."""
        _, found = await _find(kept, request, response_id)
        items = [*found.history, *found.input]
        return JSONResponse(_page(items if order == "asc" else items[::-1], limit, after))

    return router


async def _create(
    generator: Generator, kept: StoredResponses, body: ResponsesRequest, request: Request
) -> Response:
    """Answer a request of which stored items may be a part, and store the response."""
    caller: Caller = request.state.caller
    history, items = await kept.items(caller, body)
    chat = body.model_copy(update={"input": items}).to_chat(read_items(history))
    if body.store is False or not await kept.check_room(caller, body):
        dialect = Dialect(body, partial(ResponseWriter, body=body), NAMES)
        return await generator.chat(chat, request, dialect)
    if body.request_id is not None:
        reason = (
            "a stored response has an id of the server's own; leave it out, or set store: false"
        )
        raise invalid_value("request_id", reason)
    name = chat.request_id = new_id()
    stored = StoredResponse({"id": f"resp_{name}"}, history, stored_items(items, name))
    writers = list[ResponseWriter]()

    def writer(answer: Answer) -> ResponseWriter:
        writers.append(ResponseWriter(answer, body, is_stored=True))
        return writers[0]

    async def keep() -> None:
        await kept.keep(caller, replace(stored, response=writers[0].final or {}))

    dialect = Dialect(body, writer, NAMES, keep=keep)
    if not body.background:
        return await generator.chat(chat, request, dialect)
    await generator.check(chat, request, dialect)
    stored.response = {**echo_of(body), **stored.response, "created_at": int(time.time())}
    await kept.start(caller, body, stored)
    return JSONResponse({**stored.response, "status": "queued"})


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    """Return some items behind one of an id, or from the first one on."""
    by_id = {each["id"]: each for each in items}
    ids, has_more = page_of(list(by_id), after, limit)
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    shown = [by_id[each] for each in ids]
    page = {"object": "list", "data": shown, "first_id": first, "last_id": last}
    return {**page, "has_more": has_more}


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


def _check_background(found: StoredResponse) -> None:
    if not found.response["background"]:
        reason = "it is not generated in the background; close the connection instead"
        raise ApiError(400, f"{found.response['id']}: {reason}", code="invalid_value")


def _refuse_storing(body: ResponsesRequest) -> None:
    for name in ("store", "previous_response_id", "background"):
        if getattr(body, name):
            reason = "this server stores no responses; leave it out, or set storage.path"
            raise unsupported_value(name, reason)
