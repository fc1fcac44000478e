"""Sends the requests of a plan to a server and records what the clients see.

Each is sent at its time, without waiting for another one, unless a number of clients is given.
"""

from __future__ import annotations

import asyncio
import errno
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import httpx
from pydantic import ValidationError

from mars_platform.data.conversations import is_correct
from mars_serve.bench.load.answers import StreamEvent
from mars_serve.bench.load.plan import LoadPlan, PlannedRequest

REJECTIONS = (429, 503)
"""Statuses of rejected requests: the key's rate is exceeded, or the server is full."""
_JSON = {"Content-Type": "application/json"}
_PERIOD_S = 1.0
_TOO_MANY_FILES = (
    "sender: too many open files",
    "not the server's failure: this process may open no more connections; raise ulimit -Hn",
)


@dataclass
class SentRequest:
    """A request that was sent, and what its client saw; times are in seconds after the start."""

    request: PlannedRequest
    sent_s: float
    end_s: float | None = None
    """Time of the end; None while the request runs, and after an interrupt."""
    token_s: array[float] = field(default_factory=lambda: array("d"))
    """Times of the events with tokens."""
    status: int | None = None
    num_tokens: int = 0
    num_passes: int | None = None
    """Number of forward passes; None unless the request was served to its end."""
    threshold_mean: float | None = None
    """Mean τ over the passes; None unless the request was served to its end."""
    threshold_min: float | None = None
    """Lowest τ of a pass; None unless the request was served to its end."""
    said: int | None = None
    """Hash of the answer's text; None if the request was not served to its end."""
    correct: bool | None = None
    """Whether the answer is correct; None if it was not served or cannot be checked."""
    error: str | None = None
    message: str = ""

    @property
    def lateness_s(self) -> float:
        """Seconds by which the request was sent too late."""
        return self.sent_s - self.request.at_s

    @property
    def is_served(self) -> bool:
        """Whether the request was served to its end."""
        return self.end_s is not None and self.error is None

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token; infinite if the request was not served."""
        if self.end_s is None or not self.is_served:
            return float("inf")
        return (self.token_s[0] if self.token_s else self.end_s) - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the end; infinite if the request was not served."""
        if self.end_s is None or not self.is_served:
            return float("inf")
        return self.end_s - self.sent_s


@dataclass
class Replayed:
    """A plan that was sent, in whole or up to an interrupt."""

    plan: LoadPlan
    sent: list[SentRequest] = field(default_factory=list)
    """Requests in order of sending."""
    was_interrupted: bool = False
    """Whether an interrupt ended the test before all requests had ended."""

    @property
    def num_ended(self) -> int:
        """Number of requests that were served, rejected or failed."""
        return sum(each.end_s is not None for each in self.sent)


@dataclass
class Replay:
    """A running load test; its clock starts when the object is made."""

    client: httpx.AsyncClient
    """Client of the server, without a limit of connections."""
    plan: LoadPlan
    timeout_s: float
    """Seconds after which a request counts as failed."""
    on_progress: Callable[[int, int, str], None]
    """Called each second with the number of ended requests, the number of all requests, and a text
    about how many were sent."""
    num_clients: int | None = None
    """Number of clients, each of which sends the plan's next request when its last has ended; None
    for as many as there are requests at a time."""
    limit_s: float = math.inf
    """Seconds after which a client sends no more requests."""

    def __post_init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._result = Replayed(self.plan)

    async def run(self) -> Replayed:
        """Send all requests and wait for their ends; a cancellation ends the test early."""
        async with asyncio.TaskGroup() as showing:
            shown = showing.create_task(self._show())
            try:
                async with asyncio.TaskGroup() as sending:
                    await self._send_all(sending)
            except asyncio.CancelledError:
                self._result.was_interrupted = True
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
            shown.cancel()
        self._show_once()
        return self._result

    async def _send_all(self, group: asyncio.TaskGroup) -> None:
        if self.num_clients is not None:
            waiting = iter(self.plan.requests)
            for _ in range(self.num_clients):
                group.create_task(self._send_in_turn(waiting))
            return
        for request in self.plan.requests:
            path, content = self.plan.content(request)
            await self._until(request.at_s)
            group.create_task(self._send(request, path, content))

    async def _send_in_turn(self, waiting: Iterator[PlannedRequest]) -> None:
        for request in waiting:  # shared by all clients
            if self._now() >= self.limit_s:
                return
            await self._send(request, *self.plan.content(request))

    async def _until(self, time_s: float) -> None:
        await asyncio.sleep(max(0.0, time_s - self._now()))

    def _now(self) -> float:
        return self._clock() - self._start

    async def _send(self, request: PlannedRequest, path: str, content: bytes) -> None:
        sent = SentRequest(request, self._now())
        self._result.sent.append(sent)
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._exchange(sent, path, content)
        except TimeoutError:
            sent.error = "timeout"
        except httpx.HTTPError as error:
            sent.error, sent.message = type(error).__name__, str(error)
            if _lacks_files(error):
                sent.error, sent.message = _TOO_MANY_FILES
        except ValidationError as error:
            sent.error, sent.message = "malformed event", str(error.errors()[0]["msg"])
        sent.end_s = self._now()

    async def _exchange(self, sent: SentRequest, path: str, content: bytes) -> None:
        async with self.client.stream("POST", path, content=content, headers=_JSON) as response:
            sent.status = response.status_code
            if response.status_code != httpx.codes.OK:
                _note_refusal(sent, await response.aread())
                return
            said, is_whole = list[str](), False
            async for line in response.aiter_lines():
                kind, _, data = line.partition(": ")
                if kind == "data" and data != "[DONE]":
                    event = StreamEvent.model_validate_json(data)
                    self._take(sent, event, said)
                    is_whole = is_whole or event.usage is not None
                is_whole = is_whole or data == "[DONE]"
        if sent.error is None and not is_whole:
            sent.error = "stream cut off"
        if sent.error is None:
            answer, question = "".join(said), sent.request.question
            sent.said = hash(answer)
            if question is not None and question.answer is not None:
                sent.correct = is_correct(answer, question.answer)

    def _take(self, sent: SentRequest, event: StreamEvent, said: list[str]) -> None:
        if event.error is not None:
            sent.error = f"stream: {event.error.code or 'error'}"
            sent.message = event.error.message
            return
        mars, texts = event.mars, [choice.said for choice in event.choices]
        if mars.tokens or any(texts):
            sent.token_s.append(self._now())
        sent.num_tokens += mars.tokens
        if event.usage is not None:
            sent.num_tokens = event.usage.completion_tokens
        said += texts
        if mars.forward_passes is not None:
            lowest = mars.min_confidence_threshold
            sent.num_passes = mars.forward_passes
            sent.threshold_mean = mars.confidence_threshold
            sent.threshold_min = mars.confidence_threshold if lowest is None else lowest

    async def _show(self) -> None:
        for number in count():
            await self._until(number * _PERIOD_S)
            self._show_once()

    def _show_once(self) -> None:
        result = self._result
        num_sent, num_ended = len(result.sent), result.num_ended
        text = f"{num_sent} sent, {num_sent - num_ended} in flight"
        self.on_progress(num_ended, len(self.plan.requests), text)


def _lacks_files(error: BaseException | None) -> bool:
    """Return whether an error means that this process may open no more files or connections."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_lacks_files, error.exceptions))
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return error is not None and _lacks_files(error.__cause__ or error.__context__)


def _note_refusal(sent: SentRequest, body: bytes) -> None:
    sent.error = str(sent.status)
    try:
        error = StreamEvent.model_validate_json(body).error
    except ValidationError:  # an error page of a proxy
        error = None
    if error is not None:
        sent.error = " ".join(filter(None, [sent.error, error.code]))
        sent.message = error.message
