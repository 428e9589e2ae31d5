"""A worker's ways to its peers: one-sided to those in its node, two-sided to those in others, as Connect says.

Seen from the worker it is one transport: a push goes the way that its peer is connected by.
"""

from __future__ import annotations

import select
from collections.abc import Sequence

from disagg.errors import HandoffError
from disagg.handoff.transport import Arrived, Completed, Transport
from disagg.kv import KVLayout


class Transports:
    """``near`` for peers whose pool comes as a descriptor, ``far`` (None = not set up) for those that come as an address."""

    def __init__(self, near: Transport, far: Transport | None = None) -> None:
        self._near = near
        self._far = far
        self._all = [near] if far is None else [near, far]
        self._by_peer: dict[str, Transport] = {}
        self.address = far.address if far is not None else b""
        self._wakers = [transport.fileno() for transport in self._all if transport.fileno() >= 0]
        self._epoll = select.epoll() if len(self._wakers) > 1 else None
        if self._epoll is not None:
            for fd in self._wakers:
                self._epoll.register(fd, select.EPOLLIN)

    def __repr__(self) -> str:
        return f"Transports({', '.join(map(repr, self._all))})"

    def connect(self, peer: str, epoch: int, layout: KVLayout, num_blocks: int, fd: int, address: bytes) -> Transport:
        """As ``Transport.connect``; returns the one that leads to ``peer`` from now on."""
        transport = self._far if address else self._near
        if transport is None:
            raise HandoffError(f"{peer} is in another node, and this worker has no transport between nodes")
        transport.connect(peer, epoch, layout, num_blocks, fd, address)
        self._by_peer[peer] = transport
        return transport

    def disconnect(self, peer: str, epoch: int) -> None:
        for transport in self._all:
            transport.disconnect(peer, epoch)

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int], key: int) -> None:
        self._by_peer.get(peer, self._near).push(dispatch, peer, epoch, source, target, key)

    def cancel(self, dispatch: int) -> None:
        for transport in self._all:
            transport.cancel(dispatch)

    def expect(self, dispatch: int, blocks: Sequence[int]) -> int:
        """As ``Transport.expect``, for a writer in another node."""
        if self._far is None:
            raise HandoffError("this worker has no transport between nodes")
        return self._far.expect(dispatch, blocks)

    def forget(self, dispatch: int) -> None:
        if self._far is not None:
            self._far.forget(dispatch)

    def completed(self) -> list[Completed | Arrived]:
        return [ended for transport in self._all for ended in transport.completed()]

    def fileno(self) -> int:
        if self._epoll is not None:
            return self._epoll.fileno()
        return self._wakers[0] if self._wakers else -1

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()
        for transport in self._all:
            transport.close()
