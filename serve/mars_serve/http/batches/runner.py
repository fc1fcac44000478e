"""Runs the batches of a storage that no other process runs."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from mars_serve.http.batches.records import ENDED, BatchStore, Lease
from mars_serve.http.batches.run import BatchRun, LeaseLost, Means
from mars_serve.storage.objects import made_at

_MOST_RUNS = 16
_MOST_RUNS_OF_TENANT = 4
"""Most batches that one process runs at once; further ones wait."""
_CREATE_S = 60.0
"""Longest time in seconds that creating a batch takes."""
_PAUSE_S = 10.0
"""Wait behind a failure of the storage, in seconds."""
_SWEEP_S = 3600.0
"""Seconds between two deletions of what is too old."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unfinished:
    """Batches of all keys that have not ended."""

    num_running: int = 0
    num_waiting: int = 0
    oldest_s: float | None = None
    """Time in seconds since 1970 at which the oldest was created."""


@dataclass
class BatchRunner:
    """Takes batches, and answers their lines as requests of the application's own clients.

    Storage has no locks, so two processes may run the same batch for a while; then both answer, and
    of each line the first answer counts.
    """

    store: BatchStore
    means: Means
    unfinished: Unfinished = field(default_factory=Unfinished)
    """Batches that had not ended at the latest look."""
    _owner: str = field(default_factory=lambda: secrets.token_hex(8))
    _runs: dict[str, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)
    """Tenant and task of each batch that runs here, by id."""
    _seen: dict[str, tuple[Lease, float]] = field(default_factory=dict)
    """Others' leases, each with the time at which it was first seen so, by this process's clock."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run batches within the block; those that have not ended then are given up to others."""
        tasks = [asyncio.create_task(each) for each in (self._look(), self._sweep())]
        try:
            yield
        finally:
            tasks += [task for _, task in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            try:
                leases = await self.store.leases()
                num_running = sum(bool(each.owner) for each in leases.values())
                oldest_s = min(map(made_at, leases), default=None)
                self.unfinished = Unfinished(num_running, len(leases) - num_running, oldest_s)
                self._seen = {name: self._seen[name] for name in self._seen.keys() & leases}
                for name, lease in leases.items():
                    if name not in self._runs and self._is_free(name, lease):
                        self._start(name, lease)
            except Exception:  # storage fails in many ways, and may be back later
                _log.exception("batches cannot be looked up; trying again")
                await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(self.means.pace.look_s)

    async def _sweep(self) -> None:
        while True:
            with suppress(Exception):  # the next time may do
                await self.store.files.storage.delete_expired()
            await asyncio.sleep(_SWEEP_S)

    def _is_free(self, name: str, lease: Lease) -> bool:
        """Return whether nobody runs a batch, as far as can be seen, and there is room for it."""
        now_s = time.monotonic()
        known, since_s = self._seen.get(name, (None, now_s))
        if known != lease:
            self._seen[name] = (lease, now_s)
            since_s = now_s
        if lease.owner and now_s - since_s < self.means.pace.lease_s:
            return False
        of_tenant = Counter(tenant for tenant, _ in self._runs.values())[lease.tenant]
        return len(self._runs) < _MOST_RUNS and of_tenant < _MOST_RUNS_OF_TENANT

    def _start(self, name: str, lease: Lease) -> None:
        task = asyncio.create_task(self._run(name, lease))
        self._runs[name] = (lease.tenant, task)

    async def _run(self, name: str, lease: Lease) -> None:
        """Take a batch, and run it if nobody else took it at the same time."""
        try:
            mine = lease.model_copy(update={"owner": self._owner, "beat": lease.beat + 1})
            await self.store.put_lease(name, mine)
            await asyncio.sleep(self.means.pace.settle_s)
            if await self.store.lease(name) != mine:
                return
            record = (await self.store.find_all(lease.tenant, [name])).get(name)
            if record is not None and record.status not in ENDED:
                await BatchRun(self.store, name, record, mine, self.means).run()
            elif record is not None or time.time() - made_at(name) > _CREATE_S:
                await self.store.clear(lease.tenant, name)
            else:  # it is being created
                await self.store.put_lease(name, lease)
        except LeaseLost as lost:
            _log.warning("%s", lost)
        except Exception:  # storage fails in many ways; somebody takes the batch again later
            _log.exception("batch %s has failed here; it goes on later", name)
            await asyncio.sleep(_PAUSE_S)
        finally:
            del self._runs[name]
