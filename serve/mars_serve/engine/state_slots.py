"""The slots that hold the states of recurrent layers: those of running requests, and snapshots.

A state stands for all tokens before it, and nothing can be taken out of it again. So a step leaves
the state that it reads as it is and writes another, and a prefix that requests share is found only
where a snapshot of the state was taken.
"""

from collections.abc import Collection, Sequence

from mars_serve.engine.pages import PagePool
from mars_serve.engine.request import Request, RowState
from mars_serve.engine.scheduled_row import ScheduledRow


class StateSlots:
    """Slots of running requests, and of snapshots at borders of pages.

    A request holds the slot that its next row reads: its own, or a snapshot that others may read as
    well. During a step it also holds the slot that its row writes, which takes the place of the
    other once the step has succeeded. The drafts that were right are in the log of that slot until
    the next step absorbs them.

    A row takes snapshots at the last border of a prompt that others can share, where texts part,
    and at the last border that it passes. The last one goes first once the next is there, so that
    a request that has ended or was preempted leaves its newest. Snapshots lie in the pool under the
    key of the page before their border. They use slots that no request needs, and there are none
    where these are used up.
    """

    def __init__(self, pool: PagePool, num_snapshots: int) -> None:
        """Share a pool that has ``num_snapshots`` slots beside two for each running request."""
        self.pool, self.num_snapshots = pool, num_snapshots
        self._start = pool.num_pages  # the state before any text; nobody writes there
        self._num_spare = num_snapshots  # slots for snapshots that no step is writing

    @staticmethod
    def num_absorbed(request: Request) -> int:
        """Return how many tokens the state stands for in the slot that a request reads next."""
        return request.num_cached - (request.state.num_right if request.state else 0)

    def ends(self, keys: Sequence[bytes]) -> set[int]:
        """Return behind how many of these pages a request can go on, 0 included."""
        return {0, *(count for count, key in enumerate(keys, 1) if self.pool.has(key))}

    def take(self, request: Request, key: bytes) -> None:
        """Let a request go on behind a page that has a snapshot."""
        self.release(request)
        (snapshot,) = self.pool.match([key])
        request.state = RowState(snapshot, 0, self._start, [])

    def reserve(self, row: ScheduledRow, keys: Sequence[bytes]) -> None:
        """Hold the slots that a row writes.

        ``keys`` are those of the full pages behind the state that the row reads, up to its last
        committed token; without them it takes no snapshots.
        """
        state = row.request.state
        if state is None:
            state = row.request.state = RowState(self._start, 0, self._start, [])
        if state.write == self._start:  # otherwise left by a step that failed, as snapshots may be
            (state.write,) = self.pool.allocate(1)
        self._drop_snapshots(state)
        if not keys:
            return
        size, begin = self.pool.page_size, self.num_absorbed(row.request)
        first = begin // size + 1
        last = first + len(keys) - 1
        for border in sorted({*self._lasting(row.request), *row.borders, last}):
            if first <= border <= last and not self.pool.has(keys[border - first]):
                if not self._num_spare:
                    break
                self._num_spare -= 1
                (slot,) = self.pool.allocate(1)
                state.snapshots.append((border * size - begin, slot))

    def commit(self, request: Request, num_right: int) -> None:
        """Swap a request's slots and offer its row's snapshots to others.

        ``num_right`` leading drafts of the row were right, and are not yet counted as cached.
        """
        state = request.state
        assert state is not None, "a row that has run was reserved"
        begin, snapshots = self.num_absorbed(request), state.snapshots
        for count, slot in snapshots:
            border = (begin + count) // self.pool.page_size
            self.pool.release([self.pool.register(slot, request.page_keys[border - 1])])
        if snapshots:
            self._roll(request, border)
        self._num_spare += len(snapshots)
        self._drop(state.read)
        request.state = RowState(state.write, num_right, self._start, [])

    def release(self, request: Request) -> None:
        """Give back all slots of a request."""
        state = request.state
        if state is not None:
            self._drop_snapshots(state)
            self._drop(state.read)
            self._drop(state.write)
            request.state = None

    def trial(self, failed: Request) -> RowState:
        """Return what a row reads and writes that runs in place of one that has failed."""
        assert failed.state is not None, "a row that has run was reserved"
        return RowState(self._start, 0, failed.state.write, [])

    def check_integrity(self, running: Collection[Request]) -> None:
        """Prove the same as `Memory.check_integrity`."""
        held, num_snapshots, start = [], 0, self._start
        for request in running:
            state = request.state or RowState(start, 0, start, [])
            snapshots = [slot for _, slot in state.snapshots]
            held.append([slot for slot in (state.read, state.write) if slot != start] + snapshots)
            num_snapshots += len(snapshots)
            assert (state.read == start) == (request.num_cached == 0), f"{request.id}: no state"
            key = self.pool.key_of(state.read)
            if key is not None:
                index, inside = divmod(request.num_cached, self.pool.page_size)
                expected = request.page_keys[index - 1], 0, 0
                assert (key, inside, state.num_right) == expected, f"{request.id}: {state.read}"
            unread = [state.write, *snapshots]
            assert not any(map(self.pool.key_of, unread)), f"{request.id} writes what others read"
        self.pool.check_integrity(held)
        assert num_snapshots + self._num_spare == self.num_snapshots

    def _lasting(self, request: Request) -> tuple[int, int]:
        return request.num_shared, (request.num_prompt - 1) // self.pool.page_size

    def _roll(self, request: Request, border: int) -> None:
        """Let the snapshot before the newest go first if it is not a lasting one."""
        lasting, before = self._lasting(request), request.rolling
        if border not in lasting:
            request.rolling = border
            if before and before not in (border, *lasting):
                page = self.pool.match([request.page_keys[before - 1]])
                self.pool.release(page, goes_first=True)

    def _drop_snapshots(self, state: RowState) -> None:
        self._num_spare += len(state.snapshots)
        while state.snapshots:
            self._drop(state.snapshots.pop()[1])

    def _drop(self, slot: int) -> None:
        if slot != self._start:
            self.pool.release([slot])
