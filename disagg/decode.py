"""The decode side of a worker: sets blocks aside for prompts computed elsewhere and goes on decoding from them.

    Reserve ─▶ (wait for blocks, bounded) ─▶ Reserved ─▶ a peer writes the blocks ─▶ Commit ─▶ decode from token 2
                          └ Refused                                                └ Corrupted: it waits for its Abort

Running streams outrank reservations: one is granted only if every running stream keeps blocks to grow into, no preempted
stream waits, and there is a place in the batch. What a reservation holds comes back by Abort, which the parent sends only
when the writer has quiesced or is dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from disagg.engine.base import Sequence
from disagg.engine.blocks import BlockState
from disagg.engine.scheduler import GROWTH_BLOCKS, Scheduler
from disagg.handoff.digest import BlockDigests
from disagg.handoff.protocol import HANDOFF_TABLE, HandoffEvent, HandoffState
from disagg.messages import Commit, Corrupted, Message, Quiesced, Refused, Reserve, Reserved
from disagg.request import advance

log = structlog.get_logger()


@dataclass(slots=True)
class _Dispatch:
    sequence: Sequence
    num_tokens: int  # that the peer computes
    deadline: float
    state: HandoffState = HandoffState.OFFERED

    def move(self, *events: HandoffEvent) -> None:
        for event in events:
            self.state = advance(HANDOFF_TABLE, self.state, event)


class DecodeRole:
    """Owns every dispatch that has reserved, or decodes on, blocks of this worker."""

    def __init__(
        self,
        scheduler: Scheduler,
        send: Callable[[Message], None],
        clock: Callable[[], float],
        block_digests: BlockDigests,
    ) -> None:
        self._scheduler = scheduler
        self._send = send
        self._clock = clock
        self._block_digests = block_digests
        self._dispatches: dict[int, _Dispatch] = {}
        self._offers: deque[_Dispatch] = deque()  # wait for blocks, in order of arrival
        self._num_reserved = 0

    def __repr__(self) -> str:
        return "DecodeRole(" + ", ".join(f"{key} {d.state}" for key, d in self._dispatches.items()) + ")"

    def __contains__(self, dispatch: int) -> bool:
        return dispatch in self._dispatches

    @property
    def num_waiting(self) -> int:
        return len(self._offers)

    @property
    def deadline(self) -> float | None:
        """When ``poll`` must be called next, if nothing else happens."""
        return min((offer.deadline for offer in self._offers), default=None)

    def reserve(self, message: Reserve) -> None:
        sequence = Sequence(message.dispatch, list(message.tokens), message.params, num_prompt=message.num_prompt)
        dispatch = _Dispatch(sequence, len(message.tokens), self._clock() + message.timeout_s)
        self._dispatches[message.dispatch] = dispatch
        self._offers.append(dispatch)

    def commit(self, message: Commit) -> bool:
        """Start decoding, or answer Corrupted. False, changing nothing, when the dispatch does not wait for its commit."""
        dispatch = self._dispatches.get(message.dispatch)
        if dispatch is None or dispatch.state is not HandoffState.PUSHING:
            return False
        sequence = dispatch.sequence
        num_cached = sequence.num_computed // self._scheduler.block_size
        if message.digests and (index := self._first_corrupted(sequence.blocks, num_cached, message.digests)) is not None:
            log.error("received KV block is corrupted", dispatch=message.dispatch, block_index=index)
            self._send(Corrupted(message.dispatch, index))
            return True
        dispatch.move(HandoffEvent.PUSHED, HandoffEvent.COMMIT)
        self._num_reserved -= 1
        self._scheduler.pool.use(sequence.blocks[num_cached:])
        sequence.num_computed = dispatch.num_tokens
        sequence.tokens.append(message.next_token)
        self._scheduler.publish(sequence)
        self._scheduler.adopt(sequence)
        return True

    def _first_corrupted(self, blocks: list[int], begin: int, expected: list[int]) -> int | None:
        """Index of the first block whose bytes are not those digested in ``expected``, which starts at block ``begin``."""
        found = self._block_digests(blocks[begin : begin + len(expected)])
        return next((index for index, (a, b) in enumerate(zip(found, expected, strict=True), begin) if a != b), None)

    def adopt(self, sequence: Sequence) -> None:
        """Own a colocated sequence that decodes on the blocks its prompt was computed in."""
        self._dispatches[sequence.dispatch] = _Dispatch(
            sequence, len(sequence.tokens), deadline=0.0, state=HandoffState.COMMITTED
        )

    def blocks_of(self, dispatch_id: int) -> list[int]:
        return self._dispatches[dispatch_id].sequence.blocks

    def finished(self, dispatch_id: int) -> None:
        """The scheduler has let the sequence go: its blocks are back already."""
        dispatch = self._dispatches.pop(dispatch_id)
        dispatch.move(HandoffEvent.RELEASED)

    def abort(self, dispatch_id: int) -> None:
        """End a dispatch of this role in any state and give its blocks back. Nobody may be writing them any more."""
        dispatch = self._dispatches.pop(dispatch_id)
        sequence = dispatch.sequence
        match dispatch.state:
            case HandoffState.OFFERED:
                self._offers.remove(dispatch)
            case HandoffState.PUSHING:
                dispatch.move(HandoffEvent.QUIESCE, HandoffEvent.QUIESCED)
                self._num_reserved -= 1
            case HandoffState.COMMITTED:
                self._scheduler.remove(sequence)
        self._scheduler.pool.release(sequence.blocks)
        sequence.blocks = []
        self._send(Quiesced(dispatch_id))

    def poll(self) -> None:
        """Grant the offers that fit, oldest first, and refuse those that have waited too long."""
        while self._offers and self._try_reserve(self._offers[0]):
            self._offers.popleft()
        now = self._clock()
        for offer in [offer for offer in self._offers if offer.deadline <= now]:
            self._offers.remove(offer)
            offer.move(HandoffEvent.REFUSED)
            del self._dispatches[offer.sequence.dispatch]
            self._send(Refused(offer.sequence.dispatch, f"no KV blocks within the time allowed: {self._scheduler.pool!r}"))

    def _try_reserve(self, offer: _Dispatch) -> bool:
        scheduler, sequence = self._scheduler, offer.sequence
        num_running = len(scheduler.running)
        if scheduler.waiting or num_running + self._num_reserved >= scheduler.max_num_seqs:
            return False
        if not scheduler.allocate(
            sequence,
            num_tokens=offer.num_tokens + 1,
            reusable=offer.num_tokens,
            spare=GROWTH_BLOCKS * (num_running + self._num_reserved),
            state=BlockState.RESERVED,
        ):
            return False
        self._num_reserved += 1
        num_cached = sequence.num_computed // scheduler.block_size
        offer.move(HandoffEvent.RESERVED, HandoffEvent.PUSH)
        self._send(Reserved(sequence.dispatch, list(sequence.blocks), num_cached))
        return True
