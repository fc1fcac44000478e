"""Runs one batch, and goes on where another process has left it."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from tempfile import TemporaryFile
from typing import IO, BinaryIO

import httpx
from pydantic_core import from_json

from mars_serve.api.keys import Caller
from mars_serve.config.settings import LimitSettings
from mars_serve.http.batches.lines import (
    Line,
    LineError,
    LineProblem,
    answer_line,
    check_lines,
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

_READ_LINES = 16
"""Lines that are read at once."""
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
    pace: Pace = Pace()
    checks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Bounds the storage's threads that check inputs, which others wait for."""


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
        self._in_thread = store.files.storage.in_thread
        self._means = means
        self._gate = Gate(means.num_slots)
        self._done = set[int]()
        """Numbers of the lines that have an answer."""
        self._part = list[bytes]()
        """Answers that are not written yet."""
        self._part_bytes = 0
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
        keeper = asyncio.create_task(self._keep())
        work = asyncio.create_task(self._work())
        try:
            await asyncio.wait({keeper, work}, return_when=asyncio.FIRST_COMPLETED)
            for task in (keeper, work):
                if task.done():
                    task.result()
        finally:
            keeper.cancel()
            work.cancel()
            await asyncio.gather(keeper, work, return_exceptions=True)
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
        try:
            (await self._in_thread(self._input)).close()
        except FileNotFoundError:
            reason = "the input file is gone; upload it and create the batch again"
            self._record.errors = [LineError("input_file_gone", reason)]
            await self._finish("failed")  # with the answers that there are
            return
        if not self._record.total and not await self._check():
            return
        self._record.completed = self._record.failed = 0
        async for number, is_right, _ in self._kept():
            self._note(number, is_right=is_right)
        await self._see_end()
        await self._answer_until_ended()
        await self._write()
        await self._finish(self._outcome)

    async def _fail(self, errors: list[LineError]) -> None:
        self._record.errors = errors
        await self._end("failed")

    async def _end(self, outcome: Outcome) -> None:
        await self._hold()
        self._record.enter(outcome)
        await self._tell()
        await self._store.clear(self._record.tenant, self._name)

    async def _check(self) -> bool:
        """Check the input; return whether it can be answered."""
        limits, record = self._means.limits, self._record

        def check() -> tuple[int, list[LineError]]:
            with self._input() as file:
                return check_lines(file, record.endpoint, limits.body_bytes, limits.body_values)

        async with self._means.checks:
            total, errors = await self._in_thread(check)
        if errors:
            await self._fail(errors)
            return False
        record.total = total
        record.enter("in_progress")
        await self._tell()
        return True

    def _input(self) -> BinaryIO:
        return self._store.files.open(self._record.tenant, self._record.input_file)

    async def _keep(self) -> None:
        """Say that this process is alive, write what is answered, and see whether to end."""
        while True:
            await asyncio.sleep(self._means.pace.beat_s)
            await self._hold()
            beaten = self._lease.model_copy(update={"beat": self._lease.beat + 1})
            await self._store.put_lease(self._name, beaten)
            self._lease = beaten
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
        cancelled_at = await self._store.cancelled_at(self._record.tenant, self._name)
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
        lines = asyncio.Queue[tuple[int, bytes] | None](self._means.num_slots)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._means.num_slots):
                group.create_task(self._answer_some(lines))
            async for line in self._unanswered():
                await lines.put(line)
            for _ in range(self._means.num_slots):
                await lines.put(None)

    async def _unanswered(self) -> AsyncGenerator[tuple[int, bytes]]:
        file = await self._in_thread(self._input)
        numbered = numbered_lines(file, self._means.limits.body_bytes)
        try:
            while some := await self._in_thread(lambda: list(islice(numbered, _READ_LINES))):
                for number, content in some:
                    if number not in self._done:
                        yield number, content
        finally:
            file.close()

    async def _answer_some(self, lines: asyncio.Queue[tuple[int, bytes] | None]) -> None:
        while (found := await lines.get()) is not None:
            number, content = found
            status, answer = await self._answer(content)
            is_right = status == 200
            self._part.append(b"%d %d %b\n" % (number, is_right, answer))
            self._part_bytes += len(answer)
            self._note(number, is_right=is_right)
            if self._part_bytes > _PART_BYTES:
                await self._write()

    def _note(self, number: int, *, is_right: bool) -> None:
        if number not in self._done:
            self._done.add(number)
            self._record.completed += is_right
            self._record.failed += not is_right

    async def _answer(self, content: bytes) -> tuple[int, bytes]:
        """Return the status of a line's answer, and its line in the output."""
        try:
            line = await self._in_thread(self._parsed, content)
        except LineProblem as problem:  # a request by the limits of another time
            name = from_json(content)["custom_id"]
            self._means.telemetry.count_batch_line(None, is_right=False)
            return 400, unanswered_line(name, problem.code, str(problem))
        response = await self._response(line)
        model, is_right = response.extensions["model"], response.status_code == 200
        self._means.telemetry.count_batch_line(model, is_right=is_right)
        request_id = response.headers.get("x-request-id")
        return response.status_code, answer_line(
            line.custom_id, response.status_code, request_id, response.content
        )

    async def _response(self, line: Line) -> httpx.Response:
        """Return the response to a line, sent again while the key or the server has no room."""
        has_deadline = "deadline_ms" in line.body

        async def post() -> httpx.Response:
            caller = await self._caller()
            if caller is None:
                await self._see_end()
                await asyncio.Event().wait()  # until this is cancelled
            assert caller is not None
            body = request_body(line, caller.tiers)
            async with self._gate, self._means.slots:
                response = await self._means.requests.post(line.url, body, caller)
            await self._gate.learn(is_refused=is_refused(response) and not has_deadline)
            return response

        return await post_until_served(post, 0 if has_deadline else math.inf)

    async def _write(self) -> None:
        """Write the answers that are not written yet."""
        async with self._writing:
            part, self._part, self._part_bytes = self._part, [], 0
            try:
                if part:
                    await self._store.put_part(self._record.tenant, self._name, b"".join(part))
            except BaseException:  # cancelled, mostly; what is there twice then counts once
                self._part[:0] = part
                raise

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
            with suppress(LineProblem):  # it was a request by the limits of another time
                line = self._parsed(content)
                errors.write(unanswered_line(line.custom_id, code, reason) + b"\n")
            self._note(number, is_right=False)

    def _parsed(self, content: bytes) -> Line:
        limits = self._means.limits
        return parse_line(content, limits.body_bytes, limits.body_values)
