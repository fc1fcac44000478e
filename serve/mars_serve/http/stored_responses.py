"""Stored responses: their conversations, and those that are generated in the background.

A response that is generated in the background belongs to one ingress replica, which writes a sign
of life while it runs. Others see from its age that the replica is gone. To cancel it, anyone
leaves a mark, which the replica looks for. So only one process writes a response that lives.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.keys import Caller
from mars_serve.api.responses.body import ResponsesRequest
from mars_serve.api.responses.items import Item, ReferenceItem, read_items
from mars_serve.api.responses.writer import error_of
from mars_serve.http.in_process import OwnRequests, post_until_served
from mars_serve.storage.objects import ObjectStorage

_PATH = "/v1/responses"
_KIND, _BEATS, _MARKS = "responses", "response_beats", "response_marks"
_BEAT_S = 2.0
"""Seconds between signs of life, and between looks for a mark."""
_DEAD_S = 30.0
"""Age of the last sign of life in seconds from which on a response is given up."""
_CANCEL_S = 6.0
"""Seconds for which one waits for a response to be cancelled elsewhere."""
_WAIT_S = 3600.0
"""Seconds for which a response in the background waits for a place."""
_MOST_RUNNING, _MOST_OF_KEY = 256, 32
"""Most responses in the background of a replica, and of one key there."""
_MOST_NAMED = 16
"""Most responses whose items a request may name."""
_ROOM_BYTES = 2**20
"""Room for a response that is there before it is generated."""
_RUNNING = ("queued", "in_progress")
_RESPONSE = re.compile("resp_([0-9a-f]{32})")
_ITEM = re.compile("[a-z]{2,4}_([0-9a-f]{32})_[0-9]+")

_CANCELLED = {"status": "cancelled"}

_log = logging.getLogger(__name__)


@dataclass
class StoredResponse:
    """A response with the conversation that it answers."""

    response: dict[str, Any]
    history: list[dict[str, Any]]
    """Items of earlier responses."""
    input: list[dict[str, Any]]
    """Items of the request."""

    @property
    def is_running(self) -> bool:
        """Whether it is being generated, as far as was known when it was written."""
        return self.response["status"] in _RUNNING

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All items up to the end of the response."""
        return [*self.history, *self.input, *self.response["output"]]


@dataclass(frozen=True)
class StoredResponses:
    """The stored responses of all keys, as one ingress replica sees them."""

    storage: ObjectStorage
    own: OwnRequests
    """Sends the requests of responses that are generated in the background."""
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Responses in the background of this replica, by id."""
    _num_running: Counter[str] = field(default_factory=Counter)
    """Their numbers by key."""

    async def find(self, caller: Caller, name: str) -> StoredResponse | None:
        """Return a caller's response by its id; None if there is none.

        One whose replica is gone has failed, or was cancelled if that was asked for.
        """
        found = await self._read(caller, name)
        if found is None or not found.is_running or _hex_of(name) in self._tasks:
            return found
        beat = await self.storage.get(caller.tenant, _BEATS, _hex_of(name))
        if beat is not None and time.time() - float(beat) < _DEAD_S:
            return found
        found = await self._read(caller, name)  # it may have ended, and its signs of life with it
        if found is not None and found.is_running:
            reason = "the server's process that generated it has ended; send the request again"
            problem = ApiError(503, reason, code="not_ready")
            is_marked = await self._is_marked(caller, _hex_of(name))
            found.response |= _CANCELLED if is_marked else _failed(error_of(problem))
            await self.keep(caller, found)
        return found

    async def keep(self, caller: Caller, stored: StoredResponse) -> None:
        """Store a response; the caller's oldest give way if there are too many.

        Raises:
            ApiError: status 429: the key has no room for it.
        """
        name = _hex_of(stored.response["id"])
        content = to_json(vars(stored))
        await self.storage.put(caller.tenant, _KIND, name, content, "drop_oldest")

    async def check_room(self, caller: Caller, body: ResponsesRequest) -> bool:
        """Return whether a response will be stored: with no room only one that has to be is not.

        Raises:
            ApiError: status 429: the key has no room for a response that has to be stored.
        """
        if await self.storage.has_room(caller.tenant, _ROOM_BYTES, but_for=_KIND):
            return True
        if body.store or body.background:
            reason = "the storage of this key is full; delete some files, or leave store out"
            raise ApiError(429, f"store: {reason}", param="store", code="storage_full")
        return False

    async def delete(self, caller: Caller, name: str) -> bool:
        """Delete a response, which ends if it runs; return whether there was one."""
        found = await self._read(caller, name)
        if found is None:
            return False
        if found.is_running:
            await self._mark(caller, _hex_of(name))
        return await self.storage.delete(caller.tenant, _KIND, _hex_of(name))

    async def cancel(self, caller: Caller, stored: StoredResponse) -> StoredResponse:
        """Cancel a response that is generated in the background, and return it as it ended."""
        name = stored.response["id"]
        await self._mark(caller, _hex_of(name))
        end_s = time.monotonic() + _CANCEL_S
        found: StoredResponse | None = stored
        while found is not None and found.is_running and time.monotonic() < end_s:
            await asyncio.sleep(_BEAT_S / 20)
            found = await self.find(caller, name)
        return found or stored

    async def items(
        self, caller: Caller, body: ResponsesRequest
    ) -> tuple[list[dict[str, Any]], Sequence[Item]]:
        """Return the stored items that a request goes on from, and its own without references.

        Raises:
            ApiError: status 400 or 404: something that the request names is not stored.
        """
        history = list[dict[str, Any]]()
        if body.previous_response_id is not None:
            history = (await self._previous(caller, body.previous_response_id)).conversation
        references = {each.id for each in body.items if isinstance(each, ReferenceItem)}
        known = {each["id"]: each for each in history}
        missing = references - known.keys()
        matches = [_ITEM.fullmatch(each) for each in missing]
        names = {match[1] for match in matches if match}
        if len(names) > _MOST_NAMED:
            reason = f"items of {len(names)} responses are named; name those of {_MOST_NAMED}"
            raise invalid_value("input", f"{reason} at most, and give the others whole")
        for name in names:
            found = await self.find(caller, f"resp_{name}")
            items = found.conversation if found else []
            known |= {each["id"]: each for each in items if each["id"] in missing}
        return history, [
            read_items([known[each.id]])[0]
            if isinstance(each, ReferenceItem) and each.id in known
            else each
            for each in body.items
        ]

    async def _previous(self, caller: Caller, name: str) -> StoredResponse:
        where = "previous_response_id"
        found = await self.find(caller, name)
        if found is None:
            reason = f"{name!r} is not stored, or not any more; give the items of the conversation"
            raise invalid_value(where, reason, code="previous_response_not_found")
        status = found.response["status"]
        if status not in ("completed", "incomplete"):
            reason = f"{name!r} is {status}; go on from a response that was generated"
            raise invalid_value(where, reason)
        return found

    async def start(self, caller: Caller, body: ResponsesRequest, stored: StoredResponse) -> None:
        """Begin to generate a response in the background."""
        name, num_own = _hex_of(stored.response["id"]), self._num_running[caller.name]
        if len(self._tasks) >= _MOST_RUNNING or num_own >= _MOST_OF_KEY:
            reason = f"{num_own} of this key's and {len(self._tasks)} in all run already"
            message = f"background: {reason}; try again once some have ended"
            raise ApiError(
                429, message, param="background", code="background_full", retry_after_s=10
            )
        await self._beat(caller, name)
        await self.keep(caller, stored)
        update = {"background": None, "store": False, "request_id": None}
        request = body.model_copy(update=update).model_dump_json(by_alias=True, exclude_unset=True)
        self._tasks[name] = asyncio.create_task(self._run(caller, name, request.encode(), stored))
        self._num_running[caller.name] += 1
        self._tasks[name].add_done_callback(lambda task: self._forget(caller, name, task))

    def _forget(self, caller: Caller, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]
        self._num_running[caller.name] -= 1
        if not task.cancelled() and (error := task.exception()):
            _log.error("a response in the background was lost", exc_info=error)

    async def _run(self, caller: Caller, name: str, request: bytes, stored: StoredResponse) -> None:
        """Generate a response, and store it however it ends."""
        created_at = stored.response["created_at"]
        stored.response["status"] = "in_progress"
        await self.keep(caller, stored)
        work = asyncio.create_task(self._answer(caller, request))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_BEAT_S)
                await self._beat(caller, name)
                if await self._is_marked(caller, name):
                    work.cancel()
            stored.response |= _ended(work, name)
        finally:
            work.cancel()
        stored.response |= {"created_at": created_at, "background": True, "store": True}
        if await self.storage.get(caller.tenant, _KIND, name) is not None:  # else it was deleted
            await self.keep(caller, stored)
        for kind in (_BEATS, _MARKS):
            await self.storage.delete(caller.tenant, kind, name)

    async def _answer(self, caller: Caller, request: bytes) -> httpx.Response:
        return await post_until_served(lambda: self.own.post(_PATH, request, caller), _WAIT_S)

    async def _read(self, caller: Caller, name: str) -> StoredResponse | None:
        content = await self.storage.get(caller.tenant, _KIND, _hex_of(name))
        return None if content is None else StoredResponse(**from_json(content))

    async def _beat(self, caller: Caller, name: str) -> None:
        now = str(time.time()).encode()
        await self.storage.put(caller.tenant, _BEATS, name, now, "exceed")

    async def _mark(self, caller: Caller, name: str) -> None:
        await self.storage.put(caller.tenant, _MARKS, name, b"cancel", "exceed")

    async def _is_marked(self, caller: Caller, name: str) -> bool:
        return await self.storage.get(caller.tenant, _MARKS, name) is not None


def _hex_of(name: str) -> str:
    """Return the object's id for a response's; an empty one for what is no id of a response."""
    match = _RESPONSE.fullmatch(name)
    return match[1] if match else ""


def _failed(error: dict[str, Any]) -> dict[str, Any]:
    return {"status": "failed", "error": error}


def _ended(work: asyncio.Task[httpx.Response], name: str) -> dict[str, Any]:
    """Return the members of a response that the end of its generation gives it."""
    if work.cancelled():
        return _CANCELLED
    answer = work.result()
    found: dict[str, Any] = from_json(answer.content)
    if answer.status_code != 200:
        problem = ApiError(answer.status_code, found["error"]["message"])
        return _failed(error_of(problem))
    own_id = found["id"].removeprefix("resp_").encode()  # random, and in the ids of items, too
    response: dict[str, Any] = from_json(answer.content.replace(own_id, name.encode()))
    return response
