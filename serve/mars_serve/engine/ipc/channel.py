"""Sends pickled messages between an engine's process and the process that uses it.

Unpickling is safe here: a socket pair has no name, so only this program can reach its ends, and a
connection to a port is read only once the engine's token has come.
"""

import pickle
import select
import socket
import struct
import threading
from collections import deque
from contextlib import suppress

_HEADER = struct.Struct("!Q")  # length of the message that follows, in bytes
_READ_SIZE = 1 << 18


class ChannelClosed(EOFError):
    """Raised when either end of a channel is closed or the other process has ended."""


class Channel:
    """One end of a stream socket; any thread may send, one thread at a time may receive.

    Both raise `ChannelClosed` once either end is closed, or if what came is no message.

    The socket may be made non-blocking by whoever watches it, as uvloop does: nothing here relies
    on its mode.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._sending = threading.Condition()
        self._unsent = deque[memoryview]()
        """Parts of messages that the socket's buffer had no room for, in order."""
        self._sender: threading.Thread | None = None
        self._is_closed = False
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor for an event loop to watch; -1 once this end is closed."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send a message without waiting for the other end to read.

        What the socket has no room for is kept and sent by a thread, so that a process that reads
        late or not at all never stops an event loop or an engine's steps.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        data = memoryview(_HEADER.pack(len(body)) + body)
        with self._sending:
            if self._is_closed:
                raise ChannelClosed
            if not self._unsent:
                data = data[self._write(data) :]
            if data:
                self._unsent.append(data)
                self._wake_sender()

    def receive(self) -> list[object]:
        """Wait for at least one message and return all that have arrived."""
        while True:
            messages = self.receive_available()
            if messages:
                return messages
            _wait_for(self._socket, select.POLLIN)

    def receive_available(self) -> list[object]:
        """Return the messages that have arrived, possibly none, without waiting."""
        try:
            data = self._socket.recv(_READ_SIZE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed from error
        if not data:
            raise ChannelClosed
        self._received += data
        return self._take_whole()

    def close(self) -> None:
        """Close this end, wake threads that wait at either end, and drop what was not sent."""
        with self._sending:
            self._is_closed = True
            self._unsent.clear()
            self._sending.notify()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self, data: memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed from error

    def _wake_sender(self) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_unsent, name="sender", daemon=True)
            self._sender.start()
        self._sending.notify()

    def _send_unsent(self) -> None:
        """Send what is left over whenever the socket has room, until either end is closed."""
        with suppress(ChannelClosed):
            while True:
                with self._sending:
                    self._sending.wait_for(lambda: self._unsent or self._is_closed)
                    if self._is_closed:
                        return
                    rest = self._unsent[0][self._write(self._unsent[0]) :]
                    if rest:
                        self._unsent[0] = rest
                    else:
                        self._unsent.popleft()
                if rest:
                    _wait_for(self._socket, select.POLLOUT)

    def _take_whole(self) -> list[object]:
        messages, start = [], 0
        while len(self._received) >= start + _HEADER.size:
            (length,) = _HEADER.unpack_from(self._received, start)
            end = start + _HEADER.size + length
            if len(self._received) < end:
                break
            messages.append(_unpickled(self._received[start + _HEADER.size : end]))
            start = end
        del self._received[:start]
        return messages


def _unpickled(body: bytearray) -> object:
    try:
        return pickle.loads(body)  # noqa: S301
    except Exception as error:  # unpickling raises what its content makes it raise
        raise ChannelClosed("a message cannot be read") from error


def _wait_for(stream: socket.socket, event: int) -> None:
    """Wait, for at most a second, until a socket can be read or written or its other end closes."""
    poll = select.poll()
    try:
        poll.register(stream, event)
    except (ValueError, OSError) as error:
        raise ChannelClosed from error
    poll.poll(1000)  # in case the descriptor was closed and opened anew meanwhile
