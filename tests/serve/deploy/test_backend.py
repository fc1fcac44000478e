"""How the ingress reacts to replicas that fall silent, with a fake of Ray's handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from mars_serve.config.settings import ModelSettings
from mars_serve.deploy.backend import HandleBackend
from mars_serve.engine.decoding_options import DecodingOptions
from mars_serve.engine.ipc.loop import EngineDied, QueueFull, QueueTimeout
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

SILENT_S = 0.2
BEAT = None
HTTP_REQUEST: ContextVar[str | None] = ContextVar("HTTP_REQUEST", default=None)


class Response:
    """A replica's response: items with pauses between them, then silence, an error or its end."""

    def __init__(
        self, items: list[Any], pause_s: float, *, ends: bool, error: Exception | None = None
    ) -> None:
        self._error = error
        self._items, self._pause_s, self._ends = list(items), pause_s, ends
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self._items:
            if self._error is not None:
                raise self._error
            await asyncio.sleep(0 if self._ends else 3600)
            raise StopAsyncIteration
        await asyncio.sleep(self._pause_s)
        return self._items.pop(0)

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A fake of Ray Serve's handle that gives one response after another."""

    def __init__(self, *responses: Response) -> None:
        self.responses = responses
        self.num_silent: list[int] = []
        self.ids: list[str] = []
        self.http_requests: list[str | None] = []
        self.sent: list[tuple[tuple[str, ...], int]] = []
        """Failed replicas and quarantine of each request that was sent."""

    def options(self, **_: Any) -> Handle:
        return self

    def __getattr__(self, method: str) -> Handle:
        return self

    def remote(self, request: Request) -> Response:
        self.num_silent.append(request.num_silent)
        self.ids.append(request.id)
        self.sent.append((request.failed_on, request.quarantine_tokens))
        self.http_requests.append(HTTP_REQUEST.get())
        return self.responses[len(self.num_silent) - 1]


def backend_of(*responses: Response) -> tuple[HandleBackend, Handle]:
    handle = Handle(*responses)
    settings = ModelSettings(name="m", path="p")
    return HandleBackend(handle, settings, "app", silent_s=SILENT_S), handle


def request(**options: Any) -> Request:
    return Request("r", [5, 6], DecodingOptions(9, **options))


OUTPUTS = [StepOutput("r", [token], None) for token in (7, 8, 9)]


async def test_a_replica_that_sends_signs_of_life_may_be_slow():
    """It takes ten times as long as a silent replica is given."""
    beats = [BEAT] * 20
    response = Response([*beats, *OUTPUTS], SILENT_S / 2, ends=True)
    backend, handle = backend_of(response)
    assert [output async for output in backend.stream(request())] == OUTPUTS
    assert handle.num_silent == [0]


async def test_calls_of_one_http_request_do_not_share_its_context():
    """Ray Serve's router takes concurrent calls with the same context for one, and loses some."""
    HTTP_REQUEST.set("one request for two choices")
    backend, handle = backend_of(*[Response([OUTPUTS], 0, ends=True) for _ in range(2)])
    await asyncio.gather(backend.complete(request()), backend.complete(request()))
    assert handle.http_requests == [None, None]


async def test_a_request_without_output_moves_to_another_replica():
    silent = Response([BEAT], 0, ends=False)
    backend, handle = backend_of(silent, Response(OUTPUTS, 0, ends=True))
    assert [output async for output in backend.stream(request())] == OUTPUTS
    assert handle.num_silent == [0, 1]
    assert len(set(handle.ids)) == 2
    assert silent.is_cancelled


async def test_a_request_with_output_fails_if_its_replica_falls_silent():
    silent = Response(OUTPUTS[:1], 0, ends=False)
    backend, _ = backend_of(silent)
    stream = backend.stream(request())
    assert await anext(stream) == OUTPUTS[0]
    with pytest.raises(EngineDied, match="silent"):
        await anext(stream)
    assert silent.is_cancelled


async def test_an_unfinished_whole_response_is_requested_again():
    """The client has seen none of its outputs."""
    silent = Response([BEAT, BEAT], 0, ends=False)
    backend, _ = backend_of(silent, Response([BEAT, OUTPUTS], 0, ends=True))
    assert await backend.complete(request()) == OUTPUTS
    assert silent.is_cancelled


async def test_a_request_is_given_up_after_its_longest_queue_time():
    silent = [Response([], 0, ends=False) for _ in range(9)]
    backend, handle = backend_of(*silent)
    with pytest.raises(QueueTimeout, match=r"no replica began the request within 0\.3 s"):
        await backend.complete(request(max_queue_s=0.3))
    assert handle.num_silent == [0, 1]


async def test_a_request_is_given_up_after_three_silent_replicas():
    backend, handle = backend_of(*[Response([], 0, ends=False) for _ in range(9)])
    with pytest.raises(EngineDied, match="silent"):
        await backend.complete(request())
    assert handle.num_silent == [0, 1, 2]


def death(replica: str, *, had_begun: bool = False, num_tokens: int = 0) -> Exception:
    """Return a dead engine's error as Ray passes it on."""
    died = EngineDied("the engine has stopped")
    died.replica, died.had_begun, died.num_tokens = replica, had_begun, num_tokens
    return RayTaskError("stream", "", died).as_instanceof_cause()


def failing(error: Exception, *items: Any) -> Response:
    return Response([*items], 0, ends=False, error=error)


async def test_a_request_that_waited_is_sent_elsewhere_twice_when_engines_die():
    deaths = [failing(death(name)) for name in ("a", "b", "c")]
    backend, handle = backend_of(*deaths[:2], Response([OUTPUTS], 0, ends=True))
    assert await backend.complete(request()) == OUTPUTS
    assert handle.sent == [((), 0), (("a",), 0), (("a", "b"), 0)]
    assert len(set(handle.ids)) == 3
    backend, handle = backend_of(*deaths, Response([OUTPUTS], 0, ends=True))
    with pytest.raises(EngineDied):
        await backend.complete(request())
    assert len(handle.sent) == 3


async def test_a_request_of_a_fatal_step_is_tried_once_more_alone():
    suspect = death("a", had_begun=True, num_tokens=6)
    backend, handle = backend_of(failing(suspect, BEAT), Response([OUTPUTS], 0, ends=True))
    assert await backend.complete(request()) == OUTPUTS
    assert handle.sent == [((), 0), (("a",), 7)]
    backend, handle = backend_of(failing(suspect), failing(death("b", had_begun=True)))
    with pytest.raises(EngineDied):
        await backend.complete(request())


async def test_a_stream_that_has_begun_is_not_begun_again():
    backend, handle = backend_of(failing(death("a", had_begun=True), OUTPUTS[0]))
    stream = backend.stream(request())
    assert await anext(stream) == OUTPUTS[0]
    with pytest.raises(EngineDied):
        await anext(stream)
    assert len(handle.sent) == 1


async def test_a_request_whose_replica_dies_is_sent_elsewhere_once():
    gone = [failing(ActorDiedError()) for _ in range(2)]
    backend, handle = backend_of(gone[0], Response([OUTPUTS], 0, ends=True))
    assert await backend.complete(request()) == OUTPUTS
    assert handle.sent[1][1] == 1
    backend, handle = backend_of(*gone)
    with pytest.raises(ActorDiedError):
        await backend.complete(request())


async def test_other_errors_end_a_request():
    backend, handle = backend_of(failing(QueueFull("too many")), *[Response([], 0, ends=True)])
    with pytest.raises(QueueFull):
        await backend.complete(request())
    assert len(handle.sent) == 1


async def test_closing_the_stream_cancels_the_request():
    response = Response(OUTPUTS, 0, ends=False)
    backend, _ = backend_of(response)
    stream = backend.stream(request())
    await anext(stream)
    await stream.aclose()
    assert response.is_cancelled
