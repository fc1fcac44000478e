"""A model's replicas behind a Ray Serve handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from ray.exceptions import GetTimeoutError, RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mars_serve.config.served import Explanation, LiveThreshold, ReplicaReport
from mars_serve.config.settings import ModelSettings
from mars_serve.control.governor import GovernorClient
from mars_serve.engine.ipc.loop import EngineDied, QueueTimeout
from mars_serve.engine.request import Request, StepOutput

_SILENT_S = 15.0
"""A replica that has a request and shows nothing of it for so long is given up. When a host loses
its power nobody closes its connections, and Ray itself takes a minute to notice."""
_ASK_S = 2.0
"""Longest that replicas are waited for when they are asked about themselves."""
_GOVERN_S = 10.0
"""Longest that the governor is waited for, which may have to start first."""


class _Silent(Exception):
    """A replica shows no sign of life."""


class HandleBackend:
    """`mars_serve.config.served.Backend` over the replicas of a deployment."""

    def __init__(
        self,
        handle: DeploymentHandle,
        model: ModelSettings,
        application: str,
        silent_s: float = _SILENT_S,
    ) -> None:
        # Everything sent is a class of this package: plain pickle does, in a third of the time.
        self._handle = handle.options(
            request_serialization="pickle", response_serialization="pickle"
        )
        self._streaming = self._handle.options(stream=True)
        self._silent_s = silent_s
        self._model = model.name
        self._is_governed = model.is_governed
        self._governor = GovernorClient(application)
        self._known = LiveThreshold(0, model.initial_threshold)

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request on one replica; a cancelled call cancels it there."""
        outputs: list[StepOutput] = []
        async with aclosing(self._items(self._streaming.complete, request)) as items:
            async for item in items:
                outputs += item
        return outputs

    def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request on one replica; leaving the iteration early cancels it there."""
        return self._items(self._streaming.stream, request)

    async def _items(self, method: DeploymentHandle, request: Request) -> AsyncGenerator[Any]:
        """What a replica gives for a request. One that gives nothing at all is given up for
        another.

        Raises:
            EngineDied: it fell silent after it had begun to give something.
            QueueTimeout: no replica began within the time that the request sets.
            Exception: of the replica, see `EngineLoop.stream`, or of Ray.
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
            except _Silent as error:
                if has_begun:
                    raise EngineDied("the replica is silent; its host may be gone") from error
                _check_wait(request, time.monotonic() - start_s)
                request.num_silent += 1
                # The replica may live after all and get it again; an engine knows requests by id.
                request.id = f"{request.id}/{request.num_silent}"

    async def _shown(self, method: DeploymentHandle, request: Request) -> AsyncGenerator[Any]:
        """What comes back from a replica, its signs of life included."""
        response = method.remote(request)
        try:
            while True:
                async with asyncio.timeout(self._silent_s):
                    item = await anext(response)
                yield item
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise _Silent from error
        finally:
            response.cancel()

    async def replicas(self) -> list[ReplicaReport]:
        """Every replica that answers in time."""
        reports: list[ReplicaReport] = await self._ask_all("report")
        return reports

    async def live_threshold(self) -> LiveThreshold:
        """What was set last, whether or not every replica has it yet."""
        self._known = await self._govern("value", self._model, self._known)
        return self._known

    async def set_live_threshold(self, threshold: float | None) -> LiveThreshold:
        """Change τ of the requests that give none, those that run now included; None gives it back
        to the autoscaler.
        """
        self._known = await self._govern("set", self._model, threshold)
        return self._known

    async def autoscaler(self) -> Explanation | None:
        """What the autoscaler has decided lately; None where the model has none."""
        found: Explanation | None = await self._govern("explain", self._model)
        return found

    async def metrics(self) -> list[str]:
        """What every replica counted, and the autoscaler, in Prometheus' text format."""
        texts: list[str] = await self._ask_all("exposition")
        if self._is_governed:
            with suppress(RayError, TimeoutError):
                asked = self._governor.call("metrics", self._model)
                texts.append(await asyncio.wait_for(asked, _ASK_S))
        return texts

    async def _ask_all(self, method: str) -> list[Any]:
        """Answers of the replicas that are well; Ray Serve sees to the others."""
        try:
            # the public `results_async` has no results at all where one replica is silent
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
        """What the governor says.

        Raises:
            GetTimeoutError: it does not answer; its host may be gone.
        """
        try:
            return await asyncio.wait_for(self._governor.call(method, *arguments), _GOVERN_S)
        except TimeoutError as error:
            raise GetTimeoutError("the governor does not answer") from error


def _check_wait(request: Request, waited_s: float) -> None:
    limit_s = request.options.max_queue_s
    if limit_s is not None and waited_s >= limit_s:
        raise QueueTimeout(f"no replica began the request within {limit_s} s")
