"""Runs an ASGI application on a port of this machine, for tests that need a real connection."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

LOOPBACK = "127.0.0.1"


class LiveServer:
    """A server in a thread, which can be stopped and started again on the same port."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            self.port: int = probe.getsockname()[1]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Start the server and return when it accepts connections."""
        ready = threading.Event()
        config = uvicorn.Config(
            self.app,
            host=LOOPBACK,
            port=self.port,
            log_level="error",
            timeout_graceful_shutdown=0.2,
        )
        self._server = _Telling(config, ready)
        self._thread = threading.Thread(target=asyncio.run, args=[self._server.serve()])
        self._thread.start()
        assert ready.wait(30), "the server did not start"

    def stop(self) -> None:
        """Close all connections, and return when the server has ended."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not end"
        self._server = self._thread = None


class _Telling(uvicorn.Server):
    """A server that tells when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()


@contextmanager
def live_server(app: ASGIApp) -> Iterator[LiveServer]:
    """Serve an application within the block."""
    server = LiveServer(app)
    server.start()
    try:
        yield server
    finally:
        server.stop()
