"""Runs an engine's loop against an engine in a thread, where a test can reach it."""

from __future__ import annotations

import asyncio
import socket
import threading

from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc.auditor import Auditor
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.client import EngineClient
from mars_serve.engine.ipc.listener import Address, connect
from mars_serve.engine.ipc.worker import EngineWorker
from mars_serve.observability.request_telemetry import RequestTelemetry
from waiting import soon

LOOPBACK = "127.0.0.1"
NOTHING = RequestTelemetry()


class LocalEngineClient(EngineClient):
    """The loop of an engine in this process; it sends copies of requests, as to a process."""

    def __init__(self, engine: Engine, host: str | None = None, audited_share: float = 0.0) -> None:
        """Start the engine.

        Args:
            engine: the engine.
            host: address of the interface on which `linked` loops may connect; None for none.
            audited_share: share of the outputs that are audited.
        """
        self.engine = engine
        ours, theirs = socket.socketpair()
        worker = EngineWorker(
            engine,
            Channel(theirs),
            RequestTelemetry(),
            host=host,
            auditor=Auditor(engine, audited_share),
        )
        thread = threading.Thread(target=worker.run, name="engine", daemon=True)
        thread.start()
        super().__init__(Channel(ours), thread)

    async def told(self, num_ended: int) -> RequestTelemetry:
        """Wait until the engine tells that a number of requests have ended since its start.

        Returns:
            What the engine has counted so far.
        """

        def found() -> RequestTelemetry:
            return self.activity if isinstance(self.activity, RequestTelemetry) else NOTHING

        await soon(lambda: sum(found().counts.lengths.ended) == num_ended)
        return found()


class _ThereAlways:
    """The engine of another process as a `mars_serve.engine.ipc.client.Worker`."""

    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float) -> None:
        pass


async def linked(address: Address | None) -> EngineClient:
    """Connect to an engine that listens, as an ingress does, without stopping the event loop."""
    assert address is not None
    channel = await asyncio.to_thread(connect, address)
    return await asyncio.to_thread(EngineClient, channel, _ThereAlways())
