"""Runs an engine's loop against an engine in a thread, where a test can reach it."""

from __future__ import annotations

import socket
import threading

from mars_serve.engine.engine import Engine
from mars_serve.engine.ipc.channel import Channel
from mars_serve.engine.ipc.loop import EngineLoop
from mars_serve.engine.ipc.worker import EngineWorker


class LocalLoop(EngineLoop):
    """The loop of an engine in this process; it sends copies of requests, as to a process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        ours, theirs = socket.socketpair()
        worker = EngineWorker(engine, Channel(theirs))
        thread = threading.Thread(target=worker.run, name="engine", daemon=True)
        thread.start()
        super().__init__(Channel(ours), thread)
