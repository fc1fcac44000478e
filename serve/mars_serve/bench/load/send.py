"""Sends a plan's requests to a server, each at its time, and notes what comes of them.

Open loop: a request never waits for another one. Knows no trace and no figures.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean

import httpx
from pydantic import ValidationError

from mars_platform.data.answers import is_correct
from mars_serve.bench.load.answers import LiveModel, LiveModels, StreamEvent
from mars_serve.bench.load.plan import Plan, PlannedRequest

REJECTIONS = (429, 503)
"""Statuses that say "not now"."""
_JSON = {"Content-Type": "application/json"}
_PERIOD_S = 1.0
"""Between two looks at the server."""
_WATCH_TIMEOUT_S = 5.0
_NOT_FOR_US = (401, 403, 404)
_NO_FILES = (
    "sender: too many open files",
    "not the server's failure: this process may open no more connections; raise ulimit -Hn",
)


@dataclass
class Outcome:
    """What a client saw of a request; times are seconds after the start."""

    request: PlannedRequest
    sent_s: float
    first_s: float | None = None
    """First event with tokens."""
    end_s: float | None = None
    """None while it runs, and for good if the run was interrupted."""
    status: int | None = None
    """Of the response; None while there is none."""
    num_tokens: int = 0
    """Output tokens."""
    num_passes: int | None = None
    """Forward passes; None, as what is below, unless it was served to its end."""
    threshold_mean: float | None = None
    threshold_min: float | None = None
    correct: bool | None = None
    """None where there is no answer to check, too."""
    error: str | None = None
    """Kind of what went wrong."""
    message: str = ""
    """What went wrong, in words."""

    @property
    def lateness_s(self) -> float:
        """Seconds by which it was sent too late."""
        return self.sent_s - self.request.at_s

    @property
    def is_served(self) -> bool:
        """Whether it was served to its end."""
        return self.end_s is not None and self.error is None

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token; infinite where it was not served."""
        if self.first_s is None or not self.is_served:
            return float("inf")
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the end; infinite where it was not served."""
        if self.end_s is None or not self.is_served:
            return float("inf")
        return self.end_s - self.sent_s


@dataclass(frozen=True)
class LiveView:
    """What the server told of itself."""

    time_s: float
    """Seconds after the start."""
    set_threshold: float
    """τ that was set last."""
    thresholds: Mapping[str, float]
    """Live τ of each replica that is ready, by its name."""

    @property
    def threshold(self) -> float:
        """Live τ, mean over the replicas; without one, what was set last."""
        return fmean(self.thresholds.values() or [self.set_threshold])

    @property
    def num_replicas(self) -> int:
        """That are ready."""
        return len(self.thresholds)


@dataclass
class Replayed:
    """A plan that was sent, or a part of it."""

    plan: Plan
    outcomes: list[Outcome] = field(default_factory=list)
    """In order of sending."""
    live: list[LiveView] = field(default_factory=list)
    live_refusal: int | None = None
    """Status with which the server refused to tell of itself."""
    was_interrupted: bool = False

    @property
    def num_ended(self) -> int:
        """Requests of which it is known what became."""
        return sum(outcome.end_s is not None for outcome in self.outcomes)


async def replay(
    client: httpx.AsyncClient,
    plan: Plan,
    *,
    timeout_s: float,
    on_progress: Callable[[int, int, str], None],
) -> Replayed:
    """Send all requests and wait for their ends; a cancellation ends it with what there is.

    Args:
        client: of the server, without a limit of connections.
        plan: what to send.
        timeout_s: seconds after which a request is given up.
        on_progress: called each second with requests that have ended, all of them, and in words
            how many were sent.
    """
    return await _Replay(client, plan, timeout_s, on_progress).run()


class _Replay:
    """One test under way; its clock starts when it is made."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        plan: Plan,
        timeout_s: float,
        on_progress: Callable[[int, int, str], None],
    ) -> None:
        self._client = client
        self._plan = plan
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._clock = asyncio.get_running_loop().time
        self._start = self._clock()
        self._result = Replayed(plan)

    async def run(self) -> Replayed:
        async with asyncio.TaskGroup() as watching:
            watchers = [watching.create_task(self._show()), watching.create_task(self._watch())]
            try:
                async with asyncio.TaskGroup() as sending:
                    await self._send_all(sending)
            except asyncio.CancelledError:
                self._result.was_interrupted = True
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
            for watcher in watchers:
                watcher.cancel()
        self._show_once()
        return self._result

    async def _send_all(self, group: asyncio.TaskGroup) -> None:
        for request in self._plan.requests:
            path, content = self._plan.content(request)
            await self._until(request.at_s)
            group.create_task(self._send(request, path, content))

    async def _until(self, time_s: float) -> None:
        await asyncio.sleep(max(0.0, time_s - self._now()))

    def _now(self) -> float:
        return self._clock() - self._start

    async def _send(self, request: PlannedRequest, path: str, content: bytes) -> None:
        outcome = Outcome(request, self._now())
        self._result.outcomes.append(outcome)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(outcome, path, content)
        except TimeoutError:
            outcome.error = "timeout"
        except httpx.HTTPError as error:
            outcome.error, outcome.message = type(error).__name__, str(error)
            if _lacks_files(error):
                outcome.error, outcome.message = _NO_FILES
        except ValidationError as error:
            outcome.error, outcome.message = "malformed event", str(error.errors()[0]["msg"])
        outcome.end_s = self._now()

    async def _exchange(self, outcome: Outcome, path: str, content: bytes) -> None:
        async with self._client.stream("POST", path, content=content, headers=_JSON) as response:
            outcome.status = response.status_code
            if response.status_code != httpx.codes.OK:
                _note_refusal(outcome, await response.aread())
                return
            said, is_whole = list[str](), False
            async for line in response.aiter_lines():
                kind, _, data = line.partition(": ")
                is_whole = is_whole or data == "[DONE]"
                if kind == "data" and not is_whole:
                    self._take(outcome, StreamEvent.model_validate_json(data), said)
        if outcome.error is None and not is_whole:
            outcome.error = "stream cut off"
        question = outcome.request.question
        if outcome.error is None and question is not None and question.answer is not None:
            outcome.correct = is_correct("".join(said), question.answer)

    def _take(self, outcome: Outcome, event: StreamEvent, said: list[str]) -> None:
        if event.error is not None:
            outcome.error = f"stream: {event.error.code or 'error'}"
            outcome.message = event.error.message
            return
        mars = event.mars
        if mars.tokens and outcome.first_s is None:
            outcome.first_s = self._now()
        outcome.num_tokens += mars.tokens
        said += [choice.said for choice in event.choices]
        if mars.forward_passes is not None:
            lowest = mars.min_confidence_threshold
            outcome.num_passes = mars.forward_passes
            outcome.threshold_mean = mars.confidence_threshold
            outcome.threshold_min = mars.confidence_threshold if lowest is None else lowest

    async def _show(self) -> None:
        for number in count():
            await self._until(number * _PERIOD_S)
            self._show_once()

    def _show_once(self) -> None:
        result = self._result
        num_sent, num_ended = len(result.outcomes), result.num_ended
        text = f"{num_sent} sent, {num_sent - num_ended} in flight"
        self._on_progress(num_ended, len(self._plan.requests), text)

    async def _watch(self) -> None:
        """Look at the live τ until the server refuses; what goes wrong once is left out."""
        for number in count():
            await self._until(number * _PERIOD_S)
            try:
                response = await self._client.get("/admin/threshold", timeout=_WATCH_TIMEOUT_S)
                if response.status_code in _NOT_FOR_US:
                    self._result.live_refusal = response.status_code
                    return
                models = LiveModels.model_validate_json(response.content).models
            except (httpx.HTTPError, ValidationError):
                continue
            if self._plan.model in models:
                self._result.live.append(_view(models[self._plan.model], self._now()))


def _view(live: LiveModel, time_s: float) -> LiveView:
    thresholds = {name: each.confidence_threshold for name, each in live.replicas.items()}
    return LiveView(time_s, live.confidence_threshold, thresholds)


def _lacks_files(error: BaseException | None) -> bool:
    """Whether this process may open no more files, and so no connection."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(_lacks_files, error.exceptions))
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    return error is not None and _lacks_files(error.__cause__ or error.__context__)


def _note_refusal(outcome: Outcome, body: bytes) -> None:
    outcome.error = str(outcome.status)
    try:
        error = StreamEvent.model_validate_json(body).error
    except ValidationError:  # a proxy's own page
        error = None
    if error is not None:
        outcome.error = " ".join(filter(None, [outcome.error, error.code]))
        outcome.message = error.message
