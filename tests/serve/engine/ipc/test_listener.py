"""Who may connect to an engine's process, and what a connection can do to the others."""

from __future__ import annotations

import hmac
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mars_serve.engine.ipc import listener as listening
from mars_serve.engine.ipc.channel import Channel, ChannelClosed
from mars_serve.engine.ipc.listener import Address, Listener, connect
from waiting import soon

LOOPBACK = "127.0.0.1"


class Echo:
    """A listener whose connections get back what they send."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.listener = Listener(LOOPBACK, self.serve)
        self.address = self.listener.address

    def serve(self, channel: Channel) -> None:
        self.channels.append(channel)
        try:
            while True:
                for message in channel.receive():
                    channel.send(message)
        except ChannelClosed:
            channel.close()

    def close(self) -> None:
        self.listener.close()
        for channel in self.channels:
            channel.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Close what a test opens, at its end."""
    with ExitStack() as stack:
        yield stack


def answers(channel: Channel) -> bool:
    channel.send("hello")
    return channel.receive() == ["hello"]


def connected(address: Address, opened: ExitStack) -> Channel:
    channel = connect(address)
    opened.callback(channel.close)
    return channel


def raw(address: Address, opened: ExitStack, data: bytes = b"") -> socket.socket:
    """Connect without the handshake, and send some bytes."""
    stream = socket.create_connection((address.host, address.port), 20)
    opened.callback(stream.close)
    stream.sendall(data)
    return stream


def is_closed(stream: socket.socket) -> bool:
    """Wait until the other end closes a connection, over which it must send nothing."""
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_knows_the_token_is_connected(echo: Echo, opened: ExitStack) -> None:
    assert answers(connected(echo.address, opened))
    assert len(echo.address.token) == 32
    assert echo.address.token.hex() not in repr(echo.address)
    assert repr(echo.address.token) not in repr(echo.address)


def test_each_listener_has_a_token_of_its_own(echo: Echo, opened: ExitStack) -> None:
    other = Echo()
    opened.callback(other.close)
    assert other.address.token != echo.address.token
    mixed = Address(echo.address.host, echo.address.port, other.address.token)
    channel = connected(mixed, opened)
    with pytest.raises(ChannelClosed):
        channel.receive()
    assert answers(connected(other.address, opened))
    assert len(echo.channels) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda token: bytes(32),
        lambda token: token[:-1] + bytes([token[-1] ^ 1]),
        lambda token: bytes([token[0] ^ 1]) + token[1:],
        lambda token: b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
    ],
    ids=["zeros", "last bit", "first bit", "http"],
)
def test_a_wrong_token_ends_the_connection(echo: Echo, opened: ExitStack, change) -> None:
    """The bytes behind a wrong token are not read, so nothing of a stranger's is unpickled."""
    stream = raw(echo.address, opened, change(echo.address.token) + b"\x80\x04" * 100)
    assert is_closed(stream)
    assert echo.channels == []
    assert answers(connected(echo.address, opened))


def test_tokens_are_compared_in_constant_time(
    echo: Echo, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[tuple[bytes, bytes]]()
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: compared.append(pair))
    assert is_closed(raw(echo.address, opened, bytes(32)))
    assert compared == [(bytes(32), echo.address.token)]


def test_no_more_strangers_than_a_bound_are_waited_for(echo: Echo, opened: ExitStack) -> None:
    silent = [raw(echo.address, opened) for _ in range(listening._MAX_UNKNOWN)]
    assert is_closed(raw(echo.address, opened))
    silent[0].close()
    silent[1].sendall(echo.address.token)
    assert answers(Channel(silent[1]))


def test_half_a_token_then_the_end_is_a_wrong_token(echo: Echo, opened: ExitStack) -> None:
    stream = raw(echo.address, opened, echo.address.token[:16])
    stream.shutdown(socket.SHUT_WR)
    assert is_closed(stream)
    assert echo.channels == []


def test_half_a_token_then_silence_ends_the_connection_and_holds_up_nobody(
    echo: Echo, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_HANDSHAKE_S", 0.5)
    streams = [raw(echo.address, opened, echo.address.token[:16]) for _ in range(20)]
    assert answers(connected(echo.address, opened))
    assert all(map(is_closed, streams))
    assert len(echo.channels) == 1


def test_a_token_may_come_in_pieces_and_be_followed_by_messages(
    echo: Echo, opened: ExitStack
) -> None:
    stream = raw(echo.address, opened)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for part in (echo.address.token[:1], echo.address.token[1:20], echo.address.token[20:]):
        stream.sendall(part)
        time.sleep(0.01)
    channel = Channel(stream)
    opened.callback(channel.close)
    assert answers(channel)


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 7 + b"\x04" + b"nope", b"\x00" * 8 + b"\xff" * 100],
    ids=["no pickle", "empty message"],
)
def test_garbage_after_the_token_ends_only_its_connection(
    echo: Echo, opened: ExitStack, garbage: bytes
) -> None:
    before = connected(echo.address, opened)
    assert answers(before)
    stream = raw(echo.address, opened, echo.address.token + garbage)
    assert is_closed(stream)
    assert answers(before)
    assert answers(connected(echo.address, opened))


def test_closing_ends_the_listening_and_no_connection(echo: Echo, opened: ExitStack) -> None:
    channel = connected(echo.address, opened)
    assert answers(channel)
    echo.listener.close()
    with pytest.raises(ChannelClosed, match=r"cannot connect to Address\(127\.0\.0\.1:\d+\)"):
        connect(echo.address)
    assert answers(channel)
    echo.listener.close()


def test_many_connections_are_served_at_once(echo: Echo, opened: ExitStack) -> None:
    channels = list[Channel]()
    threads = [
        threading.Thread(target=lambda: channels.append(connected(echo.address, opened)))
        for _ in range(100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(channels) == 100
    for number, channel in enumerate(channels):
        channel.send(number)
    assert [channel.receive() for channel in channels] == [[number] for number in range(100)]


async def test_a_process_without_free_descriptors_accepts_connections_later(
    echo: Echo, opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    assert answers(connected(echo.address, opened))
    streams = [socket.socket() for _ in range(2)]
    for stream in streams:
        opened.callback(stream.close)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        for stream in streams:  # the system has set a descriptor aside for the first
            stream.connect((echo.address.host, echo.address.port))
        await soon(lambda: "cannot be accepted" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for stream in streams:
        stream.sendall(echo.address.token)
        assert answers(Channel(stream))


async def test_a_process_that_can_start_no_thread_accepts_connections_later(
    echo: Echo, opened: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many connections fail as may be about to send their token."""
    monkeypatch.setattr(listening, "_PAUSE_S", 0.001)
    before = threading.stack_size(2**47)  # no machine has room for such a thread
    try:
        for number in range(1, listening._MAX_UNKNOWN + 1):
            raw(echo.address, opened)
            await soon(lambda number=number: caplog.text.count("start new thread") == number)
    finally:
        threading.stack_size(before)
    assert answers(connected(echo.address, opened))
