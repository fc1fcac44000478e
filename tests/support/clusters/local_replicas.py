"""Stands in for Ray Serve's handle to replicas whose engines run in threads of this process."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from decoding.local_engine_client import LocalEngineClient
from mars_serve.engine.ipc.listener import Address


class LocalReplica:
    """Stands for a `mars_serve.replica.replica.ModelReplica` towards those who send it requests."""

    def __init__(self, name: str, loop: LocalEngineClient) -> None:
        self.name = name
        self.loop = loop
        self.reached_at: Address | None = loop.address
        """Address at which it is reached, which may be that of a `StallingProxy`."""
        self.num_asked = 0
        self.fails = 0
        """Questions for the address that end with an error of Ray from now on."""

    async def address(self) -> tuple[str, Address | None]:
        self.num_asked += 1
        if self.fails:
            self.fails -= 1
            raise RayActorError
        return self.name, self.reached_at


class _Answer:
    def __init__(self, replica: LocalReplica, method: str) -> None:
        self._replica, self._method = replica, method

    async def get_async(self) -> Any:
        return await getattr(self._replica, self._method)()


class ReplicaHandle:
    """Has of Ray Serve's handle what `mars_platform.cluster.ray_private` needs."""

    def __init__(self, *replicas: LocalReplica) -> None:
        self.replicas = list(replicas)
        """The replicas that Ray Serve runs."""
        self.fails = 0
        """Questions that cannot be sent from now on."""
        self._is_used = False

    def options(self, **_: Any) -> ReplicaHandle:
        return self

    @property
    def _router(self) -> Any:
        if not self._is_used:
            return None
        named = [SimpleNamespace(unique_id=each.name) for each in self.replicas]
        chooser = SimpleNamespace(curr_replicas=named)
        return SimpleNamespace(_asyncio_router=SimpleNamespace(request_router=chooser))

    def broadcast(self, method: str) -> Any:
        self._is_used = True
        if self.fails:
            self.fails -= 1
            raise RayActorError
        answers = [_Answer(each, method) for each in self.replicas]

        async def fetch() -> list[_Answer]:
            return answers

        return SimpleNamespace(_fetch_replica_results_async=fetch)


class StallingProxy:
    """Passes on what goes between one engine and those who connect to it, until it stalls.

    No connection is closed then, as if the engine's host had lost power.
    """

    def __init__(self, target: Address) -> None:
        self._target = target
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._streams = list[socket.socket]()
        self.address = replace(target, port=self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def close(self) -> None:
        """Close all connections."""
        self._flows.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for stream in [self._listener, *self._streams]:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                theirs, _ = self._listener.accept()
                ours = socket.create_connection((self._target.host, self._target.port))
                self._streams += [theirs, ours]
                for source, sink in ((theirs, ours), (ours, theirs)):
                    threading.Thread(target=self._pass_on, args=[source, sink], daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
