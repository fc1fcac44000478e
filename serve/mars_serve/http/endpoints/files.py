"""``/v1/files``: files of a key, which batches read and write.

Source: OpenAI API reference, "Files".
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers, UploadFile
from starlette.requests import ClientDisconnect
from starlette.types import Message

from mars_serve.api.errors import ApiError, clipped, invalid_value, shown
from mars_serve.api.schema import Count, Shape, errors_described
from mars_serve.config.settings import LimitSettings
from mars_serve.http.middleware.bodies import UPLOADS
from mars_serve.storage.files import FileRecord, FileStore, Purpose, no_storage, page_of
from mars_serve.storage.objects import made_at, new_id

PREFIX = "file-"
_FORM_BYTES = 2**16
"""Bytes of a form beside its file."""
_MAX_NAME = 256  # longest name of a file that is kept, in characters
_PIECE_BYTES = 2**18
_UPLOAD_WAITS = 10
"""Time for an upload, in times for a usual body."""
_UPLOADS_OF_KEY = 4
"""Most uploads of a key at once; each lies on this machine's disk until it is whole."""
_UPLOADED_FILES = 16
"""Largest files for which there is room on this machine's disk until they are whole."""
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": ["batch"]},
                    },
                }
            }
        },
    }
}


class FileObject(Shape):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: Count
    created_at: Count
    """Time in seconds since 1970, here and below."""
    expires_at: Count
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileList(Shape):
    """Some files of a key."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Shape):
    """Response to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def files_router(files: FileStore | None, limits: LimitSettings) -> APIRouter:
    """Return the router of the endpoints of files, which refuse all without a storage."""
    router = APIRouter(responses=errors_described())
    most = files.storage.settings.file_bytes + _FORM_BYTES if files else 0
    uploads = _Uploads(_UPLOADED_FILES * most)

    @router.post(UPLOADS, openapi_extra=_FORM)
    async def create_file(request: Request) -> FileObject:
        """Keep a file, sent as a form with its ``purpose``."""
        tenant, store = request.state.caller.tenant, _there(files)
        with uploads.one(tenant) as add:
            return await _receive(request, store, tenant, limits, add)

    @router.get(UPLOADS)
    async def list_files(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> FileList:
        """List files, the newest first unless ``order`` says else."""
        store, tenant = _there(files), request.state.caller.tenant
        names = (await store.names(tenant))[:: 1 if order == "asc" else -1]
        if purpose is not None:
            all_found = await store.find_all(tenant, names)
            names = [name for name, record in all_found.items() if record.purpose == purpose]
        page, has_more = page_of(names, after and _name_of(after), limit)
        found = await store.find_all(tenant, page)
        data = [_object(store, name, record) for name, record in found.items()]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return FileList(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)

    @router.get("/v1/files/{file_id}")
    async def retrieve_file(file_id: str, request: Request) -> FileObject:
        """Return what is known of a file."""
        store = _there(files)
        name, record = await find_file(store, request.state.caller.tenant, file_id)
        return _object(store, name, record)

    @router.get("/v1/files/{file_id}/content", response_class=StreamingResponse)
    async def retrieve_content(file_id: str, request: Request) -> StreamingResponse:
        """Return a file's content."""
        store, tenant = _there(files), request.state.caller.tenant
        name, record = await find_file(store, tenant, file_id)
        headers = {"content-length": str(record.num_bytes), "x-content-type-options": "nosniff"}
        pieces = _pieces(store, tenant, name)
        return StreamingResponse(pieces, 200, headers, "application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> FileDeleted:
        """Delete a file."""
        if not await _there(files).delete(request.state.caller.tenant, _name_of(file_id)):
            raise _no_file(file_id)
        return FileDeleted(id=file_id)

    return router


def _there(files: FileStore | None) -> FileStore:
    if files is None:
        raise no_storage("files")
    return files


class _Uploads:
    """The uploads that run, by tenant."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._running = Counter[str]()
        self._taken = Counter[str]()
        """Bytes that have arrived."""

    @contextmanager
    def one(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Count an upload within the block; raise `ApiError` 429 if there are too many.

        It yields what counts bytes that arrive, and raises `ApiError` 503 if there is no room for
        them: a tenant may take as many as are free.
        """
        if self._running[tenant] >= _UPLOADS_OF_KEY:
            raise ApiError(
                429,
                f"uploads of this key: {_UPLOADS_OF_KEY} run already; wait for one of them",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        num_bytes = 0

        def add(num: int) -> None:
            nonlocal num_bytes
            num_bytes += num
            self._taken[tenant] += num
            if self._taken.total() + self._taken[tenant] > self._room:
                reason = "too many uploads arrive at once; try again shortly"
                raise ApiError(503, f"file: {reason}", code="busy", retry_after_s=1)

        self._running[tenant] += 1
        try:
            yield add
        finally:
            self._running -= Counter([tenant])  # also forgets those without any
            self._taken -= Counter({tenant: num_bytes})


async def find_file(files: FileStore, tenant: str, file_id: str) -> tuple[str, FileRecord]:
    """Return the name in the storage and the record of the file with a public id.

    Raises:
        ApiError: status 404: the key has no such file.
    """
    name = _name_of(file_id)
    record = await files.find(tenant, name)
    if record is None:
        raise _no_file(file_id)
    return name, record


def _name_of(file_id: str) -> str:
    """Return the name of a file in the storage; of other texts, one that no file has."""
    return file_id.removeprefix(PREFIX) if file_id.startswith(PREFIX) else ""


def _no_file(file_id: str) -> ApiError:
    message = f"there is no file {clipped(file_id, 80)!r} of this key; upload it, or list files"
    return ApiError(404, message, code="not_found")


def _object(files: FileStore, name: str, record: FileRecord) -> FileObject:
    return FileObject(
        id=PREFIX + name,
        bytes=record.num_bytes,
        created_at=int(made_at(name)),
        expires_at=files.expires_at(name),
        filename=record.filename,
        purpose=record.purpose,
    )


async def _pieces(files: FileStore, tenant: str, name: str) -> AsyncGenerator[bytes]:
    in_thread = partial(files.storage.short.run, tenant)
    with await in_thread(files.open, tenant, name) as file:
        while piece := await in_thread(file.read, _PIECE_BYTES):
            yield piece


async def _receive(
    request: Request,
    files: FileStore,
    tenant: str,
    limits: LimitSettings,
    add: Callable[[int], None],
) -> FileObject:
    """Keep the file of a form; ``add`` counts its bytes."""
    most = files.storage.settings.file_bytes
    _check_headers(request.headers, most + _FORM_BYTES)
    wait_s = _UPLOAD_WAITS * limits.body_wait_s
    form_request = Request(request.scope, _Counted(request, most + _FORM_BYTES, add).receive)
    try:
        async with asyncio.timeout(wait_s):
            form = await form_request.form(max_files=1, max_fields=8, max_part_size=_FORM_BYTES)
    except TimeoutError as error:
        reason = f"it did not arrive within {wait_s:g} s; send it faster, or send less"
        raise ApiError(408, f"body: {reason}", code="request_timeout") from error
    try:
        upload = form.get("file")
        _check_form(dict(form))
        assert isinstance(upload, UploadFile)
        if (upload.size or 0) > most:
            raise _too_large(most)
        given = (upload.filename or "file").encode("utf-8", "replace").decode()
        name, filename = new_id(time.time()), clipped(given, _MAX_NAME)
        record = await files.add(tenant, name, upload.file, filename, "batch")
    finally:
        await form.close()
    return _object(files, name, record)


def _check_headers(headers: Headers, most: int) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(
            415,
            "Content-Type: files are sent as forms; send multipart/form-data",
            code="unsupported_content_type",
        )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)


def _too_large(most: int) -> ApiError:
    reason = f"more than the {most} bytes that this server takes (storage.file_bytes); divide it"
    return ApiError(413, f"file: {reason}", code="body_too_large", param="file")


def _check_form(form: dict[str, Any]) -> None:
    if not isinstance(form.pop("file", None), UploadFile):
        raise invalid_value("file", "it is missing; send a file")
    purpose = form.pop("purpose", None)
    if purpose != "batch":
        raise invalid_value("purpose", f"it is {shown(purpose)}; files here are for batch")
    for field in form:
        name = clipped(field, 64)
        raise invalid_value(name, "it is not supported for files; leave it out")


class _Counted:
    """The messages of a request, up to a number of bytes."""

    def __init__(self, request: Request, most: int, add: Callable[[int], None]) -> None:
        self._receive = request.receive
        self._add = add
        self._most = most
        self._left = most

    async def receive(self) -> Message:
        """Return the next message; raise `ApiError` 413 if there are too many bytes."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        num_bytes = len(message.get("body", b""))
        self._left -= num_bytes
        if self._left < 0:
            raise _too_large(self._most)
        self._add(num_bytes)
        return message
