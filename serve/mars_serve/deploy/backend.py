"""Access to a model's replicas through a Ray Serve handle."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mars_serve.config.served import Explanation, PublishedThreshold, ReplicaReport
from mars_serve.config.settings import ModelSettings
from mars_serve.control.governor_actor import GovernorClient
from mars_serve.engine.ipc.loop import EngineDied, QueueTimeout
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request
from mars_serve.http.middleware.errors import cause_of

_MAX_MOVES = 2
"""Times that a request is sent elsewhere whose engine died or whose replica fell silent."""
_SILENT_S = 15.0
"""Seconds without any message after which the replica of a request counts as lost. If its host
loses power, no connection is closed, and Ray takes a minute to notice."""
_ASK_S = 2.0
"""Longest wait in seconds for replicas to report about themselves."""
_GOVERN_S = 10.0
"""Longest wait in seconds for the governor, which may have to start first."""

_log = logging.getLogger(__name__)


class _Silent(EngineDied):
    """Raised if a replica sends no sign of life."""


class HandleBackend:
    """The `Backend` of a model whose replicas form a Ray Serve deployment."""

    def __init__(
        self,
        handle: DeploymentHandle,
        model: ModelSettings,
        application: str,
        silent_s: float = _SILENT_S,
    ) -> None:
        # Only this package's classes are sent, so plain pickle suffices; it takes a third of the
        # time.
        self._handle = handle.options(
            request_serialization="pickle", response_serialization="pickle"
        )
        self._streaming = self._handle.options(stream=True)
        self._silent_s = silent_s
        self._model = model.name
        self._is_governed = model.is_governed
        self._governor = GovernorClient(application)
        self._known = PublishedThreshold(0, model.initial_threshold)

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request on one replica and return all outputs; cancelling the call cancels the
        request.
        """
        outputs: list[StepOutput] = []
        async with aclosing(self._items(self._streaming.complete, request)) as items:
            async for item in items:
                outputs += item
        return outputs

    def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request on one replica; closing the generator early cancels the request."""
        return self._items(self._streaming.stream, request)

    async def _items(self, method: DeploymentHandle, request: Request) -> AsyncGenerator[Any]:
        """Yield what a replica returns for a request; try another one if it is silent or dies.

        Raises:
            EngineDied: the replica fell silent or died after its first output, or the request has
                been sent elsewhere as often as it may be.
            QueueTimeout: no replica began within the time that the request allows.
            Exception: an error of the replica (see `EngineLoop.stream`) or of Ray.
        """
        start_s = time.monotonic()
        while True:
            has_begun = False
            try:
                async with aclosing(self._shown(method, request)) as shown:
                    async for item in shown:
                        if item is not None:
                            has_begun = True
                            yield item
                return
            except Exception as error:
                if has_begun:
                    raise
                _prepare_move(request, error, time.monotonic() - start_s)

    async def _shown(self, method: DeploymentHandle, request: Request) -> AsyncGenerator[Any]:
        """Yield all messages of a replica about a request; None is a sign of life."""
        # Ray Serve's router identifies a call by its HTTP request, and loses one of several
        # concurrent calls for the same request. In an empty context, each gets an id of its own.
        response = contextvars.Context().run(method.remote, request)
        try:
            while True:
                async with asyncio.timeout(self._silent_s):
                    item = await anext(response)
                yield item
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise _Silent("the replica is silent; its host may be gone") from error
        finally:
            response.cancel()

    async def replicas(self) -> list[ReplicaReport]:
        """Return the reports of all replicas that answer in time."""
        reports: list[ReplicaReport] = await self._ask_all("report")
        return reports

    async def live_threshold(self) -> PublishedThreshold:
        """Return the live τ that was set last, even if some replicas do not have it yet."""
        self._known = await self._govern("value", self._model, self._known)
        return self._known

    async def set_live_threshold(self, threshold: float | None) -> PublishedThreshold:
        """Change the live τ, also for running requests; None returns control to the autoscaler."""
        self._known = await self._govern("set", self._model, threshold)
        return self._known

    async def autoscaler(self) -> Explanation | None:
        """Return the autoscaler's latest decisions; None if the model is not autoscaled."""
        found: Explanation | None = await self._govern("explain", self._model)
        return found

    async def metrics(self) -> list[str]:
        """Return the metrics of every replica and of the autoscaler in Prometheus' text format."""
        texts: list[str] = await self._ask_all("exposition")
        if self._is_governed:
            with suppress(RayError, TimeoutError):
                asked = self._governor.call("metrics", self._model)
                texts.append(await asyncio.wait_for(asked, _ASK_S))
        return texts

    async def _ask_all(self, method: str) -> list[Any]:
        """Call a method of every replica and return the answers; Ray Serve replaces failed
        replicas.
        """
        try:
            # the public `results_async` returns nothing if one replica is silent
            asked = await self._handle.broadcast(method)._fetch_replica_results_async()
        except DeploymentUnavailableError:
            return []
        answers = [asyncio.ensure_future(each.get_async()) for each in asked]
        await asyncio.wait(answers, timeout=_ASK_S)
        for late in answers:
            late.cancel()
        results = await asyncio.gather(*answers, return_exceptions=True)
        return [result for result in results if not isinstance(result, BaseException)]

    async def _govern(self, method: str, *arguments: Any) -> Any:
        """Call the governor.

        Raises:
            GetTimeoutError: the governor does not answer; its host may be lost.
        """
        try:
            return await asyncio.wait_for(self._governor.call(method, *arguments), _GOVERN_S)
        except TimeoutError as error:
            raise GetTimeoutError("the governor does not answer") from error


def _prepare_move(request: Request, error: Exception, waited_s: float) -> None:
    """Prepare a request that has no output yet for another replica.

    A request that the fatal step may have held is tried once more, alone in its steps until it is
    past the point at which the engine died.

    Args:
        request: the request, which is changed.
        error: the error that ended it on its replica.
        waited_s: seconds since it was first sent.

    Raises:
        QueueTimeout: it has waited for as long as it may.
        Exception: ``error``, if the request must not be sent elsewhere.
    """
    death, limit_s = _death_of(error), request.options.max_queue_s
    was_suspect = request.quarantine_tokens > 0
    if death is None or request.num_moves >= _MAX_MOVES or (death.had_begun and was_suspect):
        raise error
    if isinstance(death, _Silent):
        if limit_s is not None and waited_s >= limit_s:
            raise QueueTimeout(f"no replica began the request within {limit_s} s") from error
        request.num_silent += 1
    else:
        if death.had_begun:
            request.quarantine_tokens = death.num_tokens + 1
        request.failed_on += (death.replica or "",)
    _log.warning("request %s goes to another replica: %s", request.id, death)
    # The same replica may be alive and get the request again; engines need distinct ids.
    request.id = f"{request.id}/{request.num_moves}"


def _death_of(error: Exception) -> EngineDied | None:
    """Return the death of a replica or of its engine behind an error, or None."""
    cause = cause_of(error)
    if isinstance(cause, RayActorError):
        death = EngineDied("the replica has died")
        death.had_begun = True  # nobody is left to tell
        return death
    return cause if isinstance(cause, EngineDied) else None
