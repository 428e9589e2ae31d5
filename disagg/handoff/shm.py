"""Transport between processes of one host: copies straight into the peer's memory file, on a thread of its own.

The thread is what hides the hand-over behind prefill: numpy releases the GIL while it copies, so chunk i travels while chunk
i + 1 computes. It sleeps on a queue and wakes the owner through an eventfd; nothing polls.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg.errors import HandoffError
from disagg.handoff.host_pool import open_pool
from disagg.handoff.plan import runs
from disagg.handoff.transport import Arrived, Completed
from disagg.kv import KVLayout

Blocks = NDArray[np.uint8]  # [num_blocks, block_nbytes]


def as_blocks(pool: memoryview | mmap.mmap, layout: KVLayout) -> Blocks:
    """A pool's memory as an array with one row per block."""
    return np.frombuffer(pool, dtype=np.uint8).reshape(-1, layout.block_nbytes)


@dataclass(frozen=True, slots=True)
class _Peer:
    epoch: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class _Push:
    dispatch: int
    peer: str
    epoch: int
    source: list[int]
    target: list[int]


class ShmTransport:
    """Host shared memory. See ``Transport`` for the contract."""

    name = "shm"
    is_two_sided = False
    address = b""

    def __init__(self, worker: str, layout: KVLayout, pool: memoryview) -> None:
        self.worker = worker
        self.layout = layout
        self._blocks = as_blocks(pool, layout)
        self._peers: dict[str, _Peer] = {}
        self._cancelled: set[int] = set()
        self._pending: dict[int, int] = {}  # dispatch → pushes not yet completed
        self._queue: queue.SimpleQueue[_Push | None] = queue.SimpleQueue()
        self._done: deque[Completed] = deque()
        self._failure: BaseException | None = None  # of the thread, which has ended by it
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"ShmTransport(peers {sorted(self._peers)}, pending {sum(self._pending.values())})"

    def connect(self, peer: str, epoch: int, layout: KVLayout, num_blocks: int, fd: int, address: bytes) -> None:
        if difference := self.layout.difference(layout):
            os.close(fd)
            raise HandoffError(f"{self.worker} cannot hand over to {peer}: {difference}")
        pool = open_pool(fd, num_blocks * layout.block_nbytes)
        self._peers[peer] = _Peer(epoch, as_blocks(pool, layout))

    def disconnect(self, peer: str, epoch: int) -> None:
        if (known := self._peers.get(peer)) and known.epoch == epoch:
            del self._peers[peer]  # the mapping goes with the array's last reference, which a copy in progress may hold

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int], key: int) -> None:
        self._pending[dispatch] = self._pending.get(dispatch, 0) + 1
        self._queue.put(_Push(dispatch, peer, epoch, list(source), list(target)))

    def cancel(self, dispatch: int) -> None:
        if dispatch in self._pending:
            self._cancelled.add(dispatch)

    def expect(self, dispatch: int, blocks: Sequence[int]) -> int:
        return 0

    def forget(self, dispatch: int) -> None:
        """Nothing was expected: writers need no permission here."""

    def completed(self) -> list[Completed | Arrived]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        if self._failure is not None:
            raise RuntimeError("the transfer thread has ended") from self._failure
        done: list[Completed | Arrived] = []
        while self._done:
            completed = self._done.popleft()
            done.append(completed)
            self._pending[completed.dispatch] -= 1
            if not self._pending[completed.dispatch]:
                del self._pending[completed.dispatch]
                self._cancelled.discard(completed.dispatch)
        return done

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        if self._event < 0:
            return
        self._cancelled.update(self._pending)
        self._queue.put(None)
        self._thread.join()
        self._peers.clear()
        os.close(self._event)
        self._event = -1

    def _run(self) -> None:
        try:
            while (push := self._queue.get()) is not None:
                self._done.append(self._copy(push))
                os.eventfd_write(self._event, 1)
        except BaseException as error:  # noqa: BLE001 - a bug: ``completed`` raises it, or every later push would wait for ever
            self._failure = error
            os.eventfd_write(self._event, 1)

    def _copy(self, push: _Push) -> Completed:
        if push.dispatch in self._cancelled:
            return Completed(push.dispatch, 0, 0.0)
        peer = self._peers.get(push.peer)
        if peer is None or peer.epoch != push.epoch:
            return Completed(push.dispatch, 0, 0.0, f"{push.peer} (epoch {push.epoch}) is not connected to {self.worker}")
        started = time.perf_counter()
        for source, target, count in runs(push.source, push.target):
            peer.blocks[target : target + count] = self._blocks[source : source + count]
        nbytes = len(push.source) * self.layout.block_nbytes
        return Completed(push.dispatch, nbytes, time.perf_counter() - started)
