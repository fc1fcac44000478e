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
    sender = threading.Thread(target=ours.send, args=[message])
    sender.start()
    parts = list[object]()
    while not parts:
        parts += theirs.receive_available()  # empty until the message is complete
    sender.join()
    assert parts == [message]


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
