"""A worker may die at any moment: every stream goes on with the right next token, or ends with an error that says why."""

from __future__ import annotations

import asyncio

import pytest

from disagg.config import WorkersConfig
from disagg.errors import RequestFailedError, UnavailableError
from disagg.request import FailReason, RequestState
from tests.sim.world import World, collect, request, world

PROMPTS = [f"{index} lives on a worker that dies" for index in range(6)]
NUM_TOKENS = 40
NO_FALLBACK = WorkersConfig(fallback=False)


async def undisturbed() -> list[list[int]]:
    async with world("mixed", prefix_cache=False) as w:
        return [await collect(w.router.submit(request(prompt, NUM_TOKENS))) for prompt in PROMPTS]


async def kill_at(w: World, worker: str, num_tokens: int) -> list[list[int]]:
    """Stream every prompt; kill ``worker`` when the first stream has ``num_tokens`` tokens."""
    streams = [w.router.submit(request(prompt, NUM_TOKENS)) for prompt in PROMPTS]
    running = [asyncio.create_task(collect(stream)) for stream in streams]
    await w.until(lambda: len(streams[0].tokens) >= num_tokens, f"{num_tokens} tokens")
    w.handles[worker].kill()
    return list(await asyncio.gather(*running))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 10, 39])
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill", "prefill", "decode", "decode")], ids=["1P1D", "2P2D"])
@pytest.mark.parametrize("chunk_tokens", [4, 64])
async def test_streams_go_on_with_the_right_token(
    roles: tuple[str, ...], worker: str, num_tokens: int, chunk_tokens: int
) -> None:
    """Killed at token k, on another worker of the role or on the only one left: no token lost, none doubled."""
    expected = await undisturbed()
    async with world(*roles, chunk_tokens=chunk_tokens) as w:
        assert await kill_at(w, worker, num_tokens) == expected
        assert all(stream.state is RequestState.FINISHED for stream in w.metrics.requests)
        await w.until(lambda: all(info.is_ready for info in w.workers), "the worker restarted")
        assert next(info for info in w.workers if info.id == worker).epoch == 2


async def test_without_fallback_streams_wait_for_the_restart() -> None:
    """Where workers may not serve alone, streams pause, new requests are refused, and then all go on as they should."""
    expected = await undisturbed()
    async with world("prefill", "decode", workers=NO_FALLBACK) as w:
        streams = [w.router.submit(request(prompt, NUM_TOKENS)) for prompt in PROMPTS]
        running = [asyncio.create_task(collect(stream)) for stream in streams]
        await w.until(lambda: len(streams[0].tokens) >= 5, "5 tokens")
        w.handles["decode-0"].kill()
        await w.until(lambda: not w.pairs.verified(), "the death noticed")
        with pytest.raises(UnavailableError, match="decode-0 is down"):
            w.router.submit(request("during"))
        assert await asyncio.gather(*running) == expected
        assert all(stream.num_attempts <= 2 for stream in streams)


async def test_prefills_death_does_not_touch_streams_that_decode() -> None:
    """A stream that has been handed over has nothing left on prefill: it is not even retried."""
    expected = await undisturbed()
    async with world("prefill", "decode") as w:
        stream = w.router.submit(request(PROMPTS[0], NUM_TOKENS))
        await w.until(lambda: stream.state == RequestState.DECODING, "decoding")
        w.handles["prefill-0"].kill()
        assert await collect(stream) == expected[0]
        assert stream.num_attempts == 1


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
async def test_death_with_bytes_under_way(worker: str) -> None:
    """The writer's death is as good as its word that it has quiesced; the reader's leaves nothing to wait for."""
    expected = await undisturbed()
    async with world("prefill", "decode") as w:
        writer = w.handles["prefill-0"]
        writer.transport.is_open = False
        stream = w.router.submit(request(PROMPTS[0], NUM_TOKENS))
        await w.until(lambda: stream.state == RequestState.HANDING_OFF, "handing off")
        w.handles[worker].kill()
        writer.open_gate()
        assert await collect(stream) == expected[0]


async def test_a_client_that_leaves_while_its_stream_waits_for_a_worker_is_forgotten() -> None:
    """Abort between two attempts: nothing is computed for it any more."""
    async with world("prefill", "decode", workers=NO_FALLBACK) as w:
        stream = w.router.submit(request(PROMPTS[0], NUM_TOKENS))
        await w.until(lambda: len(stream.tokens) >= 3, "3 tokens")
        w.handles["decode-0"].kill()
        await w.until(lambda: stream.state == RequestState.QUEUED, "queued again")
        stream.abort()
        assert stream.num_attempts == 1
        assert len(await collect(stream)) < NUM_TOKENS


async def test_attempts_are_bounded() -> None:
    """A request that every worker dies of ends with a typed error that counts its attempts."""
    async with world("mixed", max_attempts=2) as w:
        stream = w.router.submit(request(PROMPTS[0], 150))
        for attempt in (1, 2):
            await w.until(lambda attempt=attempt: stream.num_attempts == attempt and bool(stream.tokens), f"attempt {attempt}")
            w.handles["mixed-0"].kill()
        with pytest.raises(RequestFailedError, match=r"mixed-0 died: killed by SIGKILL \(attempt 2\)") as caught:
            await collect(stream)
        assert caught.value.reason == FailReason.WORKER_DIED
        await w.until(lambda: w.workers[0].is_ready, "restarted")


async def test_a_hung_worker_is_found_killed_and_its_streams_go_on() -> None:
    """Alive but stopped: it uses no CPU and says nothing, so it is killed, and nobody's stream is lost."""
    expected = await undisturbed()
    async with world("prefill", "decode", workers=WorkersConfig(hang_s=0.2)) as w:
        streams = [w.router.submit(request(prompt, NUM_TOKENS)) for prompt in PROMPTS]
        running = [asyncio.create_task(collect(stream)) for stream in streams]
        await w.until(lambda: len(streams[0].tokens) >= 3, "3 tokens")
        w.handles["decode-0"].is_stopped = True
        assert await asyncio.gather(*running) == expected
        info = next(info for info in w.workers if info.id == "decode-0")
        await w.until(lambda: info.is_ready and info.epoch == 2, "restarted")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_with_one_role_gone_for_good_the_other_serves_alone(role: str) -> None:
    """After too many restarts a worker is given up; the rest do both, and say that they do."""
    expected = await undisturbed()
    async with world("prefill", "decode", workers=WorkersConfig(max_restarts=1)) as w:
        info = next(info for info in w.workers if info.id == f"{role}-0")
        for epoch in (1, 2):
            await w.until(lambda epoch=epoch: info.is_ready and info.epoch == epoch, f"epoch {epoch}")
            w.handles[info.id].kill()
        await w.until(lambda: info.state == "gone", "given up")
        assert w.router.is_degraded
        assert [await collect(w.router.submit(request(prompt, NUM_TOKENS))) for prompt in PROMPTS] == expected
