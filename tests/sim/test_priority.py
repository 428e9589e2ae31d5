"""Who waits goes by priority: in the router's queue, for a worker's next step, for blocks on decode. What runs goes on.

That nobody of a lower value is left behind is checked in every world of this folder (``tests.sim.rules.check_turn``).
"""

from __future__ import annotations

import asyncio

import pytest

from disagg.errors import OverloadedError
from disagg.request import RequestState
from disagg.stream import RequestStream
from tests.sim.world import World, collect, request, world

PRIORITIES = [3, 0, -1, 3, 0, -1]
IN_ORDER = [2, 5, 1, 4, 0, 3]


def started(streams: list[RequestStream]) -> list[int]:
    """Their indices, in the order in which their prompts began to be computed."""
    began = {
        index: next(at for state, at in stream.entered if state is RequestState.PREFILLING)
        for index, stream in enumerate(streams)
    }
    return sorted(began, key=lambda index: (began[index], index))


async def end_all(streams: list[RequestStream]) -> None:
    await asyncio.gather(*[collect(stream) for stream in streams])


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed",)], ids=["disaggregated", "colocated"])
async def test_a_queue_is_served_by_priority_and_among_equals_by_arrival(roles: tuple[str, ...]) -> None:
    """While a long prompt is computed six others wait: the most urgent starts first, and what runs is not disturbed."""
    async with world(*roles, chunk_tokens=8) as w:
        running = w.router.submit(request("r" * 150, 20, priority=9))
        assert running.state is not RequestState.QUEUED
        streams = [w.router.submit(request(f"{i}" * 60, 3, priority=priority)) for i, priority in enumerate(PRIORITIES)]
        assert {stream.state for stream in streams} == {RequestState.QUEUED}
        await end_all([running, *streams])
        assert started(streams) == IN_ORDER
        assert running.num_attempts == 1


async def test_who_waits_for_blocks_on_decode_gets_them_by_priority() -> None:
    """Short of blocks, two reservations fit the window; the later, more urgent one is granted first."""
    async with world("prefill", "decode", chunk_tokens=32) as w:
        decode = w.engine_worker("decode-0")
        taken = decode.pool.allocate(60, "in_use")
        patient, urgent = (w.router.submit(request(name * 25, 3, priority=priority)) for name, priority in (("p", 1), ("u", 0)))
        await w.until(lambda: decode.decode.num_waiting == 2, "both wait for blocks")
        decode.pool.release(taken)
        await end_all([patient, urgent])
        assert started([patient, urgent]) == [1, 0]


async def test_who_waits_in_a_prefill_worker_is_first_by_priority() -> None:
    """Both are within the window there, and its pool is full: the later, more urgent one is the next to be computed."""
    async with world("prefill", "decode", chunk_tokens=32) as w:
        prefill = w.engine_worker("prefill-0")
        taken = prefill.pool.allocate(62, "in_use")
        streams = [w.router.submit(request(name * 25, 3, priority=priority)) for name, priority in (("p", 1), ("u", 0))]
        await w.until(lambda: len(prefill.scheduler.waiting) == 2, "both wait in the worker")
        assert [sequence.tokens[0] for sequence in prefill.scheduler.waiting] == list(b"up")
        prefill.pool.release(taken)
        await end_all(streams)


async def test_a_request_whose_worker_was_lost_keeps_its_place() -> None:
    """Behind what is more urgent, before what came later with its own priority."""
    async with world("prefill", "decode", "decode", chunk_tokens=8) as w:
        lost = w.router.submit(request("l" * 20, 40))
        await w.until(lambda: len(lost.tokens) >= 3, "3 tokens")
        blocker = w.router.submit(request("b" * 150, 2))
        await w.until(lambda: blocker.state is RequestState.PREFILLING, "the way is blocked")
        later, urgent = w.router.submit(request("e" * 60, 3)), w.router.submit(request("u" * 60, 3, priority=-1))
        w.handles[lost.attempts[-1].decode].kill()
        await w.until(lambda: lost.state is RequestState.QUEUED, "queued again")
        assert [stream.request.prompt[0] for stream in w.router.streams()[:3]] == list(b"ule")
        await end_all([lost, blocker, later, urgent])
        assert len(lost.tokens) == 40
        await restarted(w)


async def test_a_full_queue_refuses_whoever_comes_last() -> None:
    """Also the most urgent: what has been admitted is not turned out again."""
    async with world("prefill", "decode", chunk_tokens=8, max_queue=2) as w:
        streams = [w.router.submit(request(f"{i}" * 100, 3, priority=5)) for i in range(3)]
        with pytest.raises(OverloadedError):
            w.router.submit(request("u" * 100, 3, priority=-5))
        await end_all(streams)
        assert [len(stream.tokens) for stream in streams] == [3] * 3


async def restarted(w: World) -> None:
    await w.until(lambda: all(worker.is_ready for worker in w.workers), "the worker restarted")
