"""Blocks as tagged messages: the writer's way to one peer, and what a reader expects for one dispatch.

The reader posts one receive per block, straight into its pool. The tag is a random key, which only the reservation's writer is
shown, and the block's number: whoever has no key, or comes when the reservation is gone, matches nothing. A writer first
introduces itself with its own address, so that the reader can cut off one that stops half-way through a block.

No threads and no waiting here: ``UcxTransport`` calls ``advance`` again and again, and nothing else at the same time.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg.errors import HandoffError
from disagg.handoff.shm import Blocks
from disagg.handoff.transport import Arrived, Completed
from disagg.handoff.ucp import Ucp

WINDOW_NBYTES = 8 << 20  # under way to one peer: more does not fill a wire better, and what is under way cannot be cancelled
INTRODUCTION_NBYTES = 4096  # at most: a worker's address is some 40 bytes for each network interface
_BLOCK_BITS = 24  # of a tag's 64; above them is the key
KEY_BITS = 64 - _BLOCK_BITS
_INTRODUCTION = (1 << _BLOCK_BITS) - 1  # in the place of a block's number


@dataclass(eq=False, slots=True)
class Push:
    """Blocks (source, target) of one ``push``, on their way."""

    dispatch: int
    key: int
    blocks: list[tuple[int, int]]
    num_begun: int = 0
    num_sent: int = 0
    begun_at: float = 0.0
    is_dropped: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_dropped or self.num_sent == len(self.blocks)


class Way:
    """To one peer's incarnation: its pushes in order, as many blocks under way as the window holds.

    The endpoint is opened anew by the first push after it broke. ``stall_s``: a peer that takes no block for so long is given up.
    """

    def __init__(self, ucp: Ucp, blocks: Blocks, name: str, epoch: int, address: bytes, stall_s: float) -> None:
        """Raises HandoffError if no transport leads to ``address``."""
        self.name = name
        self.epoch = epoch
        self._ucp = ucp
        self._blocks = blocks
        self._address = address
        self._stall_s = stall_s
        self._endpoint: Any = ucp.connect(address)
        self._introduction = np.frombuffer(ucp.address, dtype=np.uint8)
        self._pushes: deque[Push] = deque()  # not completed
        self._waiting: deque[Push] = deque()  # of these, what is not begun to the last block
        self._sends: deque[tuple[int, Push | None]] = deque()  # requests under way; None: an introduction
        self._moved_at = 0.0  # when a send last ended, or the first one began

    def push(self, push: Push) -> None:
        self._pushes.append(push)
        if push.blocks:
            self._waiting.append(push)

    def cancel(self, dispatch: int) -> None:
        for push in self._waiting:
            push.is_dropped = push.dispatch == dispatch and not push.num_begun
        self._waiting = deque(push for push in self._waiting if not push.is_dropped)

    def advance(self) -> Iterator[Completed]:
        """Take note of what has been sent, send what the window has room for; yields the pushes that are over."""
        try:
            self._take()
            while self._waiting and len(self._sends) * self._blocks.shape[1] < WINDOW_NBYTES:
                self._send(self._waiting[0])
                self._take()  # small ones have left when the call returns, and no event follows
        except HandoffError as error:
            yield from self.close(str(error))
        while self._pushes and self._pushes[0].is_over:
            yield self._completed(self._pushes.popleft())

    @property
    def stalls_at(self) -> float | None:
        """When it will be given up unless something moves; None: nothing is under way."""
        return self._moved_at + self._stall_s if self._sends else None

    def close(self, cause: str) -> list[Completed]:
        """End every push with an error. When this returns nothing of theirs is read any more."""
        if self._endpoint is not None:
            self._ucp.disconnect(self._endpoint)
            self._endpoint = None
        for request, _ in self._sends:
            self._ucp.discard(request)
        error = f"no hand-over to {self.name} (epoch {self.epoch}): {cause}"
        ended = [self._completed(push, None if push.is_over else error) for push in self._pushes]
        self._sends.clear()
        self._waiting.clear()
        self._pushes.clear()
        return ended

    def _completed(self, push: Push, error: str | None = None) -> Completed:
        nbytes = push.num_sent * self._blocks.shape[1]
        return Completed(push.dispatch, nbytes, time.monotonic() - push.begun_at if nbytes else 0.0, error)

    def _take(self) -> None:
        while self._sends:
            request, push = self._sends[0]
            try:
                is_sent = self._ucp.is_sent(request)
            except HandoffError:
                self._sends.popleft()  # the request is gone
                raise
            if not is_sent:
                break
            self._sends.popleft()
            self._moved_at = time.monotonic()
            if push is not None:
                push.num_sent += 1
        if self.stalls_at is not None and time.monotonic() > self.stalls_at:
            raise HandoffError(f"it took no block for {self._stall_s:g} s")

    def _send(self, push: Push) -> None:
        """The push's next block, before the first of them the introduction."""
        if self._endpoint is not None and not self._sends and not self._ucp.is_alive(self._endpoint):
            self._ucp.disconnect(self._endpoint)  # it broke while nothing used it
            self._endpoint = None
        if self._endpoint is None:
            self._endpoint = self._ucp.connect(self._address)
        if not self._sends:
            self._moved_at = time.monotonic()
        if not push.num_begun:
            push.begun_at = time.monotonic()
            self._sends.append((self._ucp.send(self._endpoint, self._introduction, _tag(push.key, _INTRODUCTION)), None))
        source, target = push.blocks[push.num_begun]
        self._sends.append((self._ucp.send(self._endpoint, self._blocks[source], _tag(push.key, target)), push))
        push.num_begun += 1
        if push.num_begun == len(push.blocks):
            self._waiting.popleft()


class Expected:
    """What the one writer who knows ``key`` is to write for a dispatch."""

    def __init__(self, ucp: Ucp, blocks: Blocks, dispatch: int, numbers: Sequence[int], key: int, stall_s: float) -> None:
        self._ucp = ucp
        self._dispatch = dispatch
        self._block_nbytes = blocks.shape[1]
        self._stall_s = stall_s
        self._writer = np.zeros(INTRODUCTION_NBYTES, dtype=np.uint8)
        self._address = b""  # of the writer, once it has introduced itself
        self._error: str | None = None
        self.cut_off_at: float | None = None  # when a writer that does not finish is cut off
        self._introduction: int | None = None  # request, until it has come
        self._receives: deque[int] = deque()  # requests that are not over
        try:
            self._introduction = ucp.receive(self._writer, _tag(key, _INTRODUCTION))
            for number in numbers:
                self._receives.append(ucp.receive(blocks[number], _tag(key, number)))
        except HandoffError as error:
            self.give_up(str(error))

    def advance(self) -> Iterator[Arrived]:
        """Take note of what has come; yields the end of it."""
        if self.cut_off_at is not None and time.monotonic() > self.cut_off_at:
            self.cut_off()
        if self._introduction is not None:
            self._greet(self._introduction)
        while self._receives:
            try:
                nbytes = self._ucp.received(self._receives[0])
                if nbytes is None:
                    break
                self._receives.popleft()
                if nbytes != self._block_nbytes:
                    self.give_up(f"{nbytes} bytes came for a block of {self._block_nbytes}")
            except HandoffError as error:
                self._receives.popleft()
                self.give_up(str(error))
        if not self._receives:
            if self._introduction is not None:
                self._ucp.cancel(self._introduction)
                self._ucp.discard(self._introduction)
            yield Arrived(self._dispatch, self._error)

    def give_up(self, error: str) -> None:
        """Take no block any more that has not begun to come. What has may still be written until ``advance`` yields the end."""
        if self._error is None:
            self._error = error
            self.cut_off_at = time.monotonic() + self._stall_s
            for request in self._receives:
                self._ucp.cancel(request)

    def cut_off(self) -> None:
        """Close the way from the writer: whatever it is doing, it writes nothing here any more."""
        self.cut_off_at = time.monotonic() + self._stall_s
        if self._address:
            with contextlib.suppress(HandoffError):  # it has gone, and its end with it
                self._ucp.disconnect(self._ucp.connect(self._address))

    def _greet(self, introduction: int) -> None:
        try:
            if (nbytes := self._ucp.received(introduction)) is None:
                return
            self._address = self._writer[:nbytes].tobytes()
        except HandoffError as error:
            self.give_up(f"the writer's introduction: {error}")
        self._introduction = None


def _tag(key: int, block: int) -> int:
    return key << _BLOCK_BITS | block
