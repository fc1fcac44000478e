"""Stored responses: their conversations, and those that are generated in the background.

A response that is generated in the background belongs to one ingress replica, which writes signs
of life while it runs. Others see from signs that do not change that the replica is gone. To cancel
or delete it, anyone leaves a mark, which the replica looks for. So only one process writes a
response that lives. Storage has no locks: a mark stands before the response goes, and the replica
looks for one behind its last write, so that none comes back.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from mars_serve.api.bounds import json_size_of
from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.api.keys import Caller
from mars_serve.api.protocol import ChatCompletionRequest
from mars_serve.api.responses.body import ResponsesRequest
from mars_serve.api.responses.items import ReferenceItem, read_items, stored_items
from mars_serve.api.responses.writer import echo_of, error_of
from mars_serve.api.text_threads import LARGE, Load, TextThreads, beside
from mars_serve.config.settings import LimitSettings
from mars_serve.http.in_process import OwnRequests, post_until_served
from mars_serve.storage.objects import ObjectStorage

_PATH = "/v1/responses"
_KIND, _BEATS = "responses", "response_beats"
_CANCELS, _DELETES = "response_cancels", "response_deletes"
"""Marks, which are of two kinds for none to take another's place."""
_CANCEL_S = 6.0
"""Seconds for which one waits for a response to be cancelled elsewhere."""
_WAIT_S = 3600.0
"""Seconds for which a response in the background waits for a place."""
_MOST_RUNNING, _MOST_OF_KEY = 256, 32
"""Most responses in the background of a replica, and of one key there."""
_ROOM_RUNNING = 2**28
"""Most bytes of their bodies and conversations, of which each key may have as many as are free."""
_MOST_NAMED = 16
"""Most responses whose items a request may name."""
_MOST_READ = 4
"""Largest size of what a request goes on from, in sizes of the largest body."""
_ROOM_BYTES = 2**20
"""Room for a response that is there before it is generated."""
_MOST_WATCHED = 4096
"""Most responses of other replicas whose signs of life are remembered."""
_RESPONSE = re.compile("resp_([0-9a-f]{32})")
_ITEM = re.compile("[a-z]{2,4}_([0-9a-f]{32})_[0-9]+")
_CANCELLED = {"status": "cancelled"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredResponse:
    """A response as it is stored: JSON, of which only what is needed is read."""

    status: str
    is_background: bool
    response: bytes
    items: bytes
    """All items that it answers, those of earlier responses first."""

    @classmethod
    def of(cls, response: Mapping[str, Any], items: bytes) -> StoredResponse:
        """Return a response in its stored form."""
        return cls(response["status"], response["background"], to_json(response), items)

    @classmethod
    def read(cls, content: bytes) -> StoredResponse:
        """Return what `written` wrote."""
        head, response, items = content.split(b"\n")
        status, is_background = from_json(head)
        return cls(status, is_background, response, items)

    def written(self) -> bytes:
        """Return the content of the stored object: lines of JSON."""
        return b"\n".join((to_json([self.status, self.is_background]), self.response, self.items))

    @property
    def is_running(self) -> bool:
        """Whether it is being generated, as far as was known when it was written."""
        return self.status == "in_progress"

    @property
    def num_bytes(self) -> int:
        """Size of its response and conversation."""
        return len(self.response) + len(self.items)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """All items up to the end of the response, without log-probabilities."""
        output = from_json(self.response)["output"]
        parts = [part for item in output for part in item.get("content") or ()]
        for part in parts:
            if "logprobs" in part:
                part["logprobs"] = []
        return [*from_json(self.items), *output]


@dataclass(frozen=True)
class Conversation:
    """A request's body, to be answered behind the stored items that it goes on from."""

    chat: ChatCompletionRequest
    items: bytes
    """All of its items, as they are stored."""
    is_storable: bool
    """Whether they are no more than a body may have."""


@dataclass
class StoredResponses:
    """The stored responses of all keys, as one ingress replica sees them."""

    storage: ObjectStorage
    own: OwnRequests
    """Sends the requests of responses that are generated in the background."""
    caller_of: Callable[[str], Awaitable[Caller | None]]
    """Returns the caller with the name of a key, as it is now; None if the key is gone."""
    threads: TextThreads
    limits: LimitSettings
    beat_s: float = 2.0
    """Seconds between signs of life, and between looks for a mark."""
    dead_s: float = 30.0
    """Seconds without a new sign of life after which a response is given up."""
    _sizes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Key and bytes of each response in the background of this replica, by id."""
    _works: dict[str, asyncio.Task[httpx.Response]] = field(default_factory=dict)
    """The requests that generate them."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that look after them."""
    _seen: dict[str, tuple[bytes | None, float]] = field(default_factory=dict)
    """Others' signs of life, each with the time at which it was first seen, by this clock."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Generate responses in the background until the block ends, and say that they failed."""
        try:
            yield
        finally:
            for work in self._works.values():
                work.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def find(self, caller: Caller, name: str) -> StoredResponse | None:
        """Return a caller's response by its id; None if there is none.

        One whose replica is gone has failed from now on, or was cancelled if that was asked for.
        """
        own_id = _hex_of(name)
        found = await self._read(caller, own_id)
        if found is None or not found.is_running or own_id in self._sizes:
            return found
        if not await self._is_silent(caller, own_id):
            return found
        found = await self._read(caller, own_id)  # it may have ended, and its signs with it
        if found is None or not found.is_running:
            return found
        before, cancelled = found.response, await self._has(caller, _CANCELS, own_id)
        outcome = _CANCELLED if cancelled else _failed(_gone("has ended"))
        given_up = self._made(caller, lambda: {**from_json(before), **outcome}, found.items)
        await self._end(caller, own_id, await given_up)
        return await self._read(caller, own_id)

    async def _is_silent(self, caller: Caller, name: str) -> bool:
        """Return whether a response has had the same sign of life, or none, for too long."""
        sign, now_s = await self.storage.get(caller.tenant, _BEATS, name), time.monotonic()
        known, since_s = self._seen.get(name, (None, now_s))
        if known != sign or name not in self._seen:
            since_s = now_s
            self._seen.pop(name, None)  # the latest stand last
            self._seen[name] = (sign, now_s)
            if len(self._seen) > _MOST_WATCHED:
                del self._seen[next(iter(self._seen))]
        return now_s - since_s > self.dead_s

    async def keep(
        self, caller: Caller, name: str, response: Mapping[str, Any], items: bytes
    ) -> None:
        """Store a response; the caller's oldest give way if there are too many.

        Raises:
            ApiError: status 429: the key has no room for it.
        """
        stored = await self._made(caller, lambda: response, items)
        await self.storage.put(caller.tenant, _KIND, name, stored.written(), "drop_oldest")

    async def check_room(self, caller: Caller, body: ResponsesRequest, asked: Conversation) -> bool:
        """Return whether a response will be stored: with no room only one that has to be is not.

        Raises:
            ApiError: status 400 or 429: there is no room for a response that has to be stored.
        """
        num_bytes = len(asked.items) + _ROOM_BYTES
        has_room = await self.storage.has_room(caller.tenant, num_bytes, but_for=_KIND)
        if asked.is_storable and has_room:
            return True
        if not (body.store or body.background):
            return False
        if not asked.is_storable:
            most = f"{self.limits.body_bytes} bytes and {self.limits.body_values} values"
            reason = f"the conversation takes {len(asked.items)} bytes, and {most} can be stored"
            raise invalid_value("store", f"{reason}; leave store out, or begin a new conversation")
        reason = "the storage of this key is full; delete some files, or leave store out"
        raise ApiError(429, f"store: {reason}", param="store", code="storage_full")

    async def delete(self, caller: Caller, name: str, found: StoredResponse) -> None:
        """Delete a response, which ends if it runs."""
        own_id, now = _hex_of(name), None
        if found.is_running:
            now = await self._mark(caller, own_id, _CANCELS, _DELETES)
        await self.storage.delete(caller.tenant, _KIND, own_id)
        if now is not None and not now.is_running:  # nobody looks for the marks
            await self._clear(caller, own_id, _CANCELS, _DELETES)

    async def cancel(self, caller: Caller, name: str, found: StoredResponse) -> StoredResponse:
        """Cancel a response that is generated in the background, and return it as it ended."""
        if not found.is_running:
            return found
        own_id, end_s = _hex_of(name), time.monotonic() + _CANCEL_S
        now = await self._mark(caller, own_id, _CANCELS)
        while now is not None and now.is_running and time.monotonic() < end_s:
            await asyncio.sleep(self.beat_s / 10)
            now = await self.find(caller, name)
        if now is not None and not now.is_running:
            await self._clear(caller, own_id, _CANCELS)
        return now or found

    async def _mark(self, caller: Caller, name: str, *kinds: str) -> StoredResponse | None:
        """Ask whoever generates a response to end it; return the response as it is then."""
        for kind in kinds:
            await self.storage.put(caller.tenant, kind, name, b"", "exceed")
        if name in self._works:
            self._works[name].cancel()
        return await self._read(caller, name)

    async def _has(self, caller: Caller, mark: str, name: str) -> bool:
        return await self.storage.get(caller.tenant, mark, name) is not None

    async def _clear(self, caller: Caller, name: str, *kinds: str) -> None:
        for kind in kinds:
            await self.storage.delete(caller.tenant, kind, name)

    async def conversation(
        self, load: Load, body: ResponsesRequest, name: str, *, may_store: bool
    ) -> Conversation:
        """Return what a request asks for; what it goes on from counts as a part of its body.

        Raises:
            ApiError: status 400 or 404: something that the request names is not stored, or the
                conversation cannot be answered; 503: there is no room to read it now.
        """
        before, named, references = None, list[StoredResponse](), _named(body)
        if references or body.previous_response_id is not None:
            self.threads.end_turn(load)  # nobody needs to wait for the storage
        if body.previous_response_id is not None:
            before = await self._previous(load.caller, body.previous_response_id)
        num_bytes = self._count(load, 0, before)
        for reference in sorted(references - {_hex_of(body.previous_response_id or "")}):
            found = await self.find(load.caller, f"resp_{reference}")
            num_bytes = self._count(load, num_bytes, found)
            named += [found] if found else []
        await self.threads.begin(load)
        stored_as = name if may_store else None
        work = partial(_conversation_of, body, before, named, stored_as, self.limits)
        return await beside(load, work)

    def _count(self, load: Load, num_bytes: int, found: StoredResponse | None) -> int:
        """Count a stored response as a part of a body; return the bytes of all so far."""
        if found is None:
            return num_bytes
        self.threads.add(load, found.num_bytes)
        num_bytes += found.num_bytes
        if num_bytes > _MOST_READ * self.limits.body_bytes:
            most = f"{_MOST_READ} times limits.body_bytes"
            reason = f"what is stored of the conversation takes {num_bytes} bytes, over {most}"
            raise invalid_value("input", f"{reason}; give the items that matter in a new one")
        return num_bytes

    async def _previous(self, caller: Caller, name: str) -> StoredResponse:
        where = "previous_response_id"
        found = await self.find(caller, name)
        if found is None:
            reason = f"{name!r} is not stored, or not any more; give the items of the conversation"
            raise invalid_value(where, reason, code="previous_response_not_found")
        if found.status not in ("completed", "incomplete"):
            reason = f"{name!r} is {found.status}; go on from a response that was generated"
            raise invalid_value(where, reason)
        return found

    async def start(
        self, caller: Caller, body: ResponsesRequest, name: str, request: bytes, items: bytes
    ) -> bytes:
        """Begin to generate a response in the background, and return it as it is now.

        Raises:
            ApiError: status 429: too many are generated already.
        """
        self._take_room(caller, name, len(request) + len(items))
        try:
            response = {**echo_of(body), "id": f"resp_{name}", "created_at": int(time.time())}
            now = {**response, "status": "in_progress"}
            await self.keep(caller, name, now, items)
            await self._beat(caller, name, 0)
            queued = await self.threads.write(caller, len(request), lambda: to_json(response))
        except BaseException:
            del self._sizes[name]
            raise
        within_s = _WAIT_S if body.deadline_ms is None else 0
        self._works[name] = asyncio.create_task(self._answer(caller, name, request, within_s))
        task = asyncio.create_task(self._run(caller, name, now, items))
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, name))
        return queued

    def _take_room(self, caller: Caller, name: str, num_bytes: int) -> None:
        own = [size for key, size in self._sizes.values() if key == caller.name]
        taken = sum(size for _, size in self._sizes.values()) + num_bytes
        is_full = own and taken + sum(own) > _ROOM_RUNNING
        if is_full or len(self._sizes) >= _MOST_RUNNING or len(own) >= _MOST_OF_KEY:
            reason = f"{len(own)} of this key's and {len(self._sizes)} in all run already"
            message = f"background: {reason}; try again once some have ended"
            raise ApiError(
                429, message, param="background", code="background_full", retry_after_s=10
            )
        self._sizes[name] = (caller.name, num_bytes)

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        del self._sizes[name], self._works[name]
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("a response in the background was lost", exc_info=error)

    async def _run(self, caller: Caller, name: str, response: dict[str, Any], items: bytes) -> None:
        """Look after a response, and store it however it ends."""
        try:
            outcome = await self._outcome(caller, name)
        except ApiError as problem:
            outcome = _failed(problem)
        ended = {**response, **outcome, "created_at": response["created_at"]}
        await self._end(caller, name, await self._made(caller, lambda: ended, items))

    async def _outcome(self, caller: Caller, name: str) -> dict[str, Any]:
        """Return the members of a response that the end of its generation gives it.

        Raises:
            ApiError: it has failed.
        """
        work, beat = self._works[name], 0
        try:
            while not (await asyncio.wait([work], timeout=self.beat_s))[0]:
                beat += 1
                await self._now(caller)
                if not await self._goes_on(caller, name, beat):
                    return _CANCELLED
        finally:
            work.cancel()
        if work.cancelled():
            if await self._has(caller, _CANCELS, name):
                return _CANCELLED
            raise _gone("was ended")
        answer = work.result()
        found: dict[str, Any] = await self.threads.write(
            caller, len(answer.content), lambda: from_json(answer.content)
        )
        if answer.status_code != 200:
            raise ApiError(answer.status_code, found["error"]["message"])
        return found

    async def _goes_on(self, caller: Caller, name: str, beat: int) -> bool:
        """Write a sign of life; return whether nobody has cancelled the response."""
        try:
            await self._beat(caller, name, beat)
            return not await self._has(caller, _CANCELS, name)
        except Exception:  # storage fails in many ways, and may be back when the response ends
            _log.exception("a response in the background cannot say that it runs; it goes on")
            return True

    async def _end(self, caller: Caller, name: str, stored: StoredResponse) -> None:
        """Store a response that has ended, unless it was deleted, and clear away the rest."""
        storage, tenant = self.storage, caller.tenant
        if not await self._has(caller, _DELETES, name):
            await storage.put(tenant, _KIND, name, stored.written(), "exceed")
        if await self._has(caller, _DELETES, name):  # it may have come just now
            await storage.delete(tenant, _KIND, name)
        await self._clear(caller, name, _BEATS, _CANCELS, _DELETES)

    async def _answer(
        self, caller: Caller, name: str, request: bytes, within_s: float
    ) -> httpx.Response:
        """Return the answer to a request, which is sent again while there is no room for it."""

        async def post() -> httpx.Response:
            return await self.own.post(_PATH, request, await self._now(caller), background=name)

        return await post_until_served(post, within_s)

    async def _now(self, caller: Caller) -> Caller:
        """Return a caller with its rights as they are now; raise `ApiError` if its key is gone."""
        now = await self.caller_of(caller.name)
        if now is None or now.tenant != caller.tenant:
            reason = "the key that sent it is no longer one of this server's"
            raise ApiError(401, reason, code="invalid_api_key")
        return now

    async def _made(
        self, caller: Caller, response: Callable[[], Mapping[str, Any]], items: bytes
    ) -> StoredResponse:
        """Return a response in its stored form, which may take long to write."""
        return await self.threads.write(caller, LARGE, lambda: StoredResponse.of(response(), items))

    async def _read(self, caller: Caller, name: str) -> StoredResponse | None:
        content = await self.storage.get(caller.tenant, _KIND, name)
        return None if content is None else StoredResponse.read(content)

    async def _beat(self, caller: Caller, name: str, number: int) -> None:
        await self.storage.put(caller.tenant, _BEATS, name, b"%d" % number, "exceed")


def _hex_of(name: str) -> str:
    """Return the object's id for a response's; an empty one for what is no id of a response."""
    match = _RESPONSE.fullmatch(name)
    return match[1] if match else ""


def _named(body: ResponsesRequest) -> set[str]:
    """Return the ids of the responses whose items a request refers to."""
    references = (each.id for each in body.items if isinstance(each, ReferenceItem))
    names = {match[1] for match in map(_ITEM.fullmatch, references) if match}
    if len(names) > _MOST_NAMED:
        reason = f"items of {len(names)} responses are named; name those of {_MOST_NAMED}"
        raise invalid_value("input", f"{reason} at most, and give the others whole")
    return names


def _conversation_of(
    body: ResponsesRequest,
    before: StoredResponse | None,
    named: Sequence[StoredResponse],
    stored_as: str | None,
    limits: LimitSettings,
) -> Conversation:
    """Return what a request asks for.

    Args:
        body: The request.
        before: The response from which it goes on.
        named: Responses whose items it may refer to.
        stored_as: Id under which the conversation may be stored, if it may be.
        limits: Limits of what is stored.
    """
    history = before.conversation if before else []
    others = [each for response in named for each in response.conversation]
    known = {each["id"]: each for each in [*others, *history]}
    items = [
        read_items([known[each.id]])[0]
        if isinstance(each, ReferenceItem) and each.id in known
        else each
        for each in body.items
    ]
    chat = body.model_copy(update={"input": items}).to_chat(read_items(history))
    kept = b"" if stored_as is None else to_json([*history, *stored_items(items, stored_as)])
    is_small = len(kept) <= limits.body_bytes
    num_values = json_size_of(kept, limits.body_values).num_values if is_small else 0
    return Conversation(chat, kept, is_small and num_values <= limits.body_values)


def _failed(problem: ApiError) -> dict[str, Any]:
    return {"status": "failed", "error": error_of(problem)}


def _gone(how: str) -> ApiError:
    reason = f"the server's process that generated it {how}; send the request again"
    return ApiError(503, reason, code="not_ready")
