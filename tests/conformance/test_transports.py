"""What every transport must do, whatever it moves the bytes with."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop

from disagg.errors import HandoffError, StartupError
from disagg.handoff.host_pool import create_pool
from disagg.handoff.memory import MemoryNetwork, MemoryTransport
from disagg.handoff.shm import as_blocks
from disagg.handoff.transport import Arrived, Completed, Transport
from disagg.kv import KVLayout
from tests.conformance import peer as other_process

NUM_BLOCKS = 1024
# An odd number of bytes to a block (3 x 2 x 5 x 7 x 3 = 630, not a multiple of a page or a cache line).
LAYOUT = KVLayout(num_layers=3, num_kv_heads=5, block_size=7, head_dim=3, dtype="uint8", model="conformance")
DEADLINE_S = 10.0
UCX = [
    pytest.param(kind, marks=pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed"))
    for kind in other_process.TLS
]


@dataclass
class End:
    """One worker's transport and its pool, in this process."""

    name: str
    epoch: int
    transport: Transport
    blocks: np.ndarray
    pool_fd: int = -1
    ended: list[Completed | Arrived] = field(default_factory=list)

    def wait_for(self, count: int) -> list[Completed | Arrived]:
        """The first ``count`` of what has ended since the last call."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.ended) < count:
            if (fd := self.transport.fileno()) >= 0:
                readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
                assert readable, f"{len(self.ended)} of {count} ended in {DEADLINE_S} s"
            self.ended += self.transport.completed()
        ended, self.ended = self.ended[:count], self.ended[count:]
        return ended


class Rig:
    """A writer connected to nobody yet, and a way to make peers for it."""

    def __init__(self, kind: str, layout: KVLayout = LAYOUT, num_blocks: int = NUM_BLOCKS) -> None:
        self.kind = kind
        self.layout = layout
        self.num_blocks = num_blocks
        self._network = MemoryNetwork(is_two_sided=kind == "memory-two-sided")
        self._ends: list[End] = []
        self.writer = self.add("prefill-0", 1)
        self.writer.blocks[:] = np.random.default_rng(1).integers(0, 256, self.writer.blocks.shape, dtype=np.uint8)

    def add(self, name: str, epoch: int) -> End:
        fd, mapping = create_pool(self.num_blocks * self.layout.block_nbytes, f"conformance-{name}")
        pool = memoryview(mapping)
        if self.kind.startswith("memory"):
            self._network.export(name, epoch, self.layout, pool)
            transport: Transport = MemoryTransport(name, self.layout, pool, self._network)
        else:
            transport = other_process.make(self.kind, name, pool, self.layout)
        self._ends.append(End(name, epoch, transport, as_blocks(pool, self.layout), fd))
        return self._ends[-1]

    def connect(self, reader: End, layout: KVLayout | None = None) -> None:
        fd = os.dup(reader.pool_fd) if self.kind == "shm" else -1
        address = reader.transport.address
        self.writer.transport.connect(reader.name, reader.epoch, layout or self.layout, self.num_blocks, fd, address)

    def add_connected(self, name: str = "decode-0", epoch: int = 1) -> End:
        reader = self.add(name, epoch)
        self.connect(reader)
        return reader

    def push(self, dispatch: int, reader: End, source: list[int], target: list[int], key: int | None = None) -> None:
        """Reserve (unless there is a key from before) and push."""
        key = reader.transport.expect(dispatch, target) if key is None else key
        self.writer.transport.push(dispatch, reader.name, reader.epoch, source, target, key)

    def transfer(self, dispatch: int, reader: End, source: list[int], target: list[int]) -> Completed:
        """Push, and wait until the bytes are there."""
        self.push(dispatch, reader, source, target)
        (completed,) = self.writer.wait_for(1)
        assert isinstance(completed, Completed)
        if reader.transport.is_two_sided:
            assert reader.wait_for(1) == [Arrived(dispatch)]
        return completed

    def close(self) -> None:
        for end in self._ends:
            end.transport.close()
            os.close(end.pool_fd)
            self._network.withdraw(end.name, end.epoch)
            vars(end).clear()
        self._ends.clear()


def _belongings() -> dict[str, str]:
    """What a test must leave as it found it: descriptors, shared memory by name, threads."""
    gc.collect()  # a mapping lives, and keeps its descriptor, as long as an array over it
    belongings = {thread.name: "a thread" for thread in threading.enumerate()}
    belongings |= {f"/dev/shm/{name}": "shared memory" for name in os.listdir("/dev/shm")}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was open for the listing
            belongings[f"descriptor {fd}"] = os.readlink(f"/proc/self/fd/{fd}")
    return belongings


@contextlib.contextmanager
def _nothing_left(kind: str) -> Iterator[None]:
    # What these libraries set up once in a process stays.
    uvloop.new_event_loop().close()
    if kind in other_process.TLS:
        other_process.make(kind, "first", memoryview(bytearray(LAYOUT.block_nbytes)), LAYOUT).close()
    before = _belongings()
    yield
    left = dict(_belongings().items() - before.items())
    assert left == {}


@pytest.fixture(params=["memory", "memory-two-sided", "shm", *UCX])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A writer whose pool holds random bytes; afterwards nothing is left that was not there before."""
    with _nothing_left(request.param):
        rig = Rig(request.param)
        yield rig
        rig.close()


@pytest.fixture(params=UCX)
def ucx_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """As ``rig``, with blocks so large that UCX asks the reader before it sends one."""
    with _nothing_left(request.param):
        rig = Rig(request.param, other_process.LAYOUT, other_process.NUM_BLOCKS)
        yield rig
        rig.close()


def test_round_trip_is_bit_exact_and_touches_nothing_else(rig: Rig) -> None:
    """Scattered blocks arrive in their places; every other byte of the peer's pool is as it was."""
    reader = rig.add_connected()
    reader.blocks[:] = 0xEE
    source, target = [5, 6, 7, 1, 40], [0, 1, 2, 60, 33]
    done = rig.transfer(1, reader, source, target)
    assert (done.dispatch, done.nbytes, done.error) == (1, 5 * LAYOUT.block_nbytes, None)
    assert done.seconds >= 0.0
    assert np.array_equal(reader.blocks[target], rig.writer.blocks[source])
    others = [block for block in range(NUM_BLOCKS) if block not in target]
    assert (reader.blocks[others] == 0xEE).all()


def test_several_pushes_fill_one_reservation(rig: Rig) -> None:
    """A prompt's chunks come one after the other under one key; it has arrived when all have."""
    reader = rig.add_connected()
    key = reader.transport.expect(1, list(range(30)))
    for first in (0, 10, 20):
        blocks = list(range(first, first + 10))
        rig.push(1, reader, blocks, blocks, key)
    assert [(done.dispatch, done.error) for done in rig.writer.wait_for(3)] == [(1, None)] * 3
    if reader.transport.is_two_sided:
        assert reader.wait_for(1) == [Arrived(1)]
    assert np.array_equal(reader.blocks[:30], rig.writer.blocks[:30])


def test_nothing_to_move_still_ends(rig: Rig) -> None:
    """A push of no blocks, and a reservation of none, end like any other."""
    reader = rig.add_connected()
    done = rig.transfer(9, reader, [], [])
    assert (done.nbytes, done.error) == (0, None)


def test_a_thousand_at_once_complete_in_order(rig: Rig) -> None:
    """Each push has exactly one completion, in the order of the pushes, and each reservation one arrival."""
    reader = rig.add_connected()
    target = [(dispatch * 7) % NUM_BLOCKS for dispatch in range(1000)]
    for dispatch in range(1000):
        rig.push(dispatch, reader, [dispatch], [target[dispatch]])
    assert [done.dispatch for done in rig.writer.wait_for(1000)] == list(range(1000))
    if reader.transport.is_two_sided:
        assert sorted(reader.wait_for(1000), key=lambda end: end.dispatch) == [Arrived(dispatch) for dispatch in range(1000)]
    assert (rig.writer.transport.completed(), reader.transport.completed()) == ([], [])
    assert np.array_equal(reader.blocks[target], rig.writer.blocks[:1000])


def test_after_cancel_and_completion_blocks_can_be_reused(rig: Rig) -> None:
    """Whatever a cancel drops, each push completes; later pushes of other dispatches are whole."""
    reader = rig.add_connected()
    key = reader.transport.expect(1, list(range(640)))
    chunks = [list(range(first, first + 32)) for first in range(0, 640, 32)]
    for blocks in chunks:
        rig.push(1, reader, blocks, blocks, key)
    rig.writer.transport.cancel(1)
    done = rig.writer.wait_for(len(chunks))
    assert all(d.dispatch == 1 and d.error is None and d.nbytes in (0, 32 * LAYOUT.block_nbytes) for d in done)
    reader.transport.forget(1)
    if reader.transport.is_two_sided:
        assert [end.dispatch for end in reader.wait_for(1)] == [1]
    reader.blocks[:] = 0
    assert rig.transfer(2, reader, [3], [4]).nbytes == LAYOUT.block_nbytes
    assert np.array_equal(reader.blocks[4], rig.writer.blocks[3])
    assert not reader.blocks[:4].any(), "a cancelled dispatch wrote after its completion"
    assert rig.transfer(1, reader, [3], [5]).nbytes == LAYOUT.block_nbytes, "the cancel outlived its dispatch"


def test_another_layout_is_refused_with_both_sides_named(rig: Rig) -> None:
    """No byte moves between pools of different shape or model."""
    reader = rig.add("decode-0", 1)
    with pytest.raises(HandoffError, match=r"prefill-0 cannot hand over to decode-0: .*block_size 7 here, 14 there"):
        rig.connect(reader, msgspec.structs.replace(LAYOUT, block_size=14))


def test_an_unknown_or_stale_peer_is_an_error_of_the_push(rig: Rig) -> None:
    """A push to nobody, or to an earlier incarnation, completes with an error and writes nothing."""
    old = rig.add_connected("decode-0", 1)
    new = rig.add_connected("decode-0", 2)
    rig.push(1, old, [0], [0])
    rig.writer.transport.push(2, "decode-9", 1, [0], [0], 0)
    rig.push(3, new, [0], [0])
    errors = {done.dispatch: done.error for done in rig.writer.wait_for(3)}
    assert errors[1] is not None
    assert "epoch 1" in errors[1]
    assert errors[2] is not None
    assert errors[3] is None
    if new.transport.is_two_sided:
        assert new.wait_for(1) == [Arrived(3)]
    assert not old.blocks.any()
    assert np.array_equal(new.blocks[0], rig.writer.blocks[0])


def test_disconnect_closes_only_the_epoch_it_names(rig: Rig) -> None:
    """News of an old incarnation's death does not cut off the new one."""
    reader = rig.add_connected("decode-0", 2)
    rig.writer.transport.disconnect("decode-0", 1)
    assert rig.transfer(1, reader, [0], [0]).error is None
    rig.writer.transport.disconnect("decode-0", 2)
    rig.writer.transport.disconnect("decode-0", 2)
    rig.push(2, reader, [0], [0])
    assert rig.writer.wait_for(1)[0].error is not None


def test_a_peer_can_be_connected_again(rig: Rig) -> None:
    """What follows a disconnect is as good as what came before it."""
    reader = rig.add_connected()
    for dispatch in range(1, 4):
        assert rig.transfer(dispatch, reader, [dispatch], [dispatch]).error is None
        rig.writer.transport.disconnect("decode-0", 1)
        rig.connect(reader)
    assert np.array_equal(reader.blocks[1:4], rig.writer.blocks[1:4])


def test_closing_twice_is_safe(rig: Rig) -> None:
    """Also with pushes still queued and receives still posted."""
    reader = rig.add_connected()
    for dispatch in range(20):
        blocks = list(range(dispatch * 32, dispatch * 32 + 32))
        rig.push(dispatch, reader, blocks, blocks)
    for end in (rig.writer, reader):
        end.transport.close()
        end.transport.close()
    assert "peers []" in repr(rig.writer.transport)


@pytest.mark.parametrize("kind", ["shm", *UCX])
def test_a_bug_on_its_thread_is_the_callers_and_not_a_silence(kind: str) -> None:
    """A block that no pool has: the push cannot complete, and nor can one after it. Whoever asks is told, so that it can end."""
    rig = Rig(kind)
    try:
        reader = rig.add_connected()
        rig.push(1, reader, [NUM_BLOCKS + 1], [0])
        rig.push(2, reader, [1], [1])
        with pytest.raises(RuntimeError, match="the transfer thread has ended"):
            rig.writer.wait_for(2)
    finally:
        rig.close()


@pytest.mark.parametrize("rig", ["memory-two-sided", *UCX], indirect=True)
def test_a_writer_that_comes_too_late_reaches_nothing(rig: Rig) -> None:
    """Once a reservation is forgotten its key writes nowhere, not even where the block is expected for another dispatch."""
    reader = rig.add_connected()
    old_key = reader.transport.expect(1, [0, 1, 2])
    reader.transport.forget(1)
    reader.transport.forget(1)
    assert reader.wait_for(1) == [Arrived(1, "forgotten")]
    new_key = reader.transport.expect(2, [0, 1, 2])
    rig.push(1, reader, [10, 11, 12], [0, 1, 2], old_key)
    (late,) = rig.writer.wait_for(1)
    assert late.error is None, "the late writer's own end is no error"
    assert not reader.blocks.any()
    rig.push(2, reader, [20, 21, 22], [0, 1, 2], new_key)
    assert reader.wait_for(1) == [Arrived(2)]
    assert np.array_equal(reader.blocks[:3], rig.writer.blocks[20:23])
    assert not reader.blocks[3:].any()


def test_large_blocks_whose_reader_has_gone_away_do_not_hold_up_others(ucx_rig: Rig) -> None:
    """A writer that UCX makes wait for the reader's consent is told at once that nobody wants it; the next push is whole."""
    reader = ucx_rig.add_connected()
    blocks = list(range(100))
    key = reader.transport.expect(1, blocks)
    reader.transport.forget(1)
    assert reader.wait_for(1) == [Arrived(1, "forgotten")]
    begun = time.monotonic()
    ucx_rig.push(1, reader, blocks, blocks, key)
    (late,) = ucx_rig.writer.wait_for(1)
    assert late.error is None
    assert time.monotonic() - begun < other_process.STALL_S
    assert not reader.blocks.any()
    assert ucx_rig.transfer(2, reader, blocks, blocks).error is None
    assert np.array_equal(reader.blocks[:100], ucx_rig.writer.blocks[:100])


def test_forgetting_in_the_middle_leaves_the_blocks_alone_from_its_arrival_on(ucx_rig: Rig) -> None:
    """Arrived is the moment from which a block can be given to somebody else, however far the writer had come."""
    reader = ucx_rig.add_connected()
    blocks = list(range(ucx_rig.num_blocks))
    ucx_rig.push(1, reader, blocks, blocks)
    reader.transport.forget(1)
    assert [end.dispatch for end in reader.wait_for(1)] == [1]
    reader.blocks[:] = 0xEE
    ucx_rig.writer.wait_for(1)
    assert (reader.blocks == 0xEE).all()


def test_nobody_at_the_address_is_an_error_of_the_push_or_of_connect(ucx_rig: Rig) -> None:
    """A worker that has gone since it told its address costs a bounded time."""
    reader = ucx_rig.add("decode-0", 1)
    reader.transport.close()
    with contextlib.suppress(HandoffError):
        ucx_rig.connect(reader)
    ucx_rig.writer.transport.push(1, "decode-0", 1, [0], [0], 1)
    (done,) = ucx_rig.writer.wait_for(1)
    assert done.error is not None
    assert "decode-0" in done.error


def test_a_transport_without_an_address_is_refused(ucx_rig: Rig) -> None:
    """A peer that only has a pool to offer, like one of shm's, cannot be reached."""
    with pytest.raises(HandoffError, match="prefill-0 cannot hand over to decode-0: its transport has no address"):
        ucx_rig.writer.transport.connect("decode-0", 1, ucx_rig.layout, ucx_rig.num_blocks, -1, b"")


@pytest.mark.parametrize("kind", UCX)
def test_the_environment_does_not_configure_ucx(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that would leave it without any transport change nothing, and nothing of ucxx's own stays in the environment."""
    with _nothing_left(kind):
        monkeypatch.setenv("UCX_NET_DEVICES", "nowhere0")
        monkeypatch.setenv("UCX_RNDV_THRESH", "inf")
        monkeypatch.setenv("UCX_POSIX_DIR", "/nowhere")
        rig = Rig(kind)
        done = rig.transfer(1, rig.add_connected(), [1], [2])
        rig.close()
        assert done.error is None
        assert not [name for name in os.environ if name.startswith("UCX_")]


@pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
def test_options_that_ucx_refuses_are_named() -> None:
    """A transport or interface that this host does not have stops the worker at start, with what was asked for."""
    from disagg.handoff.ucx import UcxTransport

    with pytest.raises(StartupError, match="nowhere0"):
        UcxTransport("prefill-0", LAYOUT, memoryview(bytearray(LAYOUT.block_nbytes)), tls="tcp", devices="nowhere0")


def test_without_ucxx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX is an extra: a configuration that asks for it names the way to get it."""
    from disagg.handoff.ucx import UcxTransport

    for name in ("ucxx", "ucxx._lib"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StartupError, match=r"pip install 'disagg\[ucx\]'"):
        UcxTransport("prefill-0", LAYOUT, memoryview(bytearray(LAYOUT.block_nbytes)))


def test_it_wakes_a_program_that_runs_uvloop(rig: Rig) -> None:
    """The descriptor works with a loop that takes it as a reader, for the writer and for who waits for the bytes."""
    if rig.writer.transport.fileno() < 0:
        assert rig.kind.startswith("memory")  # immediate: nothing to wait for
        return
    reader = rig.add_connected()

    async def transfer() -> list[Completed | Arrived]:
        ends = [rig.writer, reader] if reader.transport.is_two_sided else [rig.writer]
        ended: list[Completed | Arrived] = []
        is_over = asyncio.Event()

        def look(end: End) -> None:
            ended.extend(end.transport.completed())
            if len(ended) == len(ends):
                is_over.set()

        loop = asyncio.get_running_loop()
        for end in ends:
            loop.add_reader(end.transport.fileno(), look, end)
        rig.push(1, reader, [1], [2])
        await asyncio.wait_for(is_over.wait(), DEADLINE_S)
        for end in ends:
            loop.remove_reader(end.transport.fileno())
        return ended

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert [end.error for end in runner.run(transfer())] == [None] * (2 if reader.transport.is_two_sided else 1)
    assert np.array_equal(reader.blocks[2], rig.writer.blocks[1])


@contextlib.contextmanager
def _peer(kind: str, role: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process at the other end. It stops itself in the middle of the second of two dispatches."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, other_process.__file__, kind, role, str(theirs.fileno())]
    root = str(Path(__file__).parents[2])
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": root}) as process:
        theirs.close()
        try:
            yield process, ours
        finally:
            process.kill()


def _wait_until_stopped(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline, "the peer did not come as far as its first dispatch"
        time.sleep(0.001)


@pytest.mark.parametrize("kind", ["shm", *UCX])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_dies_or_falls_silent_ends_the_push(kind: str, ending: signal.Signals) -> None:
    """In bounded time; where the reader has to take part, with an error that names it, also of the next push."""
    with _nothing_left(kind), _peer(kind, "reader") as (process, channel):
        said, (pool_fd,), _, _ = socket.recv_fds(channel, 1 << 16, 1)
        said = json.loads(said)
        writer = Rig(kind, other_process.LAYOUT, other_process.NUM_BLOCKS)
        own = writer.writer
        own.transport.connect("reader-0", 1, writer.layout, writer.num_blocks, pool_fd, bytes.fromhex(said["address"]))
        own.transport.push(1, "reader-0", 1, other_process.FIRST, other_process.FIRST, said["keys"][0])
        _wait_until_stopped(process)
        own.transport.push(2, "reader-0", 1, other_process.SECOND, other_process.SECOND, said["keys"][1])
        if ending is signal.SIGKILL:
            process.kill()
            process.wait()
        own.transport.push(3, "reader-0", 1, [0], [0], said["keys"][0])
        ended = own.wait_for(3)
        assert [end.dispatch for end in ended] == [1, 2, 3]
        if own.transport.is_two_sided:
            assert ended[0].error is None
            assert ended[1].error is not None
            assert "reader-0" in ended[1].error
            assert ended[2].error is not None
        writer.close()


@pytest.mark.parametrize("kind", UCX)
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_dies_or_falls_silent_half_way_cannot_hold_the_blocks(kind: str, ending: signal.Signals) -> None:
    """What it had begun to write is forgotten in bounded time, and a writer that wakes up again writes nothing more."""
    with _nothing_left(kind), _peer(kind, "writer") as (process, channel):
        rig = Rig(kind, other_process.LAYOUT, other_process.NUM_BLOCKS)
        reader = rig.add("reader-0", 1)
        keys = [reader.transport.expect(1, other_process.FIRST), reader.transport.expect(2, other_process.SECOND)]
        channel.send(json.dumps({"address": reader.transport.address.hex(), "keys": keys}).encode())
        _wait_until_stopped(process)
        assert reader.wait_for(1) == [Arrived(1)]
        if ending is signal.SIGKILL:
            process.kill()
            process.wait()
        reader.transport.forget(2)
        (end,) = reader.wait_for(1)
        assert end.dispatch == 2
        assert end.error is not None
        assert (reader.blocks[other_process.FIRST] == other_process.WRITTEN).all()
        reader.blocks[:] = 0xEE
        if ending is signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            assert process.wait(DEADLINE_S) == 0, "the writer's own push did not end"
        assert rig.transfer(3, rig.add_connected("decode-9", 1), [1], [1]).error is None
        assert (reader.blocks == 0xEE).all()
        rig.close()
