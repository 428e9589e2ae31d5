"""The decode side of a worker: sets blocks aside for prompts computed elsewhere and goes on decoding from them.

    Reserve ─▶ (wait for blocks, bounded) ─▶ Reserved ─▶ a peer writes the blocks ─▶ Commit ─▶ decode from token 2
                          └ Refused                                                └ Rejected: it waits for its Abort

Running streams outrank reservations: one is granted only if every running stream keeps blocks to grow into, no preempted
stream waits, and there is a place in the batch. What a reservation holds comes back by Abort, which the parent sends only
when the writer has quiesced or is dead.

Over a two-sided transport the blocks are received here, and the transport has the last word on them: a Commit waits for their
arrival, and an Abort until nothing can write them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from disagg.engine.base import Sequence
from disagg.engine.blocks import BlockState
from disagg.engine.scheduler import GROWTH_BLOCKS, Scheduler
from disagg.handoff.digest import BlockDigests
from disagg.handoff.protocol import HANDOFF_TABLE, HandoffEvent, HandoffState
from disagg.handoff.transport import Arrived
from disagg.handoff.transports import Transports
from disagg.messages import Abort, Commit, Message, Quiesced, Refused, Rejected, Reserve, Reserved, Verified, Verify
from disagg.request import FailReason, advance

log = structlog.get_logger()

ARRIVAL_S = 10.0
"""How long a Commit waits for bytes that have left prefill."""


@dataclass(eq=False, slots=True)
class _Dispatch:
    sequence: Sequence
    num_tokens: int  # that the peer computes
    deadline: float  # of the reservation, then of what waits for arrival
    state: HandoffState = HandoffState.OFFERED
    is_received: bool = False  # by a two-sided transport
    is_arriving: bool = False  # which has not said Arrived
    waiting: Commit | Verify | Abort | None = None  # for that
    error: str | None = None  # why not all of it arrived

    def move(self, *events: HandoffEvent) -> None:
        for event in events:
            self.state = advance(HANDOFF_TABLE, self.state, event)


class DecodeRole:
    """Owns every dispatch that has reserved, or decodes on, blocks of this worker."""

    def __init__(
        self,
        scheduler: Scheduler,
        transports: Transports,
        send: Callable[[Message], None],
        clock: Callable[[], float],
        block_digests: BlockDigests,
        pattern_digest: Callable[[list[int]], bytes],
    ) -> None:
        """``block_digests`` are compared with prefill's, ``pattern_digest`` of a probe's blocks is for the parent to compare."""
        self._scheduler = scheduler
        self._transports = transports
        self._send = send
        self._clock = clock
        self._block_digests = block_digests
        self._pattern_digest = pattern_digest
        self._dispatches: dict[int, _Dispatch] = {}
        self._offers: list[_Dispatch] = []  # wait for blocks, in order of rank
        self._awaited: list[_Dispatch] = []  # committed by the parent, their bytes not all here
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
        return min((dispatch.deadline for dispatch in (*self._offers, *self._awaited)), default=None)

    def reserve(self, message: Reserve) -> None:
        sequence = Sequence(message.dispatch, list(message.tokens), message.params, message.num_prompt, message.priority)
        deadline = self._clock() + message.timeout_s
        dispatch = _Dispatch(sequence, len(message.tokens), deadline, is_received=message.is_received)
        self._dispatches[message.dispatch] = dispatch
        insort(self._offers, dispatch, key=lambda offer: offer.sequence.rank)

    def commit(self, message: Commit | Verify) -> bool:
        """Start decoding, or answer Verified to a probe's end, once all bytes are here.

        False, changing nothing, when the dispatch does not wait for it.
        """
        dispatch = self._dispatches.get(message.dispatch)
        if dispatch is None or dispatch.state is not HandoffState.PUSHING or dispatch.waiting is not None:
            return False
        dispatch.waiting = message
        if dispatch.is_arriving:
            dispatch.deadline = self._clock() + ARRIVAL_S
            self._awaited.append(dispatch)
        self._settle(dispatch)
        return True

    def arrived(self, arrived: Arrived) -> None:
        """The transport writes nothing of one of this role's dispatches any more."""
        dispatch = self._dispatches[arrived.dispatch]
        dispatch.is_arriving = False
        dispatch.error = dispatch.error or arrived.error
        self._stop_waiting(dispatch)
        self._settle(dispatch)

    def adopt(self, sequence: Sequence) -> None:
        """Own a colocated sequence that decodes on the blocks its prompt was computed in."""
        self._dispatches[sequence.dispatch] = _Dispatch(
            sequence, len(sequence.tokens), deadline=0.0, state=HandoffState.COMMITTED
        )

    def finished(self, dispatch_id: int) -> None:
        """The scheduler has let the sequence go: its blocks are back already."""
        dispatch = self._dispatches.pop(dispatch_id)
        dispatch.move(HandoffEvent.RELEASED)

    def abort(self, message: Abort) -> None:
        """End a dispatch of this role in any state and give its blocks back, when nothing can write them any more."""
        dispatch = self._dispatches[message.dispatch]
        match dispatch.state:
            case HandoffState.OFFERED:
                self._offers.remove(dispatch)
            case HandoffState.PUSHING:
                dispatch.move(HandoffEvent.QUIESCE)
                self._num_reserved -= 1
                self._stop_waiting(dispatch)
                self._transports.forget(message.dispatch)
            case HandoffState.COMMITTED:
                self._scheduler.remove(dispatch.sequence)
            case _:
                return  # told twice
        dispatch.waiting = message
        self._settle(dispatch)

    def poll(self) -> None:
        """Grant the offers that fit, in order of rank, and end what has waited too long."""
        while self._offers and self._try_reserve(self._offers[0]):
            self._offers.pop(0)
        now = self._clock()
        for offer in [offer for offer in self._offers if offer.deadline <= now]:
            self._offers.remove(offer)
            offer.move(HandoffEvent.REFUSED)
            del self._dispatches[offer.sequence.dispatch]
            self._send(Refused(offer.sequence.dispatch, f"no KV blocks within the time allowed: {self._scheduler.pool!r}"))
        for late in [late for late in self._awaited if late.deadline <= now]:
            late.error = f"not all blocks arrived within {ARRIVAL_S:g} s"
            self._awaited.remove(late)
            self._transports.forget(late.sequence.dispatch)

    def _stop_waiting(self, dispatch: _Dispatch) -> None:
        if dispatch in self._awaited:
            self._awaited.remove(dispatch)

    def _settle(self, dispatch: _Dispatch) -> None:
        """Do what the parent has asked for, if nothing is arriving any more."""
        dispatch_id = dispatch.sequence.dispatch
        if dispatch.is_arriving:
            return
        match dispatch.waiting:
            case Abort():
                if dispatch.state is HandoffState.QUIESCING:
                    dispatch.move(HandoffEvent.QUIESCED)
                del self._dispatches[dispatch_id]
                self._scheduler.pool.release(dispatch.sequence.blocks)
                dispatch.sequence.blocks = []
                self._send(Quiesced(dispatch_id))
            case Verify():
                digest = b"" if dispatch.error else self._pattern_digest(dispatch.sequence.blocks)
                self._send(Verified(dispatch_id, digest, dispatch.error))
            case Commit() as commit if dispatch.state is HandoffState.PUSHING:
                self._begin(dispatch, commit)

    def _begin(self, dispatch: _Dispatch, commit: Commit) -> None:
        sequence = dispatch.sequence
        num_cached = sequence.num_computed // self._scheduler.block_size
        if dispatch.error is not None:
            self._send(Rejected(commit.dispatch, FailReason.HANDOFF, dispatch.error))
            return
        if commit.digests and (index := self._first_corrupted(sequence.blocks, num_cached, commit.digests)) is not None:
            log.error("received KV block is corrupted", dispatch=commit.dispatch, block_index=index)
            self._send(Rejected(commit.dispatch, FailReason.CORRUPTED, f"KV block {index} was corrupted on its way"))
            return
        dispatch.move(HandoffEvent.PUSHED, HandoffEvent.COMMIT)
        self._num_reserved -= 1
        self._scheduler.pool.use(sequence.blocks[num_cached:])
        sequence.num_computed = dispatch.num_tokens
        sequence.tokens.append(commit.next_token)
        self._scheduler.publish(sequence)
        self._scheduler.adopt(sequence)

    def _first_corrupted(self, blocks: list[int], begin: int, expected: list[int]) -> int | None:
        """Index of the first block whose bytes are not those digested in ``expected``, which starts at block ``begin``."""
        found = self._block_digests(blocks[begin : begin + len(expected)])
        return next((index for index, (a, b) in enumerate(zip(found, expected, strict=True), begin) if a != b), None)

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
        key = 0
        if offer.is_received:
            offer.is_arriving = True
            key = self._transports.expect(sequence.dispatch, sequence.blocks[num_cached:])
        self._send(Reserved(sequence.dispatch, list(sequence.blocks), num_cached, key))
        return True
