"""The channel: frames that say when something is lost, doubled, garbled or stale, and two ends that exchange them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import Iterable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import messages as m
from disagg.channel import MAX_FRAME, Channel, ChannelClosed, Connection, FrameReader, FrameWriter
from disagg.errors import IllegalTransitionError, ProtocolError
from disagg.kv import KVLayout
from disagg.request import SamplingParams

EPOCH = 7
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=8, dtype="uint8", model="x")
RESERVE = m.Reserve(1, list(range(300_000)), 300_000, SamplingParams(max_tokens=3), 1.0)
MESSAGES = st.sampled_from(
    [m.Commit(2**40, 65, [2**64 - 1, 0]), m.Abort(1), m.Quiesced(9), m.Loading(0.5, "weights"), m.Tokens([m.TokenOutput(8, 66)])]
)


def frames(messages: Iterable[m.Message], epoch: int = EPOCH) -> list[bytes]:
    writer = FrameWriter(epoch)
    return [writer.frame(message) for message in messages]


def read(reader: FrameReader, data: bytes) -> list[m.Message]:
    reader.feed(data, [])
    return [message for message, _ in reader.messages()]


@given(st.binary(max_size=200))
def test_garbage_raises_protocol_error_and_nothing_else(data: bytes) -> None:
    """Whatever the bytes, the answer is messages or ProtocolError."""
    try:
        received = read(FrameReader(EPOCH), data)
    except ProtocolError:
        received = []
    assert all(isinstance(message, get_args(m.Message)) for message in received)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_any_split_of_the_byte_stream_gives_the_same_messages(sent: list[m.Message], cuts: list[int]) -> None:
    """Frames may arrive in pieces of any size."""
    data, reader, received, position = b"".join(frames(sent)), FrameReader(EPOCH), [], 0
    while position < len(data):
        step = cuts[position % len(cuts)]
        received += read(reader, data[position : position + step])
        position += step
    assert received == sent
    assert reader.num_taken == len(sent)


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    """A wrong length cannot make the reader wait for, or hold, gigabytes."""
    (frame,) = frames([m.Abort(1)])
    with pytest.raises(ProtocolError, match="over the limit"):
        read(FrameReader(EPOCH), (MAX_FRAME + 1).to_bytes(4, "little") + frame[4:])


@given(st.lists(MESSAGES, min_size=2, max_size=6), st.data())
def test_a_lost_frame_shows_at_the_next(sent: list[m.Message], data: st.DataObject) -> None:
    """Everything before the gap is taken, nothing after it, and the error says what was expected and what came."""
    lost = data.draw(st.integers(0, len(sent) - 2))
    all_frames, reader = frames(sent), FrameReader(EPOCH)
    assert read(reader, b"".join(all_frames[:lost])) == sent[:lost]
    for _ in range(2):  # it stays broken
        with pytest.raises(ProtocolError, match=f"expected frame {lost}, got frame {lost + 1}"):
            read(reader, b"".join(all_frames[lost + 1 :]))
    assert reader.num_taken == lost


@given(st.lists(MESSAGES, min_size=1, max_size=6), st.data())
def test_a_frame_told_twice_is_taken_once_and_counted(sent: list[m.Message], data: st.DataObject) -> None:
    """Also when it is told again much later."""
    again = data.draw(st.integers(0, len(sent) - 1))
    at = data.draw(st.integers(again + 1, len(sent)))
    told = frames(sent)
    told.insert(at, told[again])
    reader = FrameReader(EPOCH)
    assert read(reader, b"".join(told)) == sent
    assert repr(reader) == f"FrameReader(epoch {EPOCH}, taken {len(sent)}, duplicates 1)"


@given(st.lists(MESSAGES, min_size=2, max_size=6), st.data())
def test_a_frame_cut_short_shows_with_the_next_and_delivers_nothing(sent: list[m.Message], data: st.DataObject) -> None:
    """However much is missing, no message is made of one frame's beginning and the next one's."""
    cut = data.draw(st.integers(0, len(sent) - 2))
    told = frames(sent)
    told[cut] = told[cut][: data.draw(st.integers(1, len(told[cut]) - 1))]
    reader, received = FrameReader(EPOCH), []
    reader.feed(b"".join(told) + b"".join(told) + bytes(64), [])
    with pytest.raises(ProtocolError):
        received.extend(message for message, _ in reader.messages())
    assert reader.num_taken == cut


@given(MESSAGES, st.data())
def test_a_changed_bit_is_never_taken_for_a_message(message: m.Message, data: st.DataObject) -> None:
    """In the header or in the message: an error, or a wait for the bytes that a wrong length promises."""
    (frame,) = frames([message])
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    garbled = bytearray(frame)
    garbled[bit // 8] ^= 1 << bit % 8
    try:
        received = read(FrameReader(EPOCH), bytes(garbled) + bytes(1000))
    except ProtocolError:
        received = []
    assert received == []


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_a_frame_of_another_epoch_is_an_error(epoch: int) -> None:
    """An earlier life of a worker cannot speak in the place of the present one."""
    with pytest.raises(ProtocolError, match=f"expected a frame of epoch {EPOCH}, got one of epoch {epoch}"):
        read(FrameReader(EPOCH), frames([m.Abort(1)], epoch)[0])


def test_a_message_without_its_descriptor_is_a_protocol_error() -> None:
    """num_fds is checked, not trusted."""
    reader = FrameReader(EPOCH)
    with pytest.raises(ProtocolError, match="0 of 1"):
        read(reader, frames([m.Connect("decode-0", 1, LAYOUT, 1)])[0])
    assert reader.num_taken == 0


def test_on_a_link_without_descriptors_messages_come_without_them() -> None:
    """Between nodes none can travel, whatever the message says of itself in a node."""
    connect, reader = m.Connect("decode-0", 1, LAYOUT, 1), FrameReader(EPOCH, has_descriptors=False)
    reader.feed(frames([connect])[0], [])
    assert list(reader.messages()) == [(connect, [])]


def test_both_ends_exchange_messages_and_descriptors_in_order() -> None:
    """A descriptor arrives with its message, also behind one too large for the socket's buffer."""

    async def scenario() -> list[m.Message]:
        ours, theirs = socket.socketpair()
        received: list[m.Message] = []
        closed = asyncio.Event()
        channel = Channel(ours, EPOCH, lambda message, _fds: received.append(message), lambda _error: closed.set())
        worker = Connection(theirs, EPOCH)
        read_end, write_end = os.pipe()
        channel.send(RESERVE)
        channel.send(m.Connect("decode-0", 1, LAYOUT, 1), [write_end])
        os.close(write_end)  # the channel has its own copy
        got: list[tuple[m.Message, list[int]]] = []
        while len(got) < 2:
            got += await asyncio.to_thread(worker.receive, 5.0)
        assert got[0] == (RESERVE, [])
        (fd,) = got[1][1]
        os.write(fd, b"x")
        os.close(fd)
        assert os.read(read_end, 8) == b"x"
        assert os.read(read_end, 8) == b"", "a copy of the descriptor was left open"
        os.close(read_end)
        assert channel.num_sent == worker.num_received == 2
        worker.send(m.Quiesced(1))
        worker.close()
        async with asyncio.timeout(5):
            await closed.wait()
        channel.close()
        return received

    assert asyncio.run(scenario()) == [m.Quiesced(1)]


def test_a_worker_can_be_given_descriptors_beyond_1024() -> None:
    """A parent with a thousand clients has no small numbers left for the sockets of the workers it restarts."""
    ours, theirs = socket.socketpair()
    high = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 1500)
    theirs.close()
    worker = Connection(socket.socket(fileno=high), EPOCH)
    wake_fd = os.eventfd(1)
    assert worker.receive(0.0) == []
    assert worker.receive(5.0, wake_fd) == [], "it slept although the descriptor was readable"
    ours.sendall(frames([m.Shutdown()])[0])
    assert worker.receive(5.0, wake_fd) == [(m.Shutdown(), [])]
    os.close(wake_fd)
    worker.close()
    ours.close()


def test_the_worker_notices_that_the_parent_is_gone() -> None:
    """End of file and a broken pipe are ChannelClosed, not a hang or another error."""
    ours, theirs = socket.socketpair()
    worker = Connection(theirs, EPOCH)
    ours.close()
    with pytest.raises(ChannelClosed):
        worker.receive(5.0)
    with pytest.raises(ChannelClosed):
        worker.send(m.Quiesced(1))
    worker.close()


def channel_pair() -> tuple[socket.socket, Connection]:
    ours, theirs = socket.socketpair()
    return ours, Connection(theirs, EPOCH)


def test_what_a_dead_worker_had_sent_is_read_although_writing_to_it_fails() -> None:
    """Its last words (a reason, tokens) count: a broken pipe ends the writing, the end of file ends the channel."""

    async def scenario() -> list[m.Message]:
        ours, worker = channel_pair()
        received: list[m.Message] = []
        closed = asyncio.Event()
        channel = Channel(ours, EPOCH, lambda message, _fds: received.append(message), lambda _error: closed.set())
        worker.send(m.StartFailed("the last words"))
        worker.close()
        channel.send(m.Abort(1))
        channel.send(m.Abort(2))
        async with asyncio.timeout(5):
            await closed.wait()
        return received

    assert asyncio.run(scenario()) == [m.StartFailed("the last words")]


def test_draining_ends_although_somebody_else_holds_the_socket_open() -> None:
    """A process forked by the worker may outlive it and keep the other end: what is there is read, nobody waits for more."""

    async def scenario() -> list[m.Message]:
        ours, worker = channel_pair()
        received: list[m.Message] = []
        channel = Channel(ours, EPOCH, lambda message, _fds: received.append(message), lambda _error: None)
        worker.send(m.Quiesced(1))
        channel.drain()
        channel.close()
        worker.close()
        return received

    assert asyncio.run(scenario()) == [m.Quiesced(1)]


def test_a_message_that_may_not_be_ends_its_worker_not_the_parent() -> None:
    """An error of ours while handling a message closes that channel with the error; nothing escapes into the loop."""

    async def scenario() -> Exception | None:
        ours, worker = channel_pair()
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def refuse(_message: m.Message, _fds: list[int]) -> None:
            raise IllegalTransitionError("no such move")

        Channel(ours, EPOCH, refuse, ended.set_result)
        worker.send(m.Quiesced(1))
        async with asyncio.timeout(5):
            error = await ended
        worker.close()
        return error

    assert isinstance(asyncio.run(scenario()), IllegalTransitionError)
