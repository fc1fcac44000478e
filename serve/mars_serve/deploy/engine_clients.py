"""An ingress replica's connections to the engines of a model's replicas."""

import asyncio
import logging
from collections.abc import Callable

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from mars_platform.cluster.ray_private import answers_of_replicas, names_of_replicas
from mars_serve.engine.ipc.channel import ChannelClosed
from mars_serve.engine.ipc.client import EngineClient, EngineDied
from mars_serve.engine.ipc.listener import Address, connect

_POLL_S = 0.1
"""Seconds between two looks at the names of the replicas, which Ray Serve pushes to each handle."""
_RETRY_S = 0.5
"""Least seconds between two questions for the addresses of replicas."""
_ASK_S = 2.0
"""Longest wait in seconds for replicas to tell their addresses."""

_log = logging.getLogger(__name__)


class _RemoteEngine:
    """An engine in a process of another replica, which alone can look after it."""

    def is_alive(self) -> bool:
        """Return True: the engine is known to have ended only when its connection is closed."""
        return True

    def join(self, timeout: float) -> None:
        """Return at once."""


class EngineClients:
    """Connections by the replica's name, which follow the replicas that Ray Serve runs.

    They belong to one event loop. A replica that ends, and is no longer among those that Ray Serve
    runs, keeps its connection until its last request has ended.
    """

    def __init__(self, handle: DeploymentHandle, on_change: Callable[[], None]) -> None:
        """Know no replica yet; `start` changes that.

        ``on_change`` is called when a replica comes or goes, or has room for more requests.
        """
        self._handle = handle
        self._on_change = on_change
        self._all: dict[str, EngineClient] = {}
        self._running = frozenset[str]()
        self._asked_s = 0.0
        """Time on the event loop's clock at which replicas were last asked for their addresses."""
        self._following: asyncio.Task[None] | None = None
        self._connecting: dict[str, asyncio.Task[None]] = {}
        """Attempts by replica; one that does not answer must not hold up the others."""

    def start(self) -> None:
        """Begin to follow the replicas; do nothing if that has begun."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    def usable(self) -> dict[str, EngineClient]:
        """Return the engines that may get requests, by replica."""
        return {
            name: client
            for name, client in self._all.items()
            if name in self._running and client.is_alive and not client.condition.is_draining
        }

    async def _follow(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:  # without this task, no replica would ever be found again
                _log.exception("the replicas cannot be followed; trying again")
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> None:
        self._running = names_of_replicas(self._handle)
        self._drop_ended()
        now_s = asyncio.get_running_loop().time()
        if self._lacks_some() and now_s - self._asked_s >= _RETRY_S:
            self._asked_s = now_s
            await self._connect_missing()
        self._on_change()  # an engine may be overdue no longer

    def _lacks_some(self) -> bool:
        # a handle knows no replicas before it is first used
        return not self._running or not self._running <= self._all.keys()

    def _drop_ended(self) -> None:
        for name, client in list(self._all.items()):
            if not client.is_alive or (name not in self._running and not client.num_requests):
                client.stop()
                del self._all[name]

    async def _connect_missing(self) -> None:
        try:
            found = await answers_of_replicas(self._handle, "address", _ASK_S)
        except (RayError, RayServeException) as error:
            _log.warning("replicas cannot be asked for their addresses: %s", error)
            return
        for name, address in found:
            if name not in self._all and name not in self._connecting:
                self._connecting[name] = asyncio.create_task(self._connect(name, address))

    async def _connect(self, name: str, address: Address) -> None:
        try:
            client = await asyncio.to_thread(_connected, address)
        except (ChannelClosed, EngineDied) as error:
            _log.warning("replica %s cannot be reached: %s", name, error)
            return
        finally:
            del self._connecting[name]
        client.on_change = self._on_change
        client.attach()
        self._all[name] = client
        self._running |= {name}
        self._on_change()


def _connected(address: Address) -> EngineClient:
    return EngineClient(connect(address), _RemoteEngine(), is_always_heard=True)
