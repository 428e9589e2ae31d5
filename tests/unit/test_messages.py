"""Messages and the channel they travel on."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import messages as m
from disagg.channel import MAX_FRAME, Channel, ChannelClosed, Connection, FrameReader, frame
from disagg.errors import IllegalTransitionError, ProtocolError
from disagg.kv import KVLayout
from disagg.request import SamplingParams

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=8, dtype="uint8", model="x")
PARAMS = SamplingParams(max_tokens=3, logit_bias={5: -1.5}, stop_token_ids=(1, 2), seed=2**63 - 1)
OUTPUT = m.TokenOutput(7, 65, "stop", m.TokenLogprobs(-0.5, [(65, -0.5), (66, -1.0)]))
SAMPLES: list[m.Message] = [
    m.Connect("decode-0", 2, LAYOUT, 9, b"address", 0),
    m.Disconnect("decode-0", 2),
    m.Reserve(1, [1, 2, 3], 2, PARAMS, 2.5),
    m.Prefill(1, [1, 2, 3], 3, PARAMS, m.Target("decode-0", 1, [4, 5], 1)),
    m.Prefill(1, [1], 1, PARAMS, None),
    m.Commit(1, 65),
    m.Abort(1),
    m.Verify(1),
    m.Shutdown(),
    m.Loading(0.5, "weights"),
    m.StartFailed("no"),
    m.Prefilled(7, OUTPUT, 16, [m.TokenLogprobs(-1.0, [])], 0.1, 0.2),
    m.Pushed(7, 100, 0.5, None),
    m.Pushed(7, 100, 0.5, None, [2**64 - 1, 0]),
    m.Commit(1, 65, [2**64 - 1, 0]),
    m.Rejected(7, "kv_corrupted", "block 3"),
    m.Tokens([OUTPUT, m.TokenOutput(8, 66)]),
    m.Quiesced(7),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda s: type(s).__name__)
def test_a_message_survives_the_wire(message: m.Message) -> None:
    """decode(encode(m)) == m for every kind of message."""
    assert m.decode(m.encode(message)) == message


def test_every_kind_has_its_own_tag() -> None:
    """The decoder knows each struct by name; none shadows another."""
    names = [kind.__name__ for kind in get_args(m.Message)]
    assert len(names) == len(set(names)) == len(get_args(m.ToWorker)) + len(get_args(m.ToParent))


@given(st.binary(max_size=200))
def test_garbage_raises_protocol_error_and_nothing_else(data: bytes) -> None:
    """Whatever the bytes, the answer is messages or ProtocolError."""
    reader = FrameReader()
    reader.feed(data, [])
    try:
        received = list(reader.messages())
    except ProtocolError:
        received = []
    assert all(isinstance(message, get_args(m.Message)) for message, _ in received)


@given(st.lists(st.sampled_from(SAMPLES), max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_any_split_of_the_byte_stream_gives_the_same_messages(sent: list[m.Message], cuts: list[int]) -> None:
    """Frames may arrive in pieces of any size."""
    data, reader, received, position = b"".join(map(frame, sent)), FrameReader(), [], 0
    while position < len(data):
        step = cuts[position % len(cuts)]
        reader.feed(data[position : position + step], [])
        received += [message for message, _ in reader.messages()]
        position += step
    assert received == sent


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    """A wrong length cannot make the reader wait for, or hold, gigabytes."""
    reader = FrameReader()
    reader.feed((MAX_FRAME + 1).to_bytes(4, "little"), [])
    with pytest.raises(ProtocolError, match="over the limit"):
        list(reader.messages())


def test_a_message_without_its_descriptor_is_a_protocol_error() -> None:
    """num_fds is checked, not trusted."""
    reader = FrameReader()
    reader.feed(frame(m.Connect("decode-0", 1, LAYOUT, 1)), [])
    with pytest.raises(ProtocolError, match="0 of 1"):
        list(reader.messages())


def test_both_ends_exchange_messages_and_descriptors_in_order() -> None:
    """A descriptor arrives with its message, also behind one too large for the socket's buffer."""

    async def scenario() -> list[m.Message]:
        ours, theirs = socket.socketpair()
        received: list[m.Message] = []
        closed = asyncio.Event()
        channel = Channel(ours, lambda message, _fds: received.append(message), lambda _error: closed.set())
        worker = Connection(theirs)
        big = m.Reserve(1, list(range(300_000)), 300_000, PARAMS, 1.0)
        read_end, write_end = os.pipe()
        channel.send(big)
        channel.send(m.Connect("decode-0", 1, LAYOUT, 1), [write_end])
        os.close(write_end)  # the channel has its own copy
        got: list[tuple[m.Message, list[int]]] = []
        while len(got) < 2:
            got += await asyncio.to_thread(worker.receive, 5.0)
        assert got[0] == (big, [])
        (fd,) = got[1][1]
        os.write(fd, b"x")
        os.close(fd)
        assert os.read(read_end, 8) == b"x"
        assert os.read(read_end, 8) == b"", "a copy of the descriptor was left open"
        os.close(read_end)
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
    worker = Connection(socket.socket(fileno=high))
    wake_fd = os.eventfd(1)
    assert worker.receive(0.0) == []
    assert worker.receive(5.0, wake_fd) == [], "it slept although the descriptor was readable"
    ours.sendall(frame(m.Shutdown()))
    assert worker.receive(5.0, wake_fd) == [(m.Shutdown(), [])]
    os.close(wake_fd)
    worker.close()
    ours.close()


def test_the_worker_notices_that_the_parent_is_gone() -> None:
    """End of file and a broken pipe are ChannelClosed, not a hang or another error."""
    ours, theirs = socket.socketpair()
    worker = Connection(theirs)
    ours.close()
    with pytest.raises(ChannelClosed):
        worker.receive(5.0)
    with pytest.raises(ChannelClosed):
        worker.send(m.Quiesced(1))
    worker.close()


def channel_pair() -> tuple[socket.socket, Connection]:
    ours, theirs = socket.socketpair()
    return ours, Connection(theirs)


def test_what_a_dead_worker_had_sent_is_read_although_writing_to_it_fails() -> None:
    """Its last words (a reason, tokens) count: a broken pipe ends the writing, the end of file ends the channel."""

    async def scenario() -> list[m.Message]:
        ours, worker = channel_pair()
        received: list[m.Message] = []
        closed = asyncio.Event()
        channel = Channel(ours, lambda message, _fds: received.append(message), lambda _error: closed.set())
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
        channel = Channel(ours, lambda message, _fds: received.append(message), lambda _error: None)
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

        Channel(ours, refuse, ended.set_result)
        worker.send(m.Quiesced(1))
        async with asyncio.timeout(5):
            error = await ended
        worker.close()
        return error

    assert isinstance(asyncio.run(scenario()), IllegalTransitionError)
