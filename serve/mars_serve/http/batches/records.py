"""Records, leases and parts of batches, which are kept beside their files.

The record of a batch is written by its creator, and then by the one process that runs it, which
says in the batch's *lease* that it is alive. A wish to cancel it and parts of its answers are
objects of their own, so that no two processes change the same one.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel

from mars_serve.api.errors import ApiError
from mars_serve.http.batches.lines import LineError
from mars_serve.storage.files import FileStore
from mars_serve.storage.objects import new_id

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
Outcome = Literal["failed", "completed", "expired", "cancelled"]
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})

_RECORDS, _CANCELS, _LEASES = "batches", "batch_cancels", "batch_leases"
_MOST_UNFINISHED = 100
"""Most batches of a tenant that have not ended."""
_RETRY_AFTER_S = 60
_SERVER = "server"  # no tenant has this name: keys' begin with "key:" or "tenant:"


class BatchRecord(BaseModel):
    """A batch, but for its id."""

    key: str
    """Name of the key that created it."""
    tenant: str
    endpoint: Endpoint
    input_file: str
    """Id of its file, as the storage has it; so are those below."""
    output_file: str | None = None
    error_file: str | None = None
    """Made as the batch ends, so that files live their own lifetime; None without any answer."""
    completion_window: str
    expires_at: int
    """Time in seconds since 1970, here and below."""
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[Status, int] = {}
    """Times at which it had other states than the first."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[LineError] = []

    def enter(self, status: Status) -> None:
        """Note that the batch has come into a state now."""
        self.status = status
        self.times.setdefault(status, int(time.time()))


class Lease(BaseModel):
    """Says which process runs a batch; one that no longer changes is of a process that is gone."""

    tenant: str
    expires_at: int
    owner: str = ""
    """Random id of the process's, empty for a batch that nobody runs."""
    beat: int = 0


class BatchStore:
    """The batches in a storage."""

    def __init__(self, files: FileStore) -> None:
        self.files = files
        self._storage = files.storage
        self._creating = Counter[str]()
        """Batches that are being created, by tenant."""

    async def create(self, record: BatchRecord) -> str:
        """Keep a new batch to be run; return its id.

        Raises:
            ApiError: status 429: the tenant has too many that have not ended, or no room.
        """
        name, tenant = new_id(), record.tenant
        self._creating[tenant] += 1
        try:
            num_unfinished = await self._num_unfinished(tenant)
            if num_unfinished + self._creating[tenant] > _MOST_UNFINISHED:
                reason = f"{num_unfinished} of this key have not ended, and {_MOST_UNFINISHED} may"
                message = f"batches: {reason}; wait for some to end, or cancel them"
                raise ApiError(429, message, code="too_many_batches", retry_after_s=_RETRY_AFTER_S)
            # a batch without a lease would never run; a lease without a batch is taken away
            await self.put_lease(name, Lease(tenant=tenant, expires_at=record.expires_at))
            content = record.model_dump_json().encode()
            await self._storage.put(tenant, _RECORDS, name, content)
        finally:
            self._creating -= Counter([tenant])  # also forgets those without any
        return name

    async def _num_unfinished(self, tenant: str) -> int:
        leased = {*await self.unfinished()} & {*await self.names(tenant)}
        if len(leased) + self._creating[tenant] <= _MOST_UNFINISHED:
            return len(leased)
        # a batch keeps its lease for a moment after its record says that it has ended
        records = await self.find_all(tenant, [*leased])
        return sum(each.status not in ENDED for each in records.values())

    async def update(self, name: str, record: BatchRecord) -> None:
        """Write the record of a batch that this process runs."""
        content = record.model_dump_json().encode()
        await self._storage.put(record.tenant, _RECORDS, name, content, on_full="exceed")

    async def names(self, tenant: str) -> list[str]:
        """Return the ids of all batches, the oldest first."""
        return await self._storage.names(tenant, _RECORDS)

    async def find_all(self, tenant: str, names: Sequence[str]) -> dict[str, BatchRecord]:
        """Return batches by their ids."""
        found = await self._storage.get_all(tenant, _RECORDS, names)
        return {name: BatchRecord.model_validate_json(each) for name, each in found.items()}

    async def cancel(self, name: str) -> None:
        """Ask whoever runs a batch to end it."""
        now = b"%d" % time.time()
        await self._storage.put(_SERVER, _CANCELS, name, now, on_full="exceed")

    async def cancelled_at(self, name: str) -> int | None:
        """Return the time at which somebody asked to cancel a batch; None if nobody did."""
        found = await self._storage.get(_SERVER, _CANCELS, name)
        return None if found is None else int(found)

    async def cancelled(self) -> set[str]:
        """Return the ids of all batches that somebody asked to cancel."""
        return {*await self._storage.names(_SERVER, _CANCELS)}

    async def unfinished(self) -> list[str]:
        """Return the ids of all batches of all tenants that have not ended, the oldest first."""
        return await self._storage.names(_SERVER, _LEASES)

    async def leases(self, names: Sequence[str]) -> dict[str, Lease]:
        """Return the leases of those of some batches that have not ended, by id and in order."""
        found = await self._storage.get_all(_SERVER, _LEASES, names)
        return {name: Lease.model_validate_json(each) for name, each in found.items()}

    async def lease(self, name: str) -> Lease | None:
        """Return the lease of a batch; None if it has ended."""
        return (await self.leases([name])).get(name)

    async def put_lease(self, name: str, lease: Lease) -> None:
        """Write the lease of a batch."""
        content = lease.model_dump_json().encode()
        await self._storage.put(_SERVER, _LEASES, name, content, on_full="exceed")

    async def clear(self, tenant: str, name: str) -> None:
        """Delete what a batch that has ended no longer needs."""
        await self._storage.delete_all(tenant, _parts(name), await self.parts(tenant, name))
        await self._storage.delete(_SERVER, _CANCELS, name)
        await self._storage.delete(_SERVER, _LEASES, name)  # last, so that this is done again

    async def forget_cancels(self, names: Iterable[str]) -> None:
        """Delete wishes to cancel batches that had ended by then."""
        await self._storage.delete_all(_SERVER, _CANCELS, names)

    async def put_part(self, tenant: str, name: str, content: bytes) -> None:
        """Keep some answers of a batch."""
        await self._storage.put(tenant, _parts(name), new_id(), content, on_full="exceed")

    async def parts(self, tenant: str, name: str) -> list[str]:
        """Return the ids of a batch's parts, the oldest first."""
        return await self._storage.names(tenant, _parts(name))

    async def read_parts(self, tenant: str, name: str, parts: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of some parts."""
        return await self._storage.get_all(tenant, _parts(name), parts)


def _parts(name: str) -> str:
    return f"batch_parts/{name}"
