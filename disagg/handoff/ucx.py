"""Transport between hosts: blocks travel through UCX, out of one pool and straight into the other, with no copy of ours between.

A thread of its own makes all calls of UCX, so that chunk i travels while chunk i + 1 computes. It sleeps on UCX's descriptor
and one for orders, and wakes the owner through an eventfd; nothing polls. ``tagged`` is what it does for each peer and dispatch.

UCX authenticates nobody: whoever reaches its port can harm the worker. The network between workers must be their own, and
``devices`` says which it is.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from disagg.errors import HandoffError
from disagg.handoff.shm import as_blocks
from disagg.handoff.tagged import INTRODUCTION_NBYTES, KEY_BITS, Expected, Push, Way
from disagg.handoff.transport import Arrived, Completed
from disagg.handoff.ucp import Ucp
from disagg.kv import KVLayout


class UcxTransport:
    """Two-sided, between hosts (and inside one: UCX chooses). See ``Transport`` for the contract.

    ``tls`` and ``devices`` are what UCX calls UCX_TLS and UCX_NET_DEVICES: the transports it may use, and the interfaces it
    listens on and tells its peers. A peer that takes no block for ``stall_s`` seconds is an error of all pushes to it, and a
    writer that does not finish a block that nobody wants any more is cut off after as long. Raises StartupError.
    """

    name = "ucx"
    is_two_sided = True

    def __init__(
        self, worker: str, layout: KVLayout, pool: memoryview, *, tls: str = "all", devices: str = "all", stall_s: float = 10.0
    ) -> None:
        self.worker = worker
        self.layout = layout
        self._blocks = as_blocks(pool, layout)
        self._stall_s = stall_s
        self._ucp = Ucp(
            {
                "TLS": tls,
                "NET_DEVICES": devices,
                "LOG_LEVEL": "fatal",  # its errors come to us, and are told once
                # Larger messages are agreed on before their bytes go: those can be refused, and end when the peer goes.
                "RNDV_THRESH": str(INTRODUCTION_NBYTES + 1),
                "TCP_CONN_NB": "y",  # or an unreachable peer holds up the thread for minutes
                "TCP_TX_SEG_SIZE": "256k",  # with the usual 8 KiB, twice the CPU time for each byte
                "TCP_RX_SEG_SIZE": "256k",
                # Inside a host: without these UCX, asked to report dead peers, takes TCP, or copies twice, 8 KiB at a time. CMA
                # lacks a way to keep a reader that was cut off from reading on, but such a reader's dispatch has failed anyway.
                "POSIX_ERROR_HANDLING": "y",
                "SYSV_ERROR_HANDLING": "y",
                "CMA_MEMORY_INVALIDATE": "y",
                "KEEPALIVE_INTERVAL": f"{stall_s / 4:g}s",
            }
        )
        self.address = self._ucp.address
        self._ways: dict[str, Way] = {}  # by peer
        self._expected: dict[int, Expected] = {}  # by dispatch
        self._orders: deque[Callable[[], object]] = deque()
        self._done: deque[Completed | Arrived] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._failure: BaseException | None = None  # of the thread, which has ended by it
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"UcxTransport(peers {sorted(self._ways)}, expected {sorted(self._expected)})"

    def connect(self, peer: str, epoch: int, layout: KVLayout, num_blocks: int, fd: int, address: bytes) -> None:
        if fd >= 0:
            os.close(fd)
        refused = f"{self.worker} cannot hand over to {peer}"
        if difference := self.layout.difference(layout):
            raise HandoffError(f"{refused}: {difference}")
        if not address:
            raise HandoffError(f"{refused}: its transport has no address")
        opened: Future[None] = Future()
        self._order(partial(self._connect, peer, epoch, address, opened))
        try:
            opened.result(self._stall_s)
        except HandoffError as error:
            raise HandoffError(f"{refused}: {error}") from error
        except TimeoutError as error:
            raise HandoffError(f"{refused}: UCX did not return for {self._stall_s:g} s") from error

    def disconnect(self, peer: str, epoch: int) -> None:
        self._order(partial(self._disconnect, peer, epoch))

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int], key: int) -> None:
        push = Push(dispatch, key, list(zip(source, target, strict=True)))
        self._order(partial(self._push, peer, epoch, push))

    def cancel(self, dispatch: int) -> None:
        self._order(partial(self._cancel, dispatch))

    def expect(self, dispatch: int, blocks: Sequence[int]) -> int:
        key = secrets.randbits(KEY_BITS)
        self._order(partial(self._expect, dispatch, list(blocks), key))
        return key

    def forget(self, dispatch: int) -> None:
        self._order(partial(self._forget, dispatch))

    def completed(self) -> list[Completed | Arrived]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        if self._failure is not None:
            raise RuntimeError("the transfer thread has ended") from self._failure
        return [self._done.popleft() for _ in range(len(self._done))]

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        if self._event < 0:
            return
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        os.close(self._event)
        self._event = -1

    def _order(self, order: Callable[[], object]) -> None:
        """Have the thread do it, in order."""
        self._orders.append(order)
        os.eventfd_write(self._wake, 1)

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - a bug: ``completed`` raises it, or every later push would wait for ever
            self._failure = error
            os.eventfd_write(self._event, 1)

    def _serve(self) -> None:
        with select.epoll() as poll:
            poll.register(self._ucp.fileno(), select.EPOLLIN)
            poll.register(self._wake, select.EPOLLIN)
            while not self._is_closing:
                if not self._round() and self._ucp.arm():
                    for fd, _ in poll.poll(self._patience()):
                        if fd == self._wake:
                            os.eventfd_read(self._wake)
        for name in list(self._ways):
            self._ways.pop(name).close("closed")
        for expected in self._expected.values():
            expected.give_up("closed")
            expected.cut_off()
        self._ucp.close()

    def _round(self) -> bool:
        """True: something was ordered or has ended, which may have ended something else as well."""
        self._ucp.progress()
        is_busy = bool(self._orders)
        while self._orders:
            self._orders.popleft()()
        # A key is in the orders before it can be in anybody's hands: what is still unexpected now is not wanted.
        self._ucp.refuse_unexpected()
        for way in self._ways.values():
            is_busy |= self._report(way.advance())
        for dispatch, expected in list(self._expected.items()):
            if ends := list(expected.advance()):
                del self._expected[dispatch]
                is_busy |= self._report(ends)
        return is_busy

    def _patience(self) -> float | None:
        """Seconds until something will have waited too long; None if nothing waits."""
        deadlines = [way.stalls_at for way in self._ways.values()] + [it.cut_off_at for it in self._expected.values()]
        now = time.monotonic()
        return min((max(0.0, deadline - now) for deadline in deadlines if deadline is not None), default=None)

    def _report(self, ended: Iterable[Completed | Arrived]) -> bool:
        reported = list(ended)
        if reported:
            self._done.extend(reported)
            os.eventfd_write(self._event, 1)
        return bool(reported)

    def _connect(self, peer: str, epoch: int, address: bytes, opened: Future[None]) -> None:
        if earlier := self._ways.get(peer):
            self._disconnect(peer, earlier.epoch)
        try:
            self._ways[peer] = Way(self._ucp, self._blocks, peer, epoch, address, self._stall_s)
        except HandoffError as error:
            opened.set_exception(error)
        else:
            opened.set_result(None)

    def _disconnect(self, peer: str, epoch: int) -> None:
        if (way := self._ways.get(peer)) and way.epoch == epoch:
            del self._ways[peer]
            self._report(way.close("disconnected"))

    def _push(self, peer: str, epoch: int, push: Push) -> None:
        way = self._ways.get(peer)
        if way is None or way.epoch != epoch:
            error = f"{peer} (epoch {epoch}) is not connected to {self.worker}"
            self._report([Completed(push.dispatch, 0, 0.0, error)])
        else:
            way.push(push)

    def _cancel(self, dispatch: int) -> None:
        for way in self._ways.values():
            way.cancel(dispatch)

    def _expect(self, dispatch: int, blocks: list[int], key: int) -> None:
        self._expected[dispatch] = Expected(self._ucp, self._blocks, dispatch, blocks, key, self._stall_s)

    def _forget(self, dispatch: int) -> None:
        if expected := self._expected.get(dispatch):
            expected.give_up("forgotten")
