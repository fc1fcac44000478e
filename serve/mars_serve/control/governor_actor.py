"""The governor as a named Ray actor, one for each application.

The actor may die at any time: replicas go on with what they have, the next caller starts it again,
and callers hand the new one what the old one knew. It ends by itself once no replica has waited at
it for a while, because the application is gone then.
"""

import asyncio
import logging
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import metrics

from mars_autoscale.policy.metrics import AutoscalerMetrics
from mars_autoscale.ray.ray_policy import NAMESPACE, governor_name
from mars_serve.control.governor import IDLE_S, Governor
from mars_serve.observability.log_lines import write_to_stderr
from mars_serve.observability.ray_metrics import RayMirror

UNREACHABLE = (RayError, RuntimeError, TimeoutError, ValueError)
"""Errors of a call to a governor that has died, is being started by several, is of another version,
does not answer in time, or whose Ray ends."""


class GovernorActor(Governor):
    """The class of the Ray actor."""

    def __init__(self) -> None:
        super().__init__()
        write_to_stderr(logging.root)  # Ray sets no handler
        logging.root.setLevel(logging.INFO)
        RayMirror(AutoscalerMetrics(self._loops), metrics).start()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def _end_when_idle(self) -> None:
        while time.monotonic() - self.last_wait < IDLE_S:
            time.sleep(IDLE_S / 4)
        ray.kill(ray.get_runtime_context().current_actor)


def find_or_start_governor(application: str) -> Any:
    """Return an application's governor; one that does not run yet answers once it has started."""
    actor = ray.remote(GovernorActor).options(
        name=governor_name(application),
        namespace=NAMESPACE,
        lifetime="detached",  # otherwise it would end with the process that started it
        get_if_exists=True,
        num_cpus=0,
        # On the head, beside Serve's controller: a worker that drains would wait for this actor.
        resources={"node:__internal_head__": 0.001},
    )
    return actor.remote()


def end_governor(application: str) -> None:
    """End an application's governor, if there is one."""
    with suppress(ValueError):
        ray.kill(ray.get_actor(governor_name(application), namespace=NAMESPACE))


class GovernorClient:
    """Calls an application's governor from one of its processes, and starts it if needed."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._actor: Any = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Governor`; if the actor has died, once more at a new one.

        Raises:
            RayError: the new actor does not answer either.
            RuntimeError: Ray has ended in this process.
            ValueError: the actor cannot be found while another process starts it.
        """
        try:
            return await self._call(method, *arguments)
        except RayError:
            self._actor = None
            return await self._call(method, *arguments)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._actor is None:
            self._actor = await asyncio.to_thread(find_or_start_governor, self._application)
        return await getattr(self._actor, method).remote(*arguments)
