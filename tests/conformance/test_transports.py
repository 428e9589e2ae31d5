"""What every transport must do, whatever it moves the bytes with."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from disagg.errors import HandoffError
from disagg.handoff.host_pool import create_pool
from disagg.handoff.memory import MemoryNetwork, MemoryTransport
from disagg.handoff.shm import ShmTransport, as_blocks
from disagg.handoff.transport import Completed, Transport
from disagg.kv import KVLayout

NUM_BLOCKS = 64
# An odd number of bytes to a block (3 x 2 x 5 x 7 x 3 = 630, not a multiple of a page or a cache line).
LAYOUT = KVLayout(num_layers=3, num_kv_heads=5, block_size=7, head_dim=3, dtype="uint8", model="conformance")
DEADLINE_S = 10.0


@dataclass
class Rig:
    """A writer connected to nobody yet, and a way to make peers for it."""

    transport: Transport
    source: np.ndarray
    add_peer: Callable[[str, int], np.ndarray]
    connect: Callable[..., None]
    completed: list[Completed] = field(default_factory=list)

    def wait_for(self, count: int) -> list[Completed]:
        """The first ``count`` completions since the last call."""
        while len(self.completed) < count:
            if (fd := self.transport.fileno()) >= 0:
                readable, _, _ = select.select([fd], [], [], DEADLINE_S)
                assert readable, f"{len(self.completed)} of {count} pushes completed in {DEADLINE_S} s"
            self.completed += self.transport.completed()
        done, self.completed = self.completed[:count], self.completed[count:]
        return done


def _memory_rig() -> Iterator[Rig]:
    network = MemoryNetwork()
    pool = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_nbytes))
    transport = MemoryTransport("prefill-0", LAYOUT, pool, network)

    def add_peer(name: str, epoch: int) -> np.ndarray:
        memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_nbytes))
        network.export(name, epoch, LAYOUT, memory)
        return as_blocks(memory, LAYOUT)

    def connect(name: str, epoch: int, layout: KVLayout = LAYOUT) -> None:
        transport.connect(name, epoch, layout, NUM_BLOCKS, -1, b"")

    yield Rig(transport, as_blocks(pool, LAYOUT), add_peer, connect)
    transport.close()


def _shm_rig() -> Iterator[Rig]:
    own_fd, own = create_pool(NUM_BLOCKS * LAYOUT.block_nbytes, "conformance")
    os.close(own_fd)
    transport = ShmTransport("prefill-0", LAYOUT, memoryview(own))
    fds: dict[tuple[str, int], int] = {}

    def add_peer(name: str, epoch: int) -> np.ndarray:
        fd, mapping = create_pool(NUM_BLOCKS * LAYOUT.block_nbytes, f"conformance-{name}")
        fds[name, epoch] = fd
        return as_blocks(mapping, LAYOUT)

    def connect(name: str, epoch: int, layout: KVLayout = LAYOUT) -> None:
        transport.connect(name, epoch, layout, NUM_BLOCKS, os.dup(fds[name, epoch]), b"")

    yield Rig(transport, as_blocks(memoryview(own), LAYOUT), add_peer, connect)
    transport.close()
    for fd in fds.values():
        os.close(fd)


@pytest.fixture(params=["memory", "shm"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A writer whose pool holds random bytes; afterwards no descriptor is left that was not there before."""
    before = set(os.listdir("/proc/self/fd"))
    makers = {"memory": _memory_rig, "shm": _shm_rig}
    for rig in makers[request.param]():
        rig.source[:] = np.random.default_rng(1).integers(0, 256, rig.source.shape, dtype=np.uint8)
        yield rig
        vars(rig).clear()  # a mapping lives, and keeps its descriptor, as long as an array over it
    assert set(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"


def test_round_trip_is_bit_exact_and_touches_nothing_else(rig: Rig) -> None:
    """Scattered blocks arrive in their places; every other byte of the peer's pool is as it was."""
    peer = rig.add_peer("decode-0", 1)
    peer[:] = 0xEE
    rig.connect("decode-0", 1)
    source, target = [5, 6, 7, 1, 40], [0, 1, 2, 60, 33]
    rig.transport.push(1, "decode-0", 1, source, target, 0)
    (done,) = rig.wait_for(1)
    assert (done.dispatch, done.nbytes, done.error) == (1, 5 * LAYOUT.block_nbytes, None)
    assert np.array_equal(peer[target], rig.source[source])
    others = [block for block in range(NUM_BLOCKS) if block not in target]
    assert (peer[others] == 0xEE).all()


def test_nothing_to_move_still_completes(rig: Rig) -> None:
    """A push of no blocks ends like any other."""
    rig.add_peer("decode-0", 1)
    rig.connect("decode-0", 1)
    rig.transport.push(9, "decode-0", 1, [], [], 0)
    assert [(done.nbytes, done.error) for done in rig.wait_for(1)] == [(0, None)]


def test_a_thousand_at_once_complete_in_order(rig: Rig) -> None:
    """Each push has exactly one completion, in the order of the pushes."""
    peer = rig.add_peer("decode-0", 1)
    rig.connect("decode-0", 1)
    for dispatch in range(1000):
        rig.transport.push(dispatch, "decode-0", 1, [dispatch % NUM_BLOCKS], [(dispatch * 7) % NUM_BLOCKS], 0)
    assert [done.dispatch for done in rig.wait_for(1000)] == list(range(1000))
    assert rig.transport.completed() == []
    last = {(dispatch * 7) % NUM_BLOCKS: dispatch % NUM_BLOCKS for dispatch in range(1000)}
    assert all(np.array_equal(peer[dst], rig.source[src]) for dst, src in last.items())


def test_after_cancel_and_completion_blocks_can_be_reused(rig: Rig) -> None:
    """Whatever a cancel drops, each push completes; later pushes of other dispatches are whole."""
    peer = rig.add_peer("decode-0", 1)
    rig.connect("decode-0", 1)
    for _ in range(50):
        rig.transport.push(1, "decode-0", 1, list(range(32)), list(range(32)), 0)
    rig.transport.cancel(1)
    done = rig.wait_for(50)
    assert all(d.dispatch == 1 and d.error is None and d.nbytes in (0, 32 * LAYOUT.block_nbytes) for d in done)
    peer[:] = 0
    rig.transport.push(2, "decode-0", 1, [3], [4], 0)
    assert rig.wait_for(1)[0].nbytes == LAYOUT.block_nbytes
    assert np.array_equal(peer[4], rig.source[3])
    assert not peer[:4].any(), "a cancelled dispatch wrote after its completion"
    rig.transport.push(1, "decode-0", 1, [3], [5], 0)
    assert rig.wait_for(1)[0].nbytes == LAYOUT.block_nbytes, "the cancel outlived its dispatch"


def test_another_layout_is_refused_with_both_sides_named(rig: Rig) -> None:
    """No byte moves between pools of different shape or model."""
    rig.add_peer("decode-0", 1)
    with pytest.raises(HandoffError, match=r"prefill-0 cannot hand over to decode-0: .*block_size 7 here, 14 there"):
        rig.connect("decode-0", 1, msgspec.structs.replace(LAYOUT, block_size=14))


def test_an_unknown_or_stale_peer_is_an_error_of_the_push(rig: Rig) -> None:
    """A push to nobody, or to an earlier incarnation, completes with an error and writes nothing."""
    old = rig.add_peer("decode-0", 1)
    new = rig.add_peer("decode-0", 2)
    rig.connect("decode-0", 1)
    rig.connect("decode-0", 2)
    rig.transport.push(1, "decode-0", 1, [0], [0], 0)
    rig.transport.push(2, "decode-9", 1, [0], [0], 0)
    rig.transport.push(3, "decode-0", 2, [0], [0], 0)
    errors = [done.error for done in rig.wait_for(3)]
    assert errors[0] is not None
    assert "epoch 1" in errors[0]
    assert errors[1] is not None
    assert errors[2] is None
    assert not old.any()
    assert np.array_equal(new[0], rig.source[0])


def test_disconnect_closes_only_the_epoch_it_names(rig: Rig) -> None:
    """News of an old incarnation's death does not cut off the new one."""
    rig.add_peer("decode-0", 1)
    rig.add_peer("decode-0", 2)
    rig.connect("decode-0", 2)
    rig.transport.disconnect("decode-0", 1)
    rig.transport.push(1, "decode-0", 2, [0], [0], 0)
    assert rig.wait_for(1)[0].error is None
    rig.transport.disconnect("decode-0", 2)
    rig.transport.disconnect("decode-0", 2)
    rig.transport.push(2, "decode-0", 2, [0], [0], 0)
    assert rig.wait_for(1)[0].error is not None


def test_closing_twice_is_safe(rig: Rig) -> None:
    """Also with pushes still queued."""
    rig.add_peer("decode-0", 1)
    rig.connect("decode-0", 1)
    for dispatch in range(20):
        rig.transport.push(dispatch, "decode-0", 1, list(range(32)), list(range(32)), 0)
    rig.transport.close()
    rig.transport.close()
    assert "peers []" in repr(rig.transport)
