"""Pickled messages between an engine's process and the one that uses it. Knows none of them.

Both ends belong to one program: nobody else can reach a socket pair that has no name.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from contextlib import suppress

_HEADER = struct.Struct("!Q")  # length of the message behind it, in bytes
_READ_SIZE = 1 << 18


class ChannelClosed(EOFError):
    """The other end is closed, or its process has ended."""


class Channel:
    """One end of a stream socket. Any thread may send; one at a time may receive."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """What an event loop waits for; -1 once this end is closed."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send a message; waits while the other end does not read and buffers are full.

        Raises:
            ChannelClosed: an end is closed.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> list[object]:
        """Wait for messages.

        Raises:
            ChannelClosed: an end is closed.
        """
        while True:
            messages = self._read(0)
            if messages:
                return messages

    def receive_available(self) -> list[object]:
        """The messages that are there; maybe none.

        Raises:
            ChannelClosed: an end is closed.
        """
        with suppress(BlockingIOError):
            return self._read(socket.MSG_DONTWAIT)
        return []

    def close(self) -> None:
        """Close this end; whoever waits at either is woken."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, flags: int) -> list[object]:
        try:
            data = self._socket.recv(_READ_SIZE, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        self._received += data
        return self._take_whole()

    def _take_whole(self) -> list[object]:
        messages = []
        while len(self._received) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._received)
            end = _HEADER.size + length
            if len(self._received) < end:
                break
            messages.append(pickle.loads(self._received[_HEADER.size : end]))  # noqa: S301
            del self._received[:end]
        return messages
