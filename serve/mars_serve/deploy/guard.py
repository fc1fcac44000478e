"""Guards each HTTP server that Ray Serve starts: its Python proxies and its replicas' own servers.

Serve calls `guard` or `guard_behind_haproxy`, whichever the environment of its processes names,
before it starts a server. uvicorn, which these servers run on, waits forever for the rest of a
request, and Serve reads some headers itself.
"""

import asyncio
import ipaddress
import resource
from collections import Counter, deque
from functools import partial
from typing import Any

import ray.util
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mars_serve.api.errors import ApiError
from mars_serve.config.settings import is_loopback
from mars_serve.deploy.haproxy import ConnectionLimits
from mars_serve.http.middleware.authentication import path_within
from mars_serve.http.middleware.errors import ErrorMiddleware
from mars_serve.http.middleware.headers import check_headers

_ROUTES = "/-/routes"  # Serve tells anybody the names of all applications there
_CONTROLS = (b"x-request-timeout-seconds", b"x-request-disconnect-disabled")
"""Headers that would let a client change Serve's time limits, or go on generating for nobody."""
_MAX_HEADER_BYTES = 2**16
_AWAITED_BYTES = 2**14
"""Bytes of a body that are awaited before the request is run, as HAProxy does by default."""


def guard() -> list[Middleware]:
    """Guard a server that clients connect to, and return its middleware."""
    limits = ConnectionLimits.of_environment()
    arrival = Middleware(ArrivalMiddleware, wait_s=limits.request_wait_s)
    return [arrival, *_guarded(limits, is_local=False)]


def guard_behind_haproxy() -> list[Middleware]:
    """Guard a server that HAProxy connects to, and return its middleware.

    All connections have HAProxy's addresses, which keeps to the limits of each client. On a cluster
    that listens on loopback only, no other machine gets around HAProxy.
    """
    limits = ConnectionLimits.of_environment()._replace(connections_per_address=0)
    return _guarded(limits, is_local=is_loopback(ray.util.get_node_ip_address()))


def _guarded(limits: ConnectionLimits, *, is_local: bool) -> list[Middleware]:
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = ConnectionCounts(limits.within(num_files, files_each=1), is_local=is_local)
    # Serve makes its servers with uvicorn's default protocol and lets nobody choose another one
    protocols: dict[str, Any] = HTTP_PROTOCOLS
    protocols["auto"] = partial(GuardedProtocol, connections)
    return [Middleware(EntranceMiddleware), Middleware(ErrorMiddleware)]


class EntranceMiddleware:
    """Refuses what Serve would answer or fail at before the application sees it.

    Raises `ApiError`: 400 for headers that no client needs, 404 for the list of applications.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request without the headers that are meant for Serve."""
        if scope["type"] == "http":
            check_headers(scope)
            if path_within(scope) == _ROUTES:
                raise ApiError(404, f"{_ROUTES}: not found", code="not_found")
            scope["headers"] = [each for each in scope["headers"] if each[0] not in _CONTROLS]
        await self._app(scope, receive, send)


class ArrivalMiddleware:
    """Runs a request once its body, or much of it, has arrived.

    Serve's proxy would call a replica for each request that never arrives. HAProxy waits itself.
    Raises `ApiError` 408 for a body that takes too long.
    """

    def __init__(self, app: ASGIApp, wait_s: float) -> None:
        self._app = app
        self._wait_s = wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request with what has arrived, and with the rest as it arrives."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages, num_bytes, is_more = deque[Message](), 0, True
        try:
            async with asyncio.timeout(self._wait_s):
                while is_more and num_bytes < _AWAITED_BYTES:
                    messages.append(await receive())
                    num_bytes += len(messages[-1].get("body", b""))
                    is_more = messages[-1].get("more_body", False)
        except TimeoutError as error:
            reason = f"it did not arrive within {self._wait_s:g} s; send it faster"
            raise ApiError(408, f"body: {reason}", code="request_timeout") from error

        async def arrived() -> Message:
            return messages.popleft() if messages else await receive()

        await self._app(scope, arrived, send)


class ConnectionCounts:
    """Counts the open connections of a server, in all and by address.

    With ``is_local``, connections of other machines are refused.
    """

    def __init__(self, limits: ConnectionLimits, *, is_local: bool) -> None:
        self.limits = limits
        self._is_local = is_local
        self._num = 0
        self._by_address = Counter[str]()

    def add(self, address: str) -> bool:
        """Count a connection of an address unless a limit is reached; return whether it was."""
        most = self.limits.connections_per_address or self.limits.connections
        if self._num >= self.limits.connections or self._by_address[address] >= most:
            return False
        if self._is_local and not is_loopback(address):
            return False
        self._num += 1
        self._by_address[address] += 1
        return True

    def remove(self, address: str) -> None:
        """Count a connection of an address no longer."""
        self._num -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]


class GuardedProtocol(HttpToolsProtocol):
    """Speaks HTTP on a connection that is closed if a request does not arrive in time.

    The rest of a body that nobody reads has the same time. Bodies that are read are the
    application's to wait for.
    """

    def __init__(self, connections: ConnectionCounts, **options: Any) -> None:
        super().__init__(**options)
        self.ws_protocol_class = None  # no endpoint uses websockets, and they would not be counted
        self._held = connections
        self._address: str | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._num_header_bytes: int | None = None  # None while no headers arrive
        self._is_arriving = False  # whether a request has begun to arrive, and not ended

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, or end the connection if a limit is reached."""
        super().connection_made(transport)
        address = _network_of(self.client[0]) if self.client else ""
        if not self._held.add(address):
            transport.abort()
            return
        self._address = address
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        self._stop_clock()
        if self._address is not None:
            self._held.remove(self._address)
            self._address = None

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        if self._num_header_bytes is not None:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > _MAX_HEADER_BYTES:
                self.transport.abort()
        self._watch()

    def on_message_begin(self) -> None:
        """Begin to count a request's headers."""
        super().on_message_begin()
        self._num_header_bytes = 0
        self._is_arriving = True

    def on_headers_complete(self) -> None:
        """Stop counting headers."""
        super().on_headers_complete()
        self._num_header_bytes = None

    def on_message_complete(self) -> None:
        """Note that a request has arrived."""
        super().on_message_complete()
        self._is_arriving = False

    def on_response_complete(self) -> None:
        """Wait for the rest of a body that nobody reads."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Start the clock for a request that is to arrive; stop it while one is served."""
        is_idle = self.timeout_keep_alive_task is not None  # uvicorn's own clock runs
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()
        elif is_idle and not self._is_arriving:
            return
        elif self._clock is None and not self.transport.is_closing():
            wait_s = self._held.limits.request_wait_s
            self._clock = self.loop.call_later(wait_s, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def _network_of(address: str) -> str:
    """Return an IPv4 address as it is, and the network of an IPv6 address that one client has."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address) or parsed.is_loopback:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
