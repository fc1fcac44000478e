"""A model's replicas behind a Ray Serve handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from mars_serve.engine.request import Request, StepOutput
from mars_serve.governor import GovernorClient
from mars_serve.served import Explanation, LiveThreshold, ReplicaReport
from mars_serve.settings import ModelSettings

_ASK_S = 2.0
"""Longest that all replicas together are waited for when they are asked about themselves."""


class HandleBackend:
    """`mars_serve.served.Backend` over the replicas of a deployment."""

    def __init__(self, handle: DeploymentHandle, model: ModelSettings, application: str) -> None:
        # Everything sent is a class of this package: plain pickle does, in a third of the time.
        self._handle = handle.options(
            request_serialization="pickle", response_serialization="pickle"
        )
        self._streaming = self._handle.options(stream=True)
        self._model = model.name
        self._is_governed = model.is_governed
        self._governor = GovernorClient(application)
        self._known = LiveThreshold(0, model.confidence_threshold)

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request on one replica; a cancelled call cancels it there."""
        response = self._handle.complete.remote(request)
        try:
            outputs: list[StepOutput] = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return outputs

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request on one replica; leaving the iteration early cancels it there."""
        response = self._streaming.stream.remote(request)
        try:
            async for output in response:
                yield output
        finally:
            response.cancel()

    async def replicas(self) -> list[ReplicaReport]:
        """Every replica that answers in time; none where one of them hangs."""
        reports: list[ReplicaReport] = await self._ask_all("report")
        return reports

    async def live_threshold(self) -> LiveThreshold:
        """What was set last, whether or not every replica has it yet."""
        self._known = await self._governor.call("value", self._model, self._known)
        return self._known

    async def set_live_threshold(self, threshold: float | None) -> LiveThreshold:
        """Change τ of the requests that give none, those that run now included; None gives it back
        to the autoscaler.
        """
        self._known = await self._governor.call("set", self._model, threshold)
        return self._known

    async def autoscaler(self) -> Explanation | None:
        """What the autoscaler has decided lately; None where the model has none."""
        found: Explanation | None = await self._governor.call("explain", self._model)
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
            results = await self._handle.broadcast(method).results_async(
                timeout_s=_ASK_S, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):
            return []
        return [result for result in results if not isinstance(result, BaseException)]
