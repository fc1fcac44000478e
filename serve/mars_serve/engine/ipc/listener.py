"""Accepts connections to an engine's process from the processes that send it requests.

Whoever connects must first send the engine's token, which only the application's own processes
know; nothing that comes before it is read as a message.
"""

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mars_serve.engine.ipc.channel import Channel, ChannelClosed

_TOKEN_SIZE = 32
_HANDSHAKE_S = 10.0
"""Seconds within which either side of a new connection must do its part."""
_UNACKNOWLEDGED_MS = 30_000
"""Milliseconds after which a connection is closed whose other end acknowledges nothing."""
_IDLE_S = 10
"""Seconds without a message after which the other end of a connection must acknowledge a probe."""
_PAUSE_S = 0.1
"""Seconds after which a listener tries again that could not accept a connection."""
_BACKLOG = 64
_MAX_UNKNOWN = 64
"""Most connections that may be about to send their token; each takes a thread meanwhile."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Host and port at which an engine's process listens, and the token that it asks for."""

    host: str
    port: int
    token: bytes

    def __repr__(self) -> str:
        """Leave the token out of logs."""
        return f"Address({self.host}:{self.port})"


def connect(address: Address) -> Channel:
    """Connect to an engine's process.

    Raises:
        ChannelClosed: nobody listens at the address, or the token is not that of the listener.
    """
    try:
        stream = socket.create_connection((address.host, address.port), _HANDSHAKE_S)
    except OSError as error:
        raise ChannelClosed(f"cannot connect to {address}: {error}") from error
    channel = _channel_of(stream)
    try:
        stream.sendall(address.token)
    except OSError as error:
        channel.close()
        raise ChannelClosed(f"cannot connect to {address}: {error}") from error
    return channel


class Listener:
    """Accepts connections in threads of its own until it is closed."""

    def __init__(self, host: str, on_connection: Callable[[Channel], None]) -> None:
        """Start to listen on a free port of the interface with the address ``host``.

        ``on_connection`` is called with each connection whose other end knows the token, in a
        thread of its own.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._on_connection = on_connection
        self._is_closed = threading.Event()
        self._unknown = threading.Semaphore(_MAX_UNKNOWN)
        """Counts down the connections whose token has not come yet."""
        token = secrets.token_bytes(_TOKEN_SIZE)
        self.address = Address(host, self._socket.getsockname()[1], token)
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Accept no further connections; those that exist stay."""
        self._is_closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                stream, _ = self._socket.accept()
                self._begin(stream)
            except (OSError, RuntimeError) as error:  # too many descriptors or threads
                if not self._is_closed.wait(_PAUSE_S):
                    _log.warning("a connection cannot be accepted: %s", error)

    def _begin(self, stream: socket.socket) -> None:
        """Read the token of a connection in a thread, unless many are about to send theirs."""
        if not self._unknown.acquire(blocking=False):
            stream.close()
            return
        try:
            threading.Thread(target=self._admit, args=[stream], daemon=True).start()
        except RuntimeError:
            self._unknown.release()
            stream.close()
            raise

    def _admit(self, stream: socket.socket) -> None:
        try:
            is_known = hmac.compare_digest(_received(stream, _TOKEN_SIZE), self.address.token)
        except OSError:
            is_known = False
        finally:
            self._unknown.release()
        if is_known:
            self._on_connection(_channel_of(stream))
        else:
            _log.warning("a connection without the engine's token was closed")
            stream.close()


def _received(stream: socket.socket, size: int) -> bytes:
    """Return what the other end sends in time, up to a number of bytes."""
    data, end_s = b"", time.monotonic() + _HANDSHAKE_S
    while len(data) < size:
        stream.settimeout(max(end_s - time.monotonic(), 0.001))
        more = stream.recv(size - len(data))
        if not more:
            break
        data += more
    return data


def _channel_of(stream: socket.socket) -> Channel:
    stream.settimeout(None)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    # a connection over which nothing is sent is tried, too
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_S)
    return Channel(stream)
