"""Frames over one inherited Unix socketpair: a header, then a message. Descriptors ride with a frame.

A header has the payload's length, the worker's epoch, the frame's number (from 0, in each direction) and the payload's CRC-32.
What is told twice is taken once; what is lost, garbled, out of order or from another epoch raises ProtocolError before its
message is seen. A channel that has raised it is broken: the worker is ended, and what it held is done again elsewhere.

``Connection`` is the worker's end (it may block), ``Channel`` the parent's (on the event loop, never blocks), which is a ``Pipe``
for the bytes with frames on it. Neither side listens anywhere, so nobody else can speak on it.
"""

from __future__ import annotations

import array
import asyncio
import math
import os
import select
import socket
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator

from disagg.errors import DisaggError, ProtocolError
from disagg.messages import Message, decode, encode

MAX_FRAME = 64 << 20
_HEADER = struct.Struct("<IIQI")  # length of the payload, epoch, number of the frame, CRC-32 of the payload
_READ_SIZE = 256 << 10
_MAX_FDS = 8


class ChannelClosed(Exception):
    """The other end is gone."""


class FrameWriter:
    """Messages in, numbered frames of one epoch and direction out."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._next = 0

    def frame(self, message: Message) -> bytes:
        payload = encode(message)
        header = _HEADER.pack(len(payload), self._epoch, self._next, zlib.crc32(payload))
        self._next += 1
        return header + payload


class FrameReader:
    """Bytes and descriptors in, the messages of one epoch and direction with their descriptors out.

    ``has_descriptors`` False: none travel on this link (it leaves the node), so messages come without them.
    """

    def __init__(self, epoch: int, *, has_descriptors: bool = True) -> None:
        self._epoch = epoch
        self._has_descriptors = has_descriptors
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self.num_taken = 0  # frames, so also the number of the next
        self.num_duplicates = 0  # frames that had been taken before

    def __repr__(self) -> str:
        return f"FrameReader(epoch {self._epoch}, taken {self.num_taken}, duplicates {self.num_duplicates})"

    def close(self) -> None:
        """Close the descriptors that no message has claimed."""
        while self._fds:
            os.close(self._fds.popleft())

    def feed(self, data: bytes, fds: list[int]) -> None:
        self._buffer += data
        self._fds.extend(fds)

    def messages(self) -> Iterator[tuple[Message, list[int]]]:
        """Every whole message so far. Raises ProtocolError, and from then on nothing else."""
        buffer, offset = self._buffer, 0
        try:
            while len(buffer) - offset >= _HEADER.size:
                length, epoch, number, checksum = _HEADER.unpack_from(buffer, offset)
                begin, end = offset + _HEADER.size, offset + _HEADER.size + length
                self._check_header(length, epoch, number)
                if len(buffer) < end:
                    break
                with memoryview(buffer) as view, view[begin:end] as payload:
                    if zlib.crc32(payload) != checksum:
                        raise ProtocolError(f"frame {number} is garbled: the checksum of its {length} bytes differs")
                    message = decode(payload)
                if number < self.num_taken:  # told twice; its descriptors came the first time
                    self.num_duplicates += 1
                    offset = end
                    continue
                fds = self._claim_fds(message)
                offset = end
                self.num_taken += 1
                yield message, fds
        finally:
            del buffer[:offset]

    def _check_header(self, length: int, epoch: int, number: int) -> None:
        """As soon as it is there: a wrong one makes nobody wait for, or hold, what its length promises."""
        if length > MAX_FRAME:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
        if epoch != self._epoch:
            raise ProtocolError(f"expected a frame of epoch {self._epoch}, got one of epoch {epoch}")
        if number > self.num_taken:
            raise ProtocolError(f"expected frame {self.num_taken}, got frame {number}: what lies between is lost")

    def _claim_fds(self, message: Message) -> list[int]:
        num_fds: int = getattr(message, "num_fds", 0) if self._has_descriptors else 0
        if num_fds > len(self._fds):
            raise ProtocolError(f"{type(message).__name__} came with {len(self._fds)} of {num_fds} descriptors")
        return [self._fds.popleft() for _ in range(num_fds)]


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

    def __init__(self, sock: socket.socket, epoch: int) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._writer = FrameWriter(epoch)
        self._reader = FrameReader(epoch)

    @property
    def num_received(self) -> int:
        """Frames taken so far, for the parent to compare with what it has sent."""
        return self._reader.num_taken

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Raises ChannelClosed when the parent is gone. Waits while the parent is not reading."""
        data = self._writer.frame(message)
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
    """The parent's end. ``on_message(message, fds)`` and, once, ``on_closed(error)`` are called on the loop."""

    def __init__(
        self,
        sock: socket.socket,
        epoch: int,
        on_message: Callable[[Message, list[int]], None],
        on_closed: Callable[[Exception | None], None],
    ) -> None:
        self._writer = FrameWriter(epoch)
        self._reader = FrameReader(epoch)
        self._on_message = on_message
        self._on_closed = on_closed
        self._pipe = Pipe(sock, self._received, self._closed)

    @property
    def num_sent(self) -> int:
        """Frames that have left this process."""
        return self._pipe.num_sent

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """As ``Pipe.send``."""
        self._pipe.send(self._writer.frame(message), fds or [])

    def drain(self) -> None:
        """Deliver what a worker that is gone had still sent."""
        self._pipe.drain()

    def close(self) -> None:
        """Stop reading and writing. Closing twice is safe; ``on_closed`` is not called."""
        self._pipe.close()
        self._reader.close()

    def _received(self, data: bytes, fds: list[int]) -> None:
        self._reader.feed(data, fds)
        for message, descriptors in self._reader.messages():
            self._on_message(message, descriptors)

    def _closed(self, error: Exception | None) -> None:
        self._reader.close()
        self._on_closed(error)


class Pipe:
    """The bytes of a parent's end. ``on_data(data, fds)`` and, once, ``on_closed(error)`` are called on the loop.

    A DisaggError that ``on_data`` raises closes it. What cannot be sent at once is kept in order and sent when the worker reads
    again.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_data: Callable[[bytes, list[int]], None],
        on_closed: Callable[[Exception | None], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_data = on_data
        self._on_closed = on_closed
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._is_closed = False
        self.num_sent = 0  # that have left this process
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, data: bytes, fds: list[int]) -> None:
        """Queue bytes; ``fds`` are duplicated, so the caller may close its own at any time.

        A closed pipe swallows them, since its end has been reported by ``on_closed``.
        """
        if self._is_closed:
            return
        self._outgoing.append((memoryview(data), [os.dup(fd) for fd in fds]))
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
        try:
            self._on_data(data, fds)
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
                    self.num_sent += 1
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
