"""Threads that compile the grammars of requests, for each tenant in turn."""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mars_serve.engine.request import Request

_NUM_THREADS = 4
MOST_OF_TENANT = 1 if (os.cpu_count() or 1) <= 2 else 2
"""Threads that one tenant's grammars may occupy, so that others find one free, and steps a core."""


class Compilers:
    """Hands requests to a function that compiles their grammars.

    Tenants take turns: however many large grammars one of them sends, another's next grammar begins
    at once, or when one that is being compiled is done.
    """

    def __init__(self, compile_grammar: Callable[[Request], None]) -> None:
        """Start no thread yet; ``compile_grammar`` is called in several, and must not raise."""
        self._compile_grammar = compile_grammar
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[Request]] = {}
        """Requests by tenant; the tenant whose turn was last is the last."""
        self._running = Counter[str]()

    def submit(self, request: Request) -> None:
        """Compile a request's grammar when it is its turn."""
        with self._lock:
            self._waiting.setdefault(request.tenant, deque()).append(request)
        self._pool.submit(self._work)

    def close(self) -> None:
        """Begin nothing more; what has begun ends on its own."""
        with self._lock:
            self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while (request := self._begin()) is not None:
            try:
                self._compile_grammar(request)
            finally:
                with self._lock:
                    self._running[request.tenant] -= 1

    def _begin(self) -> Request | None:
        """Take the next request, if there is one of a tenant that occupies few threads."""
        with self._lock:
            due = (name for name in self._waiting if self._running[name] < MOST_OF_TENANT)
            tenant = next(due, None)
            if tenant is None:
                return None
            requests = self._waiting.pop(tenant)
            request = requests.popleft()
            if requests:
                self._waiting[tenant] = requests
            self._running[tenant] += 1
            return request
