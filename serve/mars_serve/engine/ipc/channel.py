"""Sends pickled messages between an engine's process and the process that uses it.

Unpickling is safe here: a socket pair has no name, so only this program can reach its ends.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from contextlib import suppress

_HEADER = struct.Struct("!Q")  # length of the message that follows, in bytes
_READ_SIZE = 1 << 18


class ChannelClosed(EOFError):
    """Raised when either end of a channel is closed or the other process has ended."""


class Channel:
    """One end of a stream socket; any thread may send, one thread at a time may receive."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._sending = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor for an event loop to watch; -1 once this end is closed."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send a message, waiting while the buffers are full because the other end does not read.

        Raises:
            ChannelClosed: either end is closed.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(len(body)) + body)
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> list[object]:
        """Wait for at least one message and return all that have arrived.

        Raises:
            ChannelClosed: either end is closed.
        """
        while True:
            messages = self._read(0)
            if messages:
                return messages

    def receive_available(self) -> list[object]:
        """Return the messages that have arrived, possibly none, without waiting.

        Raises:
            ChannelClosed: either end is closed.
        """
        with suppress(BlockingIOError):
            return self._read(socket.MSG_DONTWAIT)
        return []

    def close(self) -> None:
        """Close this end and wake threads that wait at either end."""
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
