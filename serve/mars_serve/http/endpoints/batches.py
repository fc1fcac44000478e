"""``/v1/batches``: files of requests that are answered beside others.

Source: OpenAI API reference, "Batch".
"""

import re
import time
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field

from mars_serve.api.bodies import Body, Neutral, at_most
from mars_serve.api.errors import ApiError, clipped, invalid_value
from mars_serve.api.schema import Count, Shape, errors_described
from mars_serve.http.batches.records import ENDED, BatchRecord, BatchStore, Endpoint, Status
from mars_serve.http.endpoints.files import PREFIX as FILE_PREFIX
from mars_serve.http.endpoints.files import find_file
from mars_serve.storage.files import no_storage, page_of
from mars_serve.storage.objects import made_at

_PREFIX = "batch_"
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
_END_S = 600
"""Time before a batch's input is deleted at which it must have expired, in seconds: for its files
to be made, and for a look at it."""


class BatchBody(Body):
    """A batch to create."""

    neutral: ClassVar = {
        "output_expires_after": Neutral(
            (), "files are kept for the time that storage.lifetime_days gives"
        )
    }

    input_file_id: Annotated[str, Field(max_length=64)]
    """Id of a file of purpose batch: JSONL with a request in each line."""
    endpoint: Endpoint
    """Endpoint of all requests."""
    completion_window: Annotated[str, Field(max_length=8)]
    """Time for all requests, such as ``24h``; ``30m`` and ``7d`` are understood as well."""
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            at_most(16),
        ]
        | None
    ) = None


class RequestCounts(Shape):
    """Numbers of requests."""

    total: Count
    completed: Count
    failed: Count
    """Number of requests whose answer is an error."""


class BatchErrorItem(Shape):
    """An error in a batch's input."""

    code: str
    message: str
    line: Count | None
    param: str | None


class BatchErrors(Shape):
    """Errors in a batch's input."""

    object: Literal["list"] = "list"
    data: list[BatchErrorItem]


class BatchObject(Shape):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    """File of the answers; null if there is none, or not yet."""
    error_file_id: str | None
    """File of the answers that are errors."""
    created_at: Count
    """Time in seconds since 1970, here and below."""
    in_progress_at: Count | None
    expires_at: Count
    finalizing_at: Count | None
    completed_at: Count | None
    failed_at: Count | None
    expired_at: Count | None
    cancelling_at: Count | None
    cancelled_at: Count | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Shape):
    """Some batches of a key."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batches_router(batches: BatchStore | None) -> APIRouter:
    """Return the router of the endpoints of batches, which refuse all without a storage."""
    router = APIRouter(responses=errors_described())

    @router.post("/v1/batches")
    async def create_batch(
        body: Annotated[BatchBody, at_most(64)], request: Request
    ) -> BatchObject:
        """Have all requests in a file answered."""
        store, caller = _there(batches), request.state.caller
        body.refuse_unsupported()
        input_file, file = await find_file(store.files, caller.tenant, body.input_file_id)
        if file.purpose != "batch":
            raise invalid_value("input_file_id", "its purpose is not batch; upload the requests")
        record = BatchRecord(
            key=caller.name,
            tenant=caller.tenant,
            endpoint=body.endpoint,
            input_file=input_file,
            completion_window=body.completion_window,
            expires_at=_expires_at(body.completion_window, store.files.expires_at(input_file)),
            metadata=body.metadata,
        )
        return _object(await store.create(record), record)

    @router.get("/v1/batches")
    async def list_batches(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> BatchList:
        """List batches, the newest first."""
        store, tenant = _there(batches), request.state.caller.tenant
        names = (await store.names(tenant))[::-1]
        page, has_more = page_of(names, after and after.removeprefix(_PREFIX), limit)
        found = await store.find_all(tenant, page)
        data = [await _shown(store, name, found[name]) for name in page if name in found]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return BatchList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(batch_id: str, request: Request) -> BatchObject:
        """Return a batch with its progress."""
        store = _there(batches)
        return await _shown(store, *await _find(store, request, batch_id))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> BatchObject:
        """End a batch; what was answered until then is kept."""
        store = _there(batches)
        name, record = await _find(store, request, batch_id)
        if record.status in ENDED:
            reason = f"the batch has ended ({record.status}), so that it cannot be cancelled"
            raise ApiError(400, reason, code="batch_ended")
        await store.cancel(name)
        return await _shown(store, name, record)

    return router


def _there(batches: BatchStore | None) -> BatchStore:
    if batches is None:
        raise no_storage("batches")
    return batches


async def _find(store: BatchStore, request: Request, batch_id: str) -> tuple[str, BatchRecord]:
    name = batch_id.removeprefix(_PREFIX) if batch_id.startswith(_PREFIX) else ""
    record = (await store.find_all(request.state.caller.tenant, [name])).get(name)
    if record is None:
        message = f"there is no batch {clipped(batch_id, 80)!r} of this key; list batches"
        raise ApiError(404, message, code="not_found")
    return name, record


def _expires_at(window: str, input_expires_at: int) -> int:
    """Return the end of a window from now on, which must come before the input file's."""
    match = _WINDOW.fullmatch(window)
    if match is None:
        raise invalid_value("completion_window", "give a time such as 24h, 30m or 7d")
    now, seconds = int(time.time()), int(match[1]) * _SECONDS[match[2]]
    most = (input_expires_at - now - _END_S) // 60
    if seconds > most * 60:
        remedy = f"give {most}m or less, or upload it again" if most > 0 else "upload it again"
        reason = f"the input file is deleted at {input_expires_at} (storage.lifetime_days)"
        raise invalid_value("completion_window", f"{reason}; {remedy}")
    return now + seconds


async def _shown(store: BatchStore, name: str, record: BatchRecord) -> BatchObject:
    """Return a batch as clients see it: a wish to cancel it counts before it is heard."""
    if record.status not in ENDED:
        cancelled_at = await store.cancelled_at(name)
        if cancelled_at is not None:
            record.status = "cancelling"
            record.times["cancelling"] = cancelled_at
    return _object(name, record)


def _file_id(record: BatchRecord, name: str | None) -> str | None:
    """Return the id of a file that a batch has made, once it is there."""
    return FILE_PREFIX + name if name and record.status in ENDED else None


def _object(name: str, record: BatchRecord) -> BatchObject:
    times = record.times
    errors = [
        BatchErrorItem(code=each.code, message=each.message, line=each.line, param=each.param)
        for each in record.errors
    ]
    return BatchObject(
        id=_PREFIX + name,
        endpoint=record.endpoint,
        errors=BatchErrors(data=errors) if errors else None,
        input_file_id=FILE_PREFIX + record.input_file,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=_file_id(record, record.output_file),
        error_file_id=_file_id(record, record.error_file),
        created_at=int(made_at(name)),
        in_progress_at=times.get("in_progress"),
        expires_at=record.expires_at,
        finalizing_at=times.get("finalizing"),
        completed_at=times.get("completed"),
        failed_at=times.get("failed"),
        expired_at=times.get("expired"),
        cancelling_at=times.get("cancelling"),
        cancelled_at=times.get("cancelled"),
        request_counts=RequestCounts(
            total=record.total, completed=record.completed, failed=record.failed
        ),
        metadata=record.metadata,
    )
