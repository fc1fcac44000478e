"""Access to a model's replicas: requests go over `EngineClients`, all else over Serve's handle."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from prometheus_client.core import Metric
from ray.exceptions import GetTimeoutError, RayError
from ray.serve.handle import DeploymentHandle

from mars_autoscale.policy.reports import ReplicaReport
from mars_platform.cluster.ray_private import answers_of_replicas
from mars_platform.tier import Tier
from mars_serve.config.loras import LoraChanges
from mars_serve.config.served import Explanation, Picture, PublishedThreshold
from mars_serve.config.settings import ModelSettings
from mars_serve.control.governor_actor import GovernorClient
from mars_serve.deploy.engine_clients import EngineClients
from mars_serve.deploy.queue import RequestQueue
from mars_serve.engine.ipc.client import EngineDied, EngineSilent, QueueTimeout
from mars_serve.engine.outputs import StepOutput
from mars_serve.engine.request import Request

_MAX_MOVES = 2
"""Times that a request is sent elsewhere whose engine died or fell silent."""
_ASK_S = 2.0
"""Longest wait in seconds for replicas to report about themselves."""
_GOVERN_S = 10.0
"""Longest wait in seconds for the governor, which may have to start first."""

_log = logging.getLogger(__name__)


class ReplicaBackend:
    """The `Backend` of a model whose replicas form a Ray Serve deployment."""

    def __init__(self, handle: DeploymentHandle, model: ModelSettings, application: str) -> None:
        # Only this package's classes are sent, so plain pickle suffices; it takes a third of the
        # time.
        self._handle = handle.options(
            request_serialization="pickle", response_serialization="pickle"
        )
        self._clients = EngineClients(self._handle, lambda: self._queue.serve())
        self._queue = RequestQueue(model, self._clients)
        self._model = model.name
        self._is_autoscaled = model.autoscaling is not None
        self._governor = GovernorClient(application)
        self._known = PublishedThreshold(0, model.initial_threshold)

    async def complete(self, request: Request) -> list[StepOutput]:
        """Run a request on one replica and return all outputs; cancelling the call cancels the
        request.
        """
        request.is_streamed = False
        arrived_s = time.monotonic()
        while True:
            try:
                async with aclosing(self._attempt(request, arrived_s)) as outputs:
                    return [output async for output in outputs]
            except EngineDied as death:
                _prepare_move(request, death, time.monotonic() - arrived_s)

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput]:
        """Run a request on one replica; closing the generator early cancels the request.

        Raises:
            EngineDied: the engine fell silent or died after its first output, or the request has
                been sent elsewhere as often as it may be.
            QueueTimeout: no replica began within the time that the request allows.
            Exception: see `EngineClient.stream`.
        """
        arrived_s = time.monotonic()
        while True:
            has_begun = False
            try:
                async with aclosing(self._attempt(request, arrived_s)) as items:
                    async for output in items:
                        has_begun = True
                        yield output
                return
            except EngineDied as death:
                if has_begun:
                    raise
                _prepare_move(request, death, time.monotonic() - arrived_s)

    async def _attempt(self, request: Request, arrived_s: float) -> AsyncGenerator[StepOutput]:
        """Run a request on one replica, and note on the request where it failed."""
        self._clients.start()
        lease = await self._queue.lease(request, arrived_s)
        num_hits = 0
        self._queue.sent(lease)  # nothing else runs before it is
        try:
            async with aclosing(lease.client.stream(request)) as outputs:
                async for output in outputs:
                    num_hits += output.num_prefix_hit_tokens
                    yield output
        except EngineDied:
            request.failed_on += (lease.replica,)
            raise
        finally:
            self._queue.ended(lease, request, request.num_generated, num_hits)

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

    async def trust_frontier(self) -> None:
        """Forget what audits have said about the frontier."""
        await self._govern("trust_frontier", self._model)

    async def metrics(self) -> list[Metric]:
        """Return the metrics of every replica and of the autoscaler."""
        found: list[Metric] = [each for answer in await self._ask_all("metrics") for each in answer]
        if self._is_autoscaled:
            with suppress(RayError, TimeoutError):
                asked = self._governor.call("metrics", self._model)
                found += await asyncio.wait_for(asked, _ASK_S)
        return found

    async def picture(self, since_s: int | None) -> Picture:
        """Return what the governor has added to the dashboard's picture since a time."""
        found: Picture = await self._govern("picture", self._model, since_s)
        return found

    async def loras(self, known: LoraChanges) -> LoraChanges:
        """Return the latest changes of the model's LoRA adapters, after a newer ``known`` one."""
        found: LoraChanges = await self._govern("loras", self._model, known)
        return found

    def arrivals(self) -> tuple[int, int]:
        """Return the requests that have arrived in this process, and their prompt tokens.

        Any thread may call this.
        """
        return self._queue.num_arrived, self._queue.prompt_tokens

    def waiting_by_tier(self) -> Counter[Tier]:
        """Return the requests of this process that no engine has begun, by tier.

        Any thread may call this.
        """
        return self._queue.waiting_by_tier()

    async def _ask_all(self, method: str) -> list[Any]:
        """Call a method of every replica and return the answers; Ray Serve replaces failed
        replicas.
        """
        self._clients.start()  # the first question comes from a probe, before any request
        return await answers_of_replicas(self._handle, method, _ASK_S)

    async def _govern(self, method: str, *arguments: Any) -> Any:
        """Call the governor."""
        try:
            return await asyncio.wait_for(self._governor.call(method, *arguments), _GOVERN_S)
        except TimeoutError as error:
            raise GetTimeoutError("the governor does not answer") from error


def _prepare_move(request: Request, death: EngineDied, waited_s: float) -> None:
    """Prepare a request for another replica, in place; its client has seen nothing of it yet.

    A request that the fatal step may have held is tried once more, alone in its steps: in the first
    ones if it had no output, in all if nobody knows how much it had.
    """
    is_silent = isinstance(death, EngineSilent)
    was_suspect = request.quarantine_tokens > 0
    if len(request.failed_on) > _MAX_MOVES or (death.had_begun and was_suspect and not is_silent):
        raise death
    limit_s = request.options.max_queue_s
    if limit_s is not None and waited_s >= limit_s and not death.had_begun:
        raise QueueTimeout(f"no replica began the request within {limit_s} s") from death
    if death.had_begun and not is_silent:
        request.quarantine_tokens = 1 if request.is_streamed else request.options.max_tokens
    _log.warning("request %s goes to another replica: %s", request.id, death)
    # The same replica may be alive and get the request again; engines need distinct ids.
    request.id = f"{request.id}/{request.num_moves}"
