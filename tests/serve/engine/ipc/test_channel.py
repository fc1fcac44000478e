from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from mars_serve.engine.ipc.channel import Channel, ChannelClosed

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    channels = Channel(ours), Channel(theirs)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    ours, theirs = ends
    messages = [0, "text", {"a": [1, 2]}, b"x" * 70_000]
    for message in messages:
        ours.send(message)
    received = list[object]()
    while len(received) < len(messages):
        received += theirs.receive()
    assert received == messages
    assert theirs.receive_available() == []


def test_a_message_larger_than_the_buffers_arrives_whole(ends: Ends) -> None:
    ours, theirs = ends
    message = bytes(8 * 2**20)
    ours.send(message)
    parts = list[object]()
    while not parts:
        parts += theirs.receive_available()  # empty until the message is complete
    assert parts == [message]


@pytest.mark.parametrize("is_blocking", [True, False])
def test_sending_never_waits_for_a_reader_and_loses_nothing(is_blocking: bool) -> None:
    """An event loop such as uvloop makes the socket that it watches non-blocking."""
    stream, other = socket.socketpair()
    stream.setblocking(is_blocking)
    ours, theirs = Channel(stream), Channel(other)
    messages = [bytes([number]) * 100_000 for number in range(40)]
    for message in messages:
        ours.send(message)
    received = list[object]()
    while len(received) < len(messages):
        received += theirs.receive()
    assert received == messages
    for channel in (ours, theirs):
        channel.close()


def test_closing_drops_what_the_other_end_did_not_read(ends: Ends) -> None:
    ours, _ = ends
    ours.send(bytes(8 * 2**20))
    ours.close()
    with pytest.raises(ChannelClosed):
        ours.send("more")


def test_bytes_that_are_no_message_end_the_channel() -> None:
    stream, other = socket.socketpair()
    theirs = Channel(other)
    stream.sendall((4).to_bytes(8) + b"none")
    with pytest.raises(ChannelClosed, match="a message cannot be read"):
        theirs.receive()
    stream.close()
    theirs.close()


def test_closing_one_end_closes_both(ends: Ends) -> None:
    ours, theirs = ends
    ours.send("last")
    ours.close()
    assert theirs.receive() == ["last"]
    for receive in (theirs.receive, theirs.receive_available, ours.receive, ours.receive_available):
        with pytest.raises(ChannelClosed):
            receive()
    for channel in ends:
        with pytest.raises(ChannelClosed):
            channel.send("more")
    assert ours.fileno() == -1


def test_closing_wakes_a_waiting_thread(ends: Ends) -> None:
    ours, _ = ends
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(ChannelClosed):
            ours.receive()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    ours.close()
    assert ended.wait(5)
    thread.join()
