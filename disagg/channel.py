"""Frames over one inherited Unix socketpair: a 4-byte length, then a message. Descriptors ride with a frame.

``Connection`` is the worker's end (it may block), ``Channel`` the parent's (on the event loop, never blocks). Neither side
listens anywhere, so nobody else can speak on it; garbage raises ProtocolError and nothing else.
"""

from __future__ import annotations

import array
import asyncio
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator

from disagg.errors import DisaggError, ProtocolError
from disagg.messages import Message, decode, encode

MAX_FRAME = 64 << 20
_LENGTH = struct.Struct("<I")
_READ_SIZE = 256 << 10
_MAX_FDS = 8


class ChannelClosed(Exception):
    """The other end is gone."""


def frame(message: Message) -> bytes:
    payload = encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Bytes and descriptors in, messages with their descriptors out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def close(self) -> None:
        """Close the descriptors that no message has claimed."""
        while self._fds:
            os.close(self._fds.popleft())

    def feed(self, data: bytes, fds: list[int]) -> None:
        self._buffer += data
        self._fds.extend(fds)

    def messages(self) -> Iterator[tuple[Message, list[int]]]:
        """Every whole message so far. Raises ProtocolError."""
        buffer, offset = self._buffer, 0
        try:
            while len(buffer) - offset >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, offset)
                if length > MAX_FRAME:
                    raise ProtocolError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
                begin = offset + _LENGTH.size
                if len(buffer) < begin + length:
                    break
                with memoryview(buffer) as view, view[begin : begin + length] as payload:
                    message = decode(payload)
                offset = begin + length
                num_fds: int = getattr(message, "num_fds", 0)
                if num_fds > len(self._fds):
                    raise ProtocolError(f"{type(message).__name__} came with {len(self._fds)} of {num_fds} descriptors")
                yield message, [self._fds.popleft() for _ in range(num_fds)]
        finally:
            del buffer[:offset]


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = sock.recvmsg(_READ_SIZE, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, fds.tolist()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class Connection:
    """The worker's end: synchronous, one thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._reader = FrameReader()

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Raises ChannelClosed when the parent is gone. Waits while the parent is not reading."""
        data = frame(message)
        try:
            sent = socket.send_fds(self._sock, [data], fds) if fds else 0
            self._sock.sendall(data[sent:])
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None, wake_fd: int = -1) -> list[tuple[Message, list[int]]]:
        """What has arrived, waiting up to ``timeout_s`` for the first byte, or for ``wake_fd`` to become readable.

        Raises ChannelClosed at end of file, ProtocolError for garbage.
        """
        waiting = select.poll()  # not select(), which cannot watch descriptors from 1,024 on
        waiting.register(self._sock.fileno(), select.POLLIN)
        if wake_fd >= 0:
            waiting.register(wake_fd, select.POLLIN)
        ready = dict(waiting.poll(None if timeout_s is None else math.ceil(timeout_s * 1e3)))
        if self._sock.fileno() not in ready:
            return []
        try:
            data, fds = _receive(self._sock)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("end of file")
        self._reader.feed(data, fds)
        return list(self._reader.messages())

    def close(self) -> None:
        self._sock.close()
        self._reader.close()


class Channel:
    """The parent's end. ``on_message(message, fds)`` and, once, ``on_closed(error)`` are called on the loop.

    What cannot be sent at once is kept in order and sent when the worker reads again.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Message, list[int]], None],
        on_closed: Callable[[Exception | None], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        self._on_message = on_message
        self._on_closed = on_closed
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._is_closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Queue a message; ``fds`` are duplicated, so the caller may close its own at any time.

        A closed channel swallows it, since its end has been reported by ``on_closed``.
        """
        if self._is_closed:
            return
        self._outgoing.append((memoryview(frame(message)), [os.dup(fd) for fd in fds or []]))
        if len(self._outgoing) == 1:
            self._writable()

    def drain(self) -> None:
        """Deliver what a worker that is gone had still sent."""
        while self._readable():
            pass

    def close(self) -> None:
        """Stop reading and writing. Closing twice is safe; ``on_closed`` is not called."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._drop_outgoing()
            self._sock.close()
            self._reader.close()

    def _fail(self, error: Exception | None) -> None:
        if not self._is_closed:
            self.close()
            self._on_closed(error)

    def _readable(self) -> bool:
        """Deliver what one read gives. False when there was nothing to read, or nothing can come any more."""
        if self._is_closed:
            return False
        try:
            data, fds = _receive(self._sock)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._fail(error)
            return False
        if not data:
            self._fail(None)
            return False
        self._reader.feed(data, fds)
        try:
            for message, descriptors in self._reader.messages():
                self._on_message(message, descriptors)
        except DisaggError as error:  # garbage, or a message that the state tables do not allow: end this worker, not all
            self._fail(error)
        return True

    def _writable(self) -> None:
        try:
            while self._outgoing:
                data, fds = self._outgoing[0]
                sent = socket.send_fds(self._sock, [data], fds) if fds else self._sock.send(data)
                _close_all(fds)
                if sent < len(data):
                    self._outgoing[0] = (data[sent:], [])
                else:
                    self._outgoing.popleft()
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._sock.fileno(), self._writable)
        except OSError:  # the worker is gone: what it had still sent is worth reading, and reading tells the end
            self._drop_outgoing()
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _drop_outgoing(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        for _, fds in self._outgoing:
            _close_all(fds)
        self._outgoing.clear()
