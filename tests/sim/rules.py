"""What must hold in a worker at every moment, whatever goes wrong around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from disagg.engine.scheduler import GROWTH_BLOCKS
from disagg.handoff.protocol import HandoffState
from disagg.worker import Worker


def check_books(worker: Worker, taken: list[int]) -> None:
    """Every block is in one state, and is held by as many owners as it has references. ``taken``: held by the test."""
    pool = worker.pool
    assert sum(pool.counts.values()) == pool.num_blocks
    held = Counter(taken)
    for role in (worker.prefill, worker.decode):
        for dispatch in role._dispatches.values():
            held.update(dispatch.sequence.blocks)
    for blocks in worker.prober._running.values():
        held.update(blocks)
    references = {block: count for block, count in enumerate(pool._refs) if count}
    assert references == dict(held), f"{worker!r}: {references} ≠ {held}"
    states = [dispatch.state for dispatch in worker.decode._dispatches.values()]
    assert worker.decode._num_reserved == states.count(HandoffState.PUSHING), f"{worker!r}"


def check_turn(priority: int, left_behind: Iterable[int], where: str) -> None:
    """Called when one of those that wait at a place has its turn: nobody of a lower value is left behind there."""
    assert priority <= min(left_behind, default=priority), f"{where}: one of priority {priority} went before {left_behind}"


def check_grant(worker: Worker, dispatch: int) -> None:
    """Called when decode has just answered Reserved: running streams outrank reservations, and it was this one's turn."""
    scheduler = worker.scheduler
    others = [offer.sequence for offer in worker.decode._offers if offer.sequence.dispatch != dispatch]
    check_turn(worker.decode._dispatches[dispatch].sequence.priority, [other.priority for other in others], "reservations")
    assert not scheduler.waiting, f"{worker!r}: blocks were reserved before those of a preempted stream"
    num_before = len(scheduler.running) + worker.decode._num_reserved - 1
    assert worker.pool.num_available >= GROWTH_BLOCKS * num_before, f"{worker!r}: running streams have no room to grow"


def check_copy(writer: Worker, reader: Worker, dispatch: int, source: list[int], target: list[int]) -> None:
    """Called when bytes move: a copy reads and writes only blocks that its dispatch holds, whatever they come to hold later."""
    assert blocks_of(writer, dispatch).issuperset(source), f"{dispatch} reads others' blocks in {writer!r}"
    assert blocks_of(reader, dispatch).issuperset(target), f"{dispatch} writes others' blocks in {reader!r}"


def blocks_of(worker: Worker, dispatch: int) -> set[int]:
    """What a dispatch, or a probe, holds."""
    held = [role._dispatches[dispatch].sequence.blocks for role in (worker.prefill, worker.decode) if dispatch in role]
    return set(worker.prober._running.get(dispatch, [])).union(*held)
