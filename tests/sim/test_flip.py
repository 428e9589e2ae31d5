"""A worker's role changes while streams run: they say what they would have said, and what must not be is refused."""

from __future__ import annotations

import asyncio

import pytest

from disagg.config import WorkersConfig
from disagg.errors import InvalidRequestError
from disagg.supervisor import Role
from tests.sim.world import World, collect, request, world

PROMPTS = [f"{index} streams while a worker changes" for index in range(8)]
NUM_TOKENS = 40
LONG = 120  # tokens


async def undisturbed(num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    async with world("mixed", prefix_cache=False) as w:
        return [await collect(w.router.submit(request(prompt, num_tokens))) for prompt in PROMPTS]


def roles(w: World) -> dict[str, str]:
    return {worker.id: worker.role.value for worker in w.workers}


@pytest.mark.parametrize("wait_s", [0.0, 5.0], ids=["at-once", "in-peace"])
@pytest.mark.parametrize(
    ("start", "worker", "role", "num_pairs"),
    [
        (("prefill", "decode", "decode"), "decode-0", "prefill", 2),
        (("prefill", "prefill", "decode"), "prefill-0", "decode", 2),
        (("prefill", "decode", "decode"), "decode-1", "mixed", 1),
        (("mixed", "mixed"), "mixed-0", "prefill", 0),
        (("prefill", "decode"), "prefill-0", "mixed", 0),
    ],
)
async def test_streams_that_run_while_a_worker_flips_are_the_undisturbed_ones(
    start: tuple[str, ...], worker: str, role: str, num_pairs: int, wait_s: float
) -> None:
    """In any direction; when it is said to be ready it has a new epoch and proven pairs, and nothing counts as a death."""
    expected = await undisturbed()
    async with world(*start) as w:
        streams = [w.router.submit(request(prompt, NUM_TOKENS)) for prompt in PROMPTS]
        running = [asyncio.create_task(collect(stream)) for stream in streams]
        await w.until(lambda: all(len(stream.tokens) >= 3 for stream in streams), "3 tokens of each")
        flipped = await w.flipper.flip(worker, role, wait_s)
        assert (flipped.role, flipped.epoch, flipped.is_ready) == (role, 2, True)
        assert roles(w)[worker] == role
        assert len(w.pairs.verified()) == num_pairs
        assert await asyncio.gather(*running) == expected
        assert all(info.restarts == 0 for info in w.workers)
        assert not w.router.is_degraded
        if wait_s:
            assert [stream.num_attempts for stream in streams] == [1] * len(streams)
        assert [await collect(w.router.submit(request(prompt, NUM_TOKENS))) for prompt in PROMPTS] == expected


async def test_a_worker_that_flips_gets_nothing_new() -> None:
    """While it waits for its last stream, others go to the other workers; that stream ends where it was."""
    async with world("prefill", "decode", "decode") as w:
        last = w.router.submit(request(PROMPTS[0], LONG))
        reading = asyncio.create_task(collect(last))
        await w.until(lambda: len(last.tokens) >= 3, "3 tokens")
        (place,) = last.attempts
        flip = asyncio.create_task(w.flipper.flip(place.decode, "prefill", 60.0))
        await w.until(lambda: any(worker.next is not None for worker in w.workers), "it has begun")
        others = [w.router.submit(request(prompt, 5)) for prompt in PROMPTS]
        for other in others:
            await collect(other)
        assert place.decode not in {attempt.decode for other in others for attempt in other.attempts}
        assert len(await reading) == LONG
        assert (await flip).is_ready
        assert last.num_attempts == 1


async def test_whoever_asked_and_goes_before_the_worker_has_ended_calls_it_off() -> None:
    """It serves on as it was."""
    async with world("prefill", "decode", "decode") as w:
        stream = w.router.submit(request(PROMPTS[0], LONG))
        await w.until(lambda: len(stream.tokens) >= 3, "3 tokens")
        worker = stream.attempts[0].decode
        flip = asyncio.create_task(w.flipper.flip(worker, "prefill", 60.0))
        await w.until(lambda: any(info.next is not None for info in w.workers), "it has begun")
        flip.cancel()
        await asyncio.gather(flip, return_exceptions=True)
        assert len(await collect(stream)) == LONG
        assert roles(w)[worker] == "decode"
        assert all(info.is_open and info.epoch == 1 for info in w.workers)


async def test_a_worker_that_dies_while_it_flips_comes_back_in_its_new_role() -> None:
    """Its death ends the waiting; its streams go on elsewhere."""
    (expected, *_) = await undisturbed(LONG)
    async with world("prefill", "decode", "decode") as w:
        stream = w.router.submit(request(PROMPTS[0], LONG))
        await w.until(lambda: len(stream.tokens) >= 3, "3 tokens")
        worker = stream.attempts[0].decode
        flip = asyncio.create_task(w.flipper.flip(worker, "prefill", 60.0))
        await w.until(lambda: any(info.next is not None for info in w.workers), "it has begun")
        w.handles[worker].kill()
        assert await collect(stream) == expected
        flipped = await flip
        assert (flipped.role, flipped.epoch, flipped.is_ready) == ("prefill", 2, True)


async def test_a_worker_that_does_not_end_is_killed() -> None:
    """Stalled, it never reads that it should end."""
    async with world("prefill", "decode", "decode") as w:
        w.handles["decode-0"].stall()
        assert (await w.flipper.flip("decode-0", "prefill", 0.0)).is_ready
        assert roles(w)["decode-0"] == "prefill"


async def test_a_flipped_worker_that_cannot_start_ends_no_server() -> None:
    """As after a death: others serve, it is tried again, and the answer is that it is not ready."""
    async with world("prefill", "decode", "decode", workers=WorkersConfig(max_restarts=1000)) as w:
        w.flipper._start_s = 0.5
        launch, w.launch = w.launch, w.refuse_to_launch  # type: ignore[method-assign]
        assert not (await w.flipper.flip("decode-0", "prefill", 0.0)).is_ready
        assert len(await collect(w.router.submit(request(PROMPTS[0], 5)))) == 5
        w.launch = launch  # type: ignore[method-assign]
        await w.until(lambda: len(w.pairs.verified()) == 2, "it is back", timeout_s=20.0)
        assert roles(w)["decode-0"] == "prefill"


@pytest.mark.parametrize(
    ("worker", "role", "sentence"),
    [
        ("decode-0", "prefill", "no worker that is ready could do decode"),
        ("prefill-0", "decode", "no worker that is ready could do prefill"),
        ("decode-0", "decode", "decode-0 is decode already"),
        ("decode-9", "prefill", "there is no worker 'decode-9'; there are prefill-0, decode-0"),
        ("decode-0", "chef", "a worker is prefill, decode, mixed, not 'chef'"),
    ],
)
async def test_what_must_not_be_is_refused_with_a_sentence(worker: str, role: str, sentence: str) -> None:
    """A conflict, and nothing has changed."""
    async with world("prefill", "decode") as w:
        with pytest.raises(InvalidRequestError, match=sentence) as caught:
            await w.flipper.flip(worker, role, 0.0)
        assert caught.value.status == 409
        assert all(info.is_open and info.epoch == 1 for info in w.workers)


async def test_the_state_of_the_server_may_forbid_a_flip() -> None:
    """While another flips, while it drains, while the worker or the one that would be left is down, or on another node."""
    async with world("prefill", "decode", "decode") as w:

        async def refused(worker: str, role: str = "prefill") -> str:
            with pytest.raises(InvalidRequestError) as caught:
                await w.flipper.flip(worker, role, 0.0)
            return str(caught.value)

        stream = w.router.submit(request(PROMPTS[0], LONG))
        await w.until(lambda: len(stream.tokens) >= 1, "a token")
        (place,) = stream.attempts
        other = {"decode-0": "decode-1", "decode-1": "decode-0"}[place.decode]
        flip = asyncio.create_task(w.flipper.flip(place.decode, "mixed", 60.0))
        await w.until(lambda: any(info.next is not None for info in w.workers), "it has begun")
        assert f"{place.decode} is being flipped" in await refused(other)
        flip.cancel()
        await asyncio.gather(flip, return_exceptions=True)
        w.router.is_draining = True
        assert "draining" in await refused(other)
        w.router.is_draining = False
        assert len(await collect(stream)) == LONG
        w.handles["decode-1"].kill()
        await w.until(lambda: not w.workers[2].is_ready, "the death noticed")
        assert "decode-1 is down" in await refused("decode-1")
        assert "could do decode" in await refused("decode-0")
        await w.until(lambda: all(info.is_ready for info in w.workers), "back")
        w.workers[2].node = "b"
        assert "a worker of node b" in await refused("decode-1")
        w.workers[2].node = ""
        assert {worker.role for worker in w.workers} == {Role.PREFILL, Role.DECODE}
