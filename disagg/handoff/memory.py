"""Transport inside one process: workers of a simulation share a registry of pools and copies are immediate."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.errors import HandoffError
from disagg.handoff.plan import runs
from disagg.handoff.shm import Blocks, as_blocks
from disagg.handoff.transport import Completed
from disagg.kv import KVLayout


class MemoryNetwork:
    """The pools of all workers of one simulated host, by (worker, epoch)."""

    def __init__(self) -> None:
        self.pools: dict[tuple[str, int], tuple[KVLayout, memoryview]] = {}

    def export(self, worker: str, epoch: int, layout: KVLayout, pool: memoryview) -> None:
        self.pools[worker, epoch] = (layout, pool)

    def withdraw(self, worker: str, epoch: int) -> None:
        self.pools.pop((worker, epoch), None)


class MemoryTransport:
    """Same-process copies. See ``Transport`` for the contract; ``fd`` is not needed and not touched."""

    name = "memory"

    def __init__(self, worker: str, layout: KVLayout, pool: memoryview, network: MemoryNetwork) -> None:
        self.worker = worker
        self.layout = layout
        self._blocks = as_blocks(pool, layout)
        self._network = network
        self._peers: dict[str, tuple[int, Blocks]] = {}
        self._done: list[Completed] = []

    def __repr__(self) -> str:
        return f"MemoryTransport(peers {sorted(self._peers)})"

    def connect(self, peer: str, epoch: int, layout: KVLayout, num_blocks: int, fd: int) -> None:
        if difference := self.layout.difference(layout):
            raise HandoffError(f"{self.worker} cannot hand over to {peer}: {difference}")
        exported = self._network.pools.get((peer, epoch))
        if exported is None:
            raise HandoffError(f"{self.worker} cannot hand over to {peer}: no pool of epoch {epoch}")
        self._peers[peer] = (epoch, as_blocks(exported[1], layout))

    def disconnect(self, peer: str, epoch: int) -> None:
        if (known := self._peers.get(peer)) and known[0] == epoch:
            del self._peers[peer]

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int]) -> None:
        known = self._peers.get(peer)
        if known is None or known[0] != epoch:
            error = f"{peer} (epoch {epoch}) is not connected to {self.worker}"
            self._done.append(Completed(dispatch, 0, 0.0, error))
            return
        for src, dst, count in runs(source, target):
            known[1][dst : dst + count] = self._blocks[src : src + count]
        self._done.append(Completed(dispatch, len(source) * self.layout.block_nbytes, 0.0))

    def cancel(self, dispatch: int) -> None:
        """Nothing waits here: every push has already been made."""

    def completed(self) -> list[Completed]:
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._peers.clear()
