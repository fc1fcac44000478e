"""Runs one batch, and goes on where another process has left it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import IO, BinaryIO

import httpx

from mars_serve.api.keys import Caller
from mars_serve.api.text_threads import TextThreads
from mars_serve.config.settings import LimitSettings
from mars_serve.http.batches.lines import (
    LineError,
    LineProblem,
    answer_line,
    check_lines,
    custom_id_of,
    numbered_lines,
    parse_line,
    request_body,
    unanswered_line,
)
from mars_serve.http.batches.records import (
    ENDED,
    BatchRecord,
    BatchStore,
    Lease,
    Outcome,
)
from mars_serve.http.in_process import OwnRequests, is_refused, post_until_served
from mars_serve.observability.ingress_telemetry import IngressTelemetry
from mars_serve.storage.objects import new_id

_READ_LINES, _READ_BYTES = 16, 2**20
"""Lines that are read at once, and the bytes that end a smaller number."""
_LINES_BYTES = 8 * 2**20
"""Bytes of a batch's lines that wait or are answered at a time; one line may have more."""
_READ_PARTS = 4
"""Parts that are read at once."""
_PART_BYTES = 4 * 2**20
"""Size of answers that are written before further ones are taken."""


@dataclass(frozen=True)
class Pace:
    """Times of running batches, in seconds."""

    look_s: float = 2.0
    """Between two looks for batches that nobody runs."""
    beat_s: float = 3.0
    """Between two signs of life, at which answers are written, too."""
    lease_s: float = 20.0
    """Without a sign of life after which a process counts as gone."""
    settle_s: float = 1.0
    """Wait for others that try to take the same batch."""


@dataclass(frozen=True)
class Means:
    """Means with which all batches of a process are run."""

    requests: OwnRequests
    caller_of: Callable[[str], Awaitable[Caller | None]]
    """Returns the caller with the name of a key, as it is now; None if the key is gone."""
    limits: LimitSettings
    telemetry: IngressTelemetry
    num_slots: int
    """Largest number of lines that are answered at a time."""
    slots: asyncio.Semaphore
    texts: TextThreads
    pace: Pace = Pace()


class Gate:
    """Lets as many requests go at once as are not refused.

    It halves their number behind a refusal, and lets one more go once so many have passed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = float(most)
        self._num_active = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_active < int(self._limit))
            self._num_active += 1

    async def __aexit__(self, *_: object) -> None:
        self._num_active -= 1
        async with self._changed:
            self._changed.notify()

    async def learn(self, *, is_refused: bool) -> None:
        """Note how a request has ended that went through."""
        if is_refused:
            self._limit = max(1.0, min(self._limit, self._num_active + 1) / 2)
            return
        self._limit = min(self._limit + 1 / self._limit, self._most)
        async with self._changed:
            self._changed.notify()


class LeaseLost(Exception):
    """Raised where another process has taken a batch."""


class BatchRun:
    """A batch that this process runs, with its record and lease as they were found."""

    def __init__(
        self, store: BatchStore, name: str, record: BatchRecord, lease: Lease, means: Means
    ) -> None:
        self._store = store
        self._name = name
        self._record = record
        self._lease = lease
        self._in_thread = partial(store.files.storage.short.run, record.tenant)
        self._means = means
        self._gate = Gate(means.num_slots)
        self._done = set[int]()
        """Numbers of the lines that have an answer."""
        self._part = list[bytes]()
        """Answers that are not written yet."""
        self._part_bytes = 0
        self._line_bytes = 0
        """Bytes of the lines that wait or are answered."""
        self._has_room = asyncio.Event()
        self._writing = asyncio.Lock()
        self._told = (0, 0)
        """Counts in the record that was written last."""
        self._is_ending = asyncio.Event()
        self._outcome: Outcome = "completed"

    async def run(self) -> None:
        """Run the batch to its end; if this is cancelled or fails, others may go on.

        Raises:
            LeaseLost: another process runs it.
            Exception: storage has failed.
        """
        tasks = [asyncio.create_task(each) for each in (self._beat(), self._keep(), self._work())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._record.status not in ENDED:
                await self._give_up()

    async def _give_up(self) -> None:
        """Keep the answers so far, and let another process take the batch at once."""
        with suppress(Exception):  # it takes the batch later then
            await self._hold()
            await self._write()
            free = self._lease.model_copy(update={"owner": ""})
            await self._store.put_lease(self._name, free)

    async def _work(self) -> None:
        self._record.completed = self._record.failed = 0
        async for number, is_right, _ in self._kept():
            self._note(number, is_right=is_right)
        await self._see_end()
        needs_input = self._outcome in ("completed", "expired")
        if needs_input and (errors := await self._errors()):
            self._record.errors, self._outcome = errors, "failed"
        elif needs_input:
            await self._answer_until_ended()
            await self._write()
        await self._finish(self._outcome)  # with the answers that there are

    async def _end(self, outcome: Outcome) -> None:
        await self._hold()
        self._record.enter(outcome)
        await self._tell()
        await self._store.clear(self._record.tenant, self._name)

    async def _errors(self) -> list[LineError]:
        """Check the input once; return why it cannot be answered."""
        limits, record = self._means.limits, self._record

        def check() -> tuple[int, list[LineError]]:
            with self._input() as file:
                if record.total:
                    return record.total, []
                return check_lines(file, record.endpoint, limits.body_bytes, limits.body_values)

        try:
            total, errors = await self._store.files.storage.long.run(record.tenant, check)
        except FileNotFoundError:
            reason = "the input file is gone; upload it and create the batch again"
            return [LineError("input_file_gone", reason)]
        if not errors and not record.total:
            record.total = total
            record.enter("in_progress")
            await self._tell()
        return errors

    def _input(self) -> BinaryIO:
        return self._store.files.open(self._record.tenant, self._record.input_file)

    async def _beat(self) -> None:
        """Say that this process is alive, however long writing answers takes."""
        while True:
            await asyncio.sleep(self._means.pace.beat_s)
            await self._hold()
            beaten = self._lease.model_copy(update={"beat": self._lease.beat + 1})
            await self._store.put_lease(self._name, beaten)
            self._lease = beaten

    async def _keep(self) -> None:
        """Write what is answered, and see whether to end."""
        while True:
            await asyncio.sleep(self._means.pace.beat_s)
            await self._write()
            counts = (self._record.completed, self._record.failed)
            if counts != self._told:
                await self._tell()
                self._told = counts
            await self._see_end()

    async def _tell(self) -> None:
        """Write the record; of two writes at once the older one might be the last."""
        async with self._writing:
            await self._store.update(self._name, self._record)

    async def _hold(self) -> None:
        """Raise `LeaseLost` if the batch is another process's by now, which may have ended it."""
        lease = await self._store.lease(self._name)
        if lease is None or lease.owner != self._lease.owner:
            raise LeaseLost(f"another process runs batch {self._name}")

    async def _see_end(self) -> None:
        """End the answering of a batch that is cancelled or expired, or whose key is gone."""
        cancelled_at = await self._store.cancelled_at(self._name)
        if cancelled_at is not None:
            self._record.times["cancelling"] = cancelled_at
            self._outcome = "cancelled"
        elif time.time() >= self._record.expires_at:
            self._outcome = "expired"
        elif await self._caller() is None:
            reason = "the key that created the batch is no longer one of this server's"
            self._record.errors = [LineError("invalid_api_key", reason)]
            self._outcome = "failed"
        else:
            return
        self._is_ending.set()

    async def _caller(self) -> Caller | None:
        """Return the batch's caller; None if its key is gone or another tenant's now."""
        caller = await self._means.caller_of(self._record.key)
        return caller if caller and caller.tenant == self._record.tenant else None

    async def _answer_until_ended(self) -> None:
        ending = asyncio.create_task(self._is_ending.wait())
        answering = asyncio.create_task(self._answer_all())
        try:
            await asyncio.wait({ending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
                self._outcome = "completed"
        finally:
            ending.cancel()
            answering.cancel()
            await asyncio.gather(ending, answering, return_exceptions=True)

    async def _answer_all(self) -> None:
        """Answer all lines that have no answer, some at a time."""
        least = _LINES_BYTES // self._means.num_slots  # so many that others only wait for them
        async with asyncio.TaskGroup() as group:
            async for number, content in self._unanswered():
                size = max(len(content), least)
                while self._line_bytes and self._line_bytes + size > _LINES_BYTES:
                    self._has_room.clear()
                    await self._has_room.wait()
                self._line_bytes += size
                group.create_task(self._answer_line(number, content, size))

    async def _unanswered(self) -> AsyncGenerator[tuple[int, bytes]]:
        file = await self._in_thread(self._input)
        lines = numbered_lines(file, self._means.limits.body_bytes)
        try:
            while some := await self._in_thread(_some_of, lines):
                for number, content in some:
                    if number not in self._done:
                        yield number, content
        finally:
            file.close()

    async def _answer_line(self, number: int, content: bytes, size: int) -> None:
        """Answer a line, and give back its room of ``size`` bytes."""
        status, answer = await self._answer(number, content)
        is_right = status == 200
        self._part.append(b"%d %d %b\n" % (number, is_right, answer))
        self._part_bytes += len(answer)
        self._note(number, is_right=is_right)
        if self._part_bytes > _PART_BYTES:
            await asyncio.shield(self._write())  # the end of the answering does not stop it
        self._line_bytes -= size
        self._has_room.set()

    def _note(self, number: int, *, is_right: bool) -> None:
        if number not in self._done:
            self._done.add(number)
            self._record.completed += is_right
            self._record.failed += not is_right

    async def _answer(self, number: int, content: bytes) -> tuple[int, bytes]:
        """Return the status of a line's answer, and its line in the output."""
        name = ""

        async def post() -> httpx.Response:
            nonlocal name
            while (caller := await self._caller()) is None:
                await self._see_end()
                await asyncio.sleep(self._means.pace.beat_s)
            async with self._gate:
                parse = partial(self._request, content, caller.tiers)
                # what it makes of a line is large, and gone before the next one is parsed
                name, url, body = await self._means.texts.write(caller, len(content), parse)
                async with self._means.slots:
                    response = await self._means.requests.post(url, body, caller)
            await self._gate.learn(is_refused=is_refused(response))
            return response

        try:
            response = await post_until_served(post)
        except LineProblem as problem:  # a request by the limits of another time
            name = await self._in_thread(custom_id_of, number, content)
            self._means.telemetry.count_batch_line(None, is_right=False)
            return 400, unanswered_line(name, problem.code, str(problem))
        status, request_id = response.status_code, response.headers.get("x-request-id")
        model = response.extensions["model"]
        self._means.telemetry.count_batch_line(model, is_right=status == 200)
        return status, answer_line(name, status, request_id, response.content)

    def _request(self, content: bytes, tiers: Collection[str]) -> tuple[str, str, bytes]:
        """Return custom_id, path and body of a line's request."""
        limits = self._means.limits
        line = parse_line(content, limits.body_bytes, limits.body_values)
        return line.custom_id, line.url, request_body(line, tiers)

    async def _write(self) -> None:
        """Write the answers that are not written yet."""
        async with self._writing:
            part = self._part.copy()
            if part:
                await self._store.put_part(self._record.tenant, self._name, b"".join(part))
                del self._part[: len(part)]  # not before: a write may fail or be cancelled
                self._part_bytes = sum(map(len, self._part))

    async def _kept(self) -> AsyncGenerator[tuple[int, bool, bytes]]:
        """Yield number and kind of each line's first answer, and its line in the output."""
        tenant, seen = self._record.tenant, set[int]()
        names = await self._store.parts(tenant, self._name)
        for start in range(0, len(names), _READ_PARTS):
            some = names[start : start + _READ_PARTS]
            parts = await self._store.read_parts(tenant, self._name, some)
            for name in some:
                await asyncio.sleep(0)  # a part may hold thousands of lines
                for line in parts[name].splitlines():
                    number, is_right, answer = line.split(b" ", 2)
                    if int(number) not in seen:
                        seen.add(int(number))
                        yield int(number), is_right == b"1", answer

    async def _finish(self, outcome: Outcome) -> None:
        """Make the output and error files of all answers, and end the batch."""
        record, files = self._record, self._store.files
        await self._hold()
        if outcome == "completed":
            record.enter("finalizing")
            await self._tell()
        with TemporaryFile() as output, TemporaryFile() as errors:
            async for _, is_right, answer in self._kept():
                (output if is_right else errors).write(answer + b"\n")
            if outcome == "expired":
                await self._add_expired(errors)
            await self._hold()
            record.output_file = (record.output_file or new_id()) if output.tell() else None
            record.error_file = (record.error_file or new_id()) if errors.tell() else None
            await self._tell()  # one that goes on here writes the same files
            for name, file, kind in (
                (record.output_file, output, "output"),
                (record.error_file, errors, "error"),
            ):
                if name:
                    filename = f"batch_{self._name}_{kind}.jsonl"
                    await files.add(
                        record.tenant, name, file, filename, "batch_output", on_full="exceed"
                    )
        await self._end(outcome)

    async def _add_expired(self, errors: IO[bytes]) -> None:
        """Add an error for each line that has no answer, and count them as failed."""
        code, reason = "batch_expired", "the batch expired before this request had an answer"
        async for number, content in self._unanswered():
            name = await self._in_thread(custom_id_of, number, content)
            errors.write(unanswered_line(name, code, reason) + b"\n")
            self._note(number, is_right=False)


def _some_of(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the next lines, and none at the end."""
    some, left = list[tuple[int, bytes]](), _READ_BYTES
    while left > 0 and len(some) < _READ_LINES and (line := next(lines, None)):
        some.append(line)
        left -= len(line[1])
    return some
