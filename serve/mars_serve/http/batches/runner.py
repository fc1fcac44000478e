"""Runs the batches of a storage that no other process runs."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from mars_serve.http.batches.records import ENDED, BatchStore, Lease
from mars_serve.http.batches.run import BatchRun, LeaseLost, Means
from mars_serve.storage.objects import made_at

_MOST_RUNS = 64
_MOST_RUNS_OF_TENANT = 4
"""Most batches that one process runs at once, and as many that it ends; further ones wait."""
_LOOKS = 10
"""Looks of which one asks who runs batches that wait as far as is known, for the dashboard."""
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


@dataclass(frozen=True)
class _Run:
    tenant: str
    is_over: bool
    """Whether it was cancelled or had expired before it was taken."""
    task: asyncio.Task[None]


def _is_over(lease: Lease, is_cancelled: bool) -> bool:
    return is_cancelled or time.time() >= lease.expires_at


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
    _runs: dict[str, _Run] = field(default_factory=dict)
    """Batches that run or end here, by id."""
    _num_looks: int = 0
    _seen: dict[str, tuple[Lease, float]] = field(default_factory=dict)
    """Others' leases, each with the time at which it was first seen so, by this process's clock."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run batches within the block; those that have not ended then are given up to others."""
        tasks = [asyncio.create_task(each) for each in (self._look(), self._sweep())]
        try:
            yield
        finally:
            tasks += [run.task for run in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            try:
                await self._take()
            except Exception:  # storage fails in many ways, and may be back later
                _log.exception("batches cannot be looked up; trying again")
                await asyncio.sleep(_PAUSE_S)
            await asyncio.sleep(self.means.pace.look_s)

    async def _take(self) -> None:
        """Take the batches that nobody runs, as far as there is room for them."""
        cancelled = await self.store.cancelled()
        names = await self.store.unfinished()
        await self.store.forget_cancels(cancelled.difference(names))
        self._seen = {name: self._seen[name] for name in self._seen.keys() & names}
        self._num_looks += 1
        asks_all = self._num_looks % _LOOKS == 0

        def is_asked(name: str) -> bool:
            lease, _ = self._seen.get(name, (None, 0.0))
            if lease is None or lease.owner or asks_all:  # what others run may be free by now
                return True
            return self._has_room(lease, name in cancelled)

        asked = [name for name in names if name not in self._runs and is_asked(name)]
        for name, lease in (await self.store.leases(asked)).items():
            is_cancelled = name in cancelled
            if self._is_free(name, lease) and self._has_room(lease, is_cancelled):
                task = asyncio.create_task(self._run(name, lease))
                self._runs[name] = _Run(lease.tenant, _is_over(lease, is_cancelled), task)
        owned = {name for name, (lease, _) in self._seen.items() if lease.owner}
        num_running = len((owned | self._runs.keys()).intersection(names))
        oldest_s = min(map(made_at, names), default=None)
        self.unfinished = Unfinished(num_running, len(names) - num_running, oldest_s)

    async def _sweep(self) -> None:
        while True:
            with suppress(Exception):  # the next time may do
                await self.store.files.storage.delete_expired()
            await asyncio.sleep(_SWEEP_S)

    def _is_free(self, name: str, lease: Lease) -> bool:
        """Return whether nobody runs a batch, as far as can be seen."""
        now_s = time.monotonic()
        known, since_s = self._seen.get(name, (None, now_s))
        if known != lease:
            self._seen[name] = (lease, now_s)
            since_s = now_s
        return not lease.owner or now_s - since_s >= self.means.pace.lease_s

    def _has_room(self, lease: Lease, is_cancelled: bool) -> bool:
        """Return whether a batch may run here, or end here if it need not be answered."""
        is_over = _is_over(lease, is_cancelled)
        tenants = [run.tenant for run in self._runs.values() if run.is_over == is_over]
        num_own = tenants.count(lease.tenant)
        return num_own < _MOST_RUNS_OF_TENANT and len(tenants) + num_own < _MOST_RUNS

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
