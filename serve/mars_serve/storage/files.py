"""Files of keys: a content, and a record of its name and purpose."""

from collections.abc import Sequence
from typing import BinaryIO, Literal, TypeVar

from pydantic import BaseModel

from mars_serve.api.errors import ApiError, invalid_value
from mars_serve.storage.objects import ObjectStorage, OnFull, made_at

_CONTENTS, _RECORDS = "files", "file_records"

Purpose = Literal["batch", "batch_output"]


class FileRecord(BaseModel):
    """Facts about a file beside its content and its id."""

    filename: str
    purpose: Purpose
    num_bytes: int


class FileStore:
    """The files in a storage."""

    def __init__(self, storage: ObjectStorage) -> None:
        self.storage = storage

    async def add(
        self,
        tenant: str,
        name: str,
        file: BinaryIO,
        filename: str,
        purpose: Purpose,
        on_full: OnFull = "refuse",
    ) -> FileRecord:
        """Keep a file under an id; it exists once all of it is there.

        Raises:
            ApiError: see `ObjectStorage.put_file`.
        """
        num_bytes = await self.storage.put_file(tenant, _CONTENTS, name, file, on_full)
        record = FileRecord(filename=filename, purpose=purpose, num_bytes=num_bytes)
        content = record.model_dump_json().encode()
        await self.storage.put(tenant, _RECORDS, name, content, on_full="exceed")
        return record

    async def find(self, tenant: str, name: str) -> FileRecord | None:
        """Return the record of a file, if there is one."""
        return (await self.find_all(tenant, [name])).get(name)

    async def find_all(self, tenant: str, names: Sequence[str]) -> dict[str, FileRecord]:
        """Return the records of some files by their ids."""
        found = await self.storage.get_all(tenant, _RECORDS, names)
        return {name: FileRecord.model_validate_json(each) for name, each in found.items()}

    async def names(self, tenant: str) -> list[str]:
        """Return the ids of all files, the oldest first."""
        return await self.storage.names(tenant, _RECORDS)

    def open(self, tenant: str, name: str) -> BinaryIO:
        """Open a file's content; see `ObjectStorage.open`."""
        return self.storage.open(tenant, _CONTENTS, name)

    async def delete(self, tenant: str, name: str) -> bool:
        """Delete a file; return whether there was one."""
        was_there = await self.storage.delete(tenant, _RECORDS, name)
        await self.storage.delete(tenant, _CONTENTS, name)
        return was_there

    def expires_at(self, name: str) -> int:
        """Return the time in seconds since 1970 at which a file or other object ends."""
        return int(made_at(name) + self.storage.settings.lifetime_s)


_Item = TypeVar("_Item")


def page_of(items: Sequence[_Item], after: _Item | None, limit: int) -> tuple[list[_Item], bool]:
    """Return the items of a page in order, and whether there are more behind it.

    Raises:
        ApiError: status 400: ``after`` is none of the items.
    """
    start = 0
    if after is not None:
        if after not in items:
            raise invalid_value("after", "there is no such object; give the last one's id")
        start = items.index(after) + 1
    return list(items[start : start + limit]), start + limit < len(items)


def no_storage(what: str) -> ApiError:
    """Return the error for what a server without storage cannot do."""
    message = f"{what}: this server keeps nothing; set storage.path in its settings"
    return ApiError(404, message, code="no_storage")
