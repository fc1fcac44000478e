"""Work on clients' texts that would hold up the event loop: in few threads, by turns among keys.

However much one key sends, another's next text waits for what has begun only, and for none of the
texts that wait. A body takes room from its first byte until its texts are read, of which each key
may have as much as is free. So one that is alone fills half of it, and others always find room.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from mars_serve.api.errors import ApiError
from mars_serve.api.keys import Caller

LARGE = 2**18
"""Bytes of the largest body that is read beside others; larger ones are read one at a time."""
_SHORT = 4096  # bytes of a text that holds nobody up
_NUM_THREADS = 2
_REST = 3
"""Times the length of a turn for which its key waits behind it, where other keys are active. The
event loop reads the JSON of a body in one piece."""
_ACTIVE_S = 10.0
"""Seconds for which a key counts as active behind its last request."""
_RETRY_AFTER_S = 1

_Found = TypeVar("_Found")


class Rests:
    """Times in which keys get no turn, whatever line they wait in."""

    def __init__(self) -> None:
        self.num = Counter[str]()
        """Rests that have not ended, by key."""
        self.on_end = list[Callable[[], None]]()
        """Called whenever a rest has ended."""

    def begin(self, key: str, begun_s: float) -> None:
        """Let a key rest from now on, behind a turn that began at a time."""
        loop = asyncio.get_running_loop()
        self.num[key] += 1
        loop.call_later(_REST * (loop.time() - begun_s), self._end, key)

    def _end(self, key: str) -> None:
        self.num[key] -= 1
        for give in self.on_end:
            give()


class Line:
    """Threads for which work waits by turns among keys.

    There are ``num`` threads, and as many turns at once. While ``has_others`` says that keys other
    than a caller's are active, the caller's key has fewer, and rests after each turn for `_REST`
    times as long as the turn took, in all lines that share ``rests``.
    """

    def __init__(
        self, num: int, name: str, has_others: Callable[[Caller], bool], rests: Rests | None = None
    ) -> None:
        self._num = self._num_free = num
        self._has_others = has_others
        self._rests = rests or Rests()
        self._rests.on_end.append(self._give)
        self._threads = ThreadPoolExecutor(num, name)
        self._most = 1
        """Turns that one key may have at once."""
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Turns that are waited for, by key; the key whose turn was last is the last."""

    async def take(self, caller: Caller) -> float:
        """Wait for a turn, which lasts until `end` or `run`; return the time at which it began."""
        self._most = max(self._num - 1, 1) if self._has_others(caller) else self._num
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(caller.name, deque()).append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came in the same instant
                self.end(caller, loop.time())
            raise
        return loop.time()

    def end(self, caller: Caller, begun_s: float) -> None:
        """End a turn that began at a time; others get it, and the same key once it has rested.

        So a key's texts take but a part of the processor and of the interpreter.
        """
        self._num_free += 1
        self._held[caller.name] -= 1
        if self._has_others(caller):
            self._rests.begin(caller.name, begun_s)
        self._give()

    async def run(self, caller: Caller, begun_s: float, work: Callable[[], _Found]) -> _Found:
        """Do some work in a turn that began at a time, and end the turn.

        Nothing stops a thread, so work whose request was cancelled keeps its turn.
        """
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(work)
        except RuntimeError:  # no thread can start
            self.end(caller, begun_s)
            raise
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self.end, caller, begun_s))
        return await asyncio.wrap_future(future)

    def _give(self) -> None:
        while self._num_free:
            keys = (key for key in self._waiting if not self._rests.num[key])
            key = next((key for key in keys if self._held[key] < self._most), None)
            if key is None:
                return
            turns = self._waiting.pop(key)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns
            if not turn.done():
                self._num_free -= 1
                self._held[key] += 1
                turn.set_result(None)


@dataclass(eq=False)
class Load:
    """Room and turn that a request's body takes until its texts are read."""

    caller: Caller
    size: int = 0
    """Bytes that have arrived."""
    line: Line | None = None
    """The line in which it is the body's turn; None for a short one, or while it waits."""
    begun_s: float = 0.0
    """Time on the event loop's clock at which its turn began."""

    @property
    def is_large(self) -> bool:
        """Whether it is read while no other large one is."""
        return self.size > LARGE


class TextThreads:
    """Threads that read clients' texts and write large responses.

    A body that is not short has its turn from before its JSON is read, since the event loop does
    that, until its texts are read. So the loop never reads many of one key in a row. Large bodies
    may take ``room`` bytes together.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._taken = Counter[str]()
        """Bytes by the name of the key whose bodies take them."""
        self._active = dict[str, float]()
        """Time of each key's last request; the last one is the last."""
        rests = Rests()
        self._line = Line(_NUM_THREADS, "texts", self._has_others, rests)
        # A long text takes a hundred times its own memory, so there is one at a time. It has a
        # thread of its own for shorter ones not to wait for it.
        self._large = Line(1, "large-texts", self._has_others, rests)

    @contextmanager
    def load(self, caller: Caller) -> Iterator[Load]:
        """Yield the load of a body that is to arrive; the block ends it if nothing else does."""
        self._active.pop(caller.name, None)
        self._active[caller.name] = time.monotonic()
        load = Load(caller)
        try:
            yield load
        finally:
            self.end(load)

    def add(self, load: Load, num_bytes: int) -> None:
        """Count bytes that have arrived of a body.

        Raises:
            ApiError: status 503: other bodies of the key, or of all keys, take its room.
        """
        load.size += num_bytes
        name, room = load.caller.name, self._room
        self._taken[name] += num_bytes
        if not load.is_large:
            room *= 2  # small ones go on beside large ones that arrive slowly
        taken = self._taken.total() + (0 if load.caller.is_alone else self._taken[name])
        if taken > room and self._taken[name] > load.size:
            reason = "too many large ones arrive at once; try again shortly"
            raise ApiError(503, f"body: {reason}", code="busy", retry_after_s=_RETRY_AFTER_S)

    async def begin(self, load: Load) -> None:
        """Wait until a body that has arrived, or grown, may be read, which lasts until `end`."""
        line = self._large if load.is_large else self._line
        if load.size <= _SHORT or load.line is line:
            return
        self.end_turn(load)
        load.begun_s = await line.take(load.caller)
        load.line = line

    def end(self, load: Load) -> None:
        """Give back what a body takes, once its texts are read or it is given up."""
        name = load.caller.name
        self._taken[name] -= load.size
        if not self._taken[name]:
            del self._taken[name]
        load.size = 0
        self.end_turn(load)

    def end_turn(self, load: Load) -> None:
        """End a body's turn, which goes on to take its room."""
        if load.line is not None:
            load.line.end(load.caller, load.begun_s)
            load.line = None

    async def read(self, load: Load, size: int, work: Callable[[], _Found]) -> _Found:
        """Do the last work on a body, which takes as long as on a text of ``size`` bytes."""
        line, load.line = load.line, None  # the work has the turn now
        try:
            if line is None:
                return await self.write(load.caller, size, work)
            return await line.run(load.caller, load.begun_s, work)
        finally:
            self.end(load)

    async def write(self, caller: Caller, size: int, work: Callable[[], _Found]) -> _Found:
        """Do work that takes as long as on a text of ``size`` bytes: at once if that is short."""
        if size <= _SHORT:
            return work()
        begun_s = await self._line.take(caller)
        return await self._line.run(caller, begun_s, work)

    def _has_others(self, caller: Caller) -> bool:
        others = (at for name, at in reversed(self._active.items()) if name != caller.name)
        return time.monotonic() - next(others, float("-inf")) < _ACTIVE_S


async def beside(load: Load, work: Callable[[], _Found]) -> _Found:
    """Do some work on a body, beside the event loop if it is a large one, which has its turn."""
    return await asyncio.to_thread(work) if load.is_large else work()
