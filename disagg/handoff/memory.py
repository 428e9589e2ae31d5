"""Transport inside one process: workers of a simulation share a network of pools and copies are immediate.

One-sided like shm, or two-sided like UCX: then a push reaches only blocks that the peer expects under the same key, and what
nobody expects is lost without a word, as it is on a wire.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.errors import HandoffError
from disagg.handoff.plan import runs
from disagg.handoff.shm import Blocks, as_blocks
from disagg.handoff.transport import Arrived, Completed
from disagg.kv import KVLayout


class MemoryNetwork:
    """The pools of all workers of one simulated host, by (worker, epoch)."""

    def __init__(self, *, is_two_sided: bool = False) -> None:
        self.is_two_sided = is_two_sided
        self.pools: dict[tuple[str, int], tuple[KVLayout, memoryview]] = {}
        self.keys = itertools.count(1)
        self.expected: dict[int, _Expected] = {}  # by key

    def export(self, worker: str, epoch: int, layout: KVLayout, pool: memoryview) -> None:
        self.pools[worker, epoch] = (layout, pool)

    def withdraw(self, worker: str, epoch: int) -> None:
        self.pools.pop((worker, epoch), None)


@dataclass(eq=False, slots=True)
class _Expected:
    owner: MemoryTransport
    dispatch: int
    blocks: set[int]  # not yet written


class MemoryTransport:
    """Same-process copies. See ``Transport`` for the contract; ``fd`` and ``address`` are not needed and not touched."""

    name = "memory"

    def __init__(self, worker: str, layout: KVLayout, pool: memoryview, network: MemoryNetwork) -> None:
        self.worker = worker
        self.layout = layout
        self.is_two_sided = network.is_two_sided
        self.address = b"memory" if network.is_two_sided else b""
        self._blocks = as_blocks(pool, layout)
        self._network = network
        self._peers: dict[str, tuple[int, Blocks]] = {}
        self._keys: dict[int, int] = {}  # dispatch → key of what is expected for it
        self._done: list[Completed | Arrived] = []

    def __repr__(self) -> str:
        return f"MemoryTransport(peers {sorted(self._peers)})"

    def connect(self, peer: str, epoch: int, layout: KVLayout, num_blocks: int, fd: int, address: bytes) -> None:
        if difference := self.layout.difference(layout):
            raise HandoffError(f"{self.worker} cannot hand over to {peer}: {difference}")
        exported = self._network.pools.get((peer, epoch))
        if exported is None:
            raise HandoffError(f"{self.worker} cannot hand over to {peer}: no pool of epoch {epoch}")
        self._peers[peer] = (epoch, as_blocks(exported[1], layout))

    def disconnect(self, peer: str, epoch: int) -> None:
        if (known := self._peers.get(peer)) and known[0] == epoch:
            del self._peers[peer]

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int], key: int) -> None:
        known = self._peers.get(peer)
        if known is None or known[0] != epoch:
            error = f"{peer} (epoch {epoch}) is not connected to {self.worker}"
            self._done.append(Completed(dispatch, 0, 0.0, error))
            return
        expected = self._network.expected.get(key)
        for src, dst, count in runs(source, target):
            if not self.is_two_sided or (expected and expected.blocks.issuperset(range(dst, dst + count))):
                known[1][dst : dst + count] = self._blocks[src : src + count]
        if expected is not None:
            expected.blocks.difference_update(target)
            if not expected.blocks:
                expected.owner._arrived(expected.dispatch)
        self._done.append(Completed(dispatch, len(source) * self.layout.block_nbytes, 0.0))

    def cancel(self, dispatch: int) -> None:
        """Nothing waits here: every push has already been made."""

    def expect(self, dispatch: int, blocks: Sequence[int]) -> int:
        if not self.is_two_sided:
            return 0
        key = self._keys[dispatch] = next(self._network.keys)
        self._network.expected[key] = _Expected(self, dispatch, set(blocks))
        if not blocks:
            self._arrived(dispatch)
        return key

    def forget(self, dispatch: int) -> None:
        if dispatch in self._keys:
            self._arrived(dispatch, "forgotten")

    def completed(self) -> list[Completed | Arrived]:
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._peers.clear()
        for key in self._keys.values():
            del self._network.expected[key]
        self._keys.clear()

    def _arrived(self, dispatch: int, error: str | None = None) -> None:
        del self._network.expected[self._keys.pop(dispatch)]
        self._done.append(Arrived(dispatch, error))
