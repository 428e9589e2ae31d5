"""Whole requests through the real parts: same tokens however they are served, and nothing left however they end."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from disagg.config import WorkersConfig
from disagg.engine.base import Chunk, Sample
from disagg.errors import OverloadedError, RequestFailedError, UnavailableError
from disagg.messages import Message, Tokens
from disagg.request import FailReason, RequestState
from disagg.stream import RequestStream
from disagg.supervisor import WorkerInfo
from tests.sim.loop import run_virtual
from tests.sim.world import DEADLINE_S, World, collect, make_layout, request, world

PROMPTS = ["a", "four", "a prompt of more than one chunk, and of many blocks", "x" * 64, "block-aligned 16"]


async def colocated_tokens(prompts: list[str], max_tokens: int) -> list[list[int]]:
    async with world("mixed", prefix_cache=False) as w:
        return [await collect(w.router.submit(request(prompt, max_tokens))) for prompt in prompts]


@pytest.mark.parametrize("chunk_tokens", [3, 16, 64])
@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill", "prefill", "decode", "decode"), ("mixed", "mixed")])
async def test_tokens_are_those_of_the_colocated_run(roles: tuple[str, ...], chunk_tokens: int) -> None:
    """Disaggregated over memory equals colocated, alone and all at once, with cold and warm prefix caches on both sides."""
    expected = await colocated_tokens(PROMPTS, 20)
    assert all(len(tokens) == 20 for tokens in expected)
    async with world(*roles, chunk_tokens=chunk_tokens) as w:
        for _ in range(2):
            alone = [await collect(w.router.submit(request(prompt, 20))) for prompt in PROMPTS]
            together = await asyncio.gather(*[collect(w.router.submit(request(prompt, 20))) for prompt in PROMPTS])
            assert alone == expected
            assert together == expected
        for name in w.handles:
            assert w.engine_worker(name).stats().decode_prefill_tokens == 0
        moved = sum(w.metrics.transfers)
        assert (moved > 0) == ("decode" in roles)


@pytest.mark.parametrize("prefill_hit", ["none", "part", "all"])
@pytest.mark.parametrize("decode_hit", ["none", "part", "all"])
async def test_all_nine_combinations_of_prefix_hits_give_the_same_tokens(prefill_hit: str, decode_hit: str) -> None:
    """Prefill's cache and decode's are independent; with all of it on decode nothing is transferred at all."""
    prompt = "sixteen bytes ok" * 2
    (expected,) = await colocated_tokens([prompt], 6)
    warm_up = {"none": None, "part": prompt[:20], "all": prompt}
    async with world("prefill", "decode") as w:
        # A prompt of one token's answer never reaches decode; a release of decode's reservation never fills its cache.
        if text := warm_up[decode_hit]:
            await collect(w.router.submit(request(text, 2)))
            w.engine_worker("prefill-0").pool.allocate(64, "in_use")  # evicts all …
            w.engine_worker("prefill-0").pool.release(list(range(64)))  # … and gives the blocks back
        if text := warm_up[prefill_hit]:
            await collect(w.router.submit(request(text, 1)))
        before = len(w.metrics.transfers)
        stream = w.router.submit(request(prompt, 6))
        assert await collect(stream) == expected
        blocks = {"none": 8, "part": 3, "all": 0}[decode_hit]
        expected_nbytes = blocks * make_layout().block_nbytes
        assert [w.metrics.transfers[-1]] == w.metrics.transfers[before:] == [expected_nbytes]
        assert stream.num_cached_tokens == {"none": 0, "part": 20, "all": 28}[prefill_hit]


async def test_the_first_token_is_prefills_and_a_one_token_request_moves_nothing() -> None:
    """max_tokens 1 never touches decode; usage and tokens are those of the colocated run."""
    (expected,) = await colocated_tokens(["hello"], 1)
    async with world("prefill", "decode") as w:
        stream = w.router.submit(request("hello", 1))
        assert await collect(stream) == expected
        assert (stream.state, w.metrics.transfers, w.engine_worker("decode-0").stats().steps) == (RequestState.FINISHED, [], 0)


async def test_a_stop_token_sampled_by_prefill_ends_the_request_there() -> None:
    """The right finish reason, no second token, and the reservation returned."""
    (tokens,) = await colocated_tokens(["hello"], 1)
    async with world("prefill", "decode") as w:
        stream = w.router.submit(request("hello", 9, stop_token_ids=(tokens[0],)))
        outputs = [output async for outputs in stream for output in outputs]
        assert [(output.token, output.finish_reason) for output in outputs] == [(tokens[0], "stop")]


async def test_preemption_on_decode_changes_no_token() -> None:
    """A decode pool too small for all streams at once: some give their blocks back, and every text stays the same."""
    prompts = [f"stream {i} with its own prompt" for i in range(6)]
    expected = await colocated_tokens(prompts, 60)
    async with world("prefill", "decode", kv_nbytes=64 * 50) as w:
        got = await asyncio.gather(*[collect(w.router.submit(request(prompt, 60))) for prompt in prompts])
        assert got == expected
        stats = w.engine_worker("decode-0").stats()
        assert stats.preemptions > 0
        assert stats.decode_prefill_tokens > 0


@pytest.mark.parametrize("state", ["queued", "reserving", "prefilling", "decoding"])
async def test_abort_in_each_phase_leaves_everything_empty(state: str) -> None:
    """Whatever the phase, another stream is not touched and all blocks come back (the world checks at its end)."""
    async with world("prefill", "decode", chunk_tokens=4) as w:
        (expected,) = await colocated_tokens(["bystander"], 30)
        bystander = asyncio.create_task(collect(w.router.submit(request("bystander", 30))))
        streams = [w.router.submit(request(f"{i} to be given up " * 3, 50)) for i in range(4)]
        victim = streams[-1] if state == "queued" else streams[0]
        await w.until(lambda: victim.state == state, f"a request in state {state}")
        for stream in streams:
            stream.abort()
            stream.abort()
        assert victim.state is RequestState.ABORTED
        assert len(await collect(victim)) <= 50
        assert await bystander == expected


async def test_blocks_that_may_still_be_written_are_not_given_back() -> None:
    """Aborted with bytes under way: decode's blocks stay reserved until the writer has quiesced, then all is empty."""
    async with world("prefill", "decode") as w:
        writer, decode_pool = w.handles["prefill-0"], w.engine_worker("decode-0").pool
        writer.transport.is_open = False
        stream = w.router.submit(request("bytes under way", 20))
        await w.until(lambda: stream.state == RequestState.HANDING_OFF, "a request in state handing_off")
        stream.abort()
        for _ in range(100):
            await asyncio.sleep(0)
        assert decode_pool.counts["reserved"] == 4
        assert not w.router.is_empty
        writer.open_gate()


async def test_two_hundred_aborts_at_random_moments_leak_nothing() -> None:
    """Aborts race every message there is; the survivors' tokens are right."""
    rng = random.Random(7)
    prompts = [f"{i} " + "p" * rng.randrange(1, 60) for i in range(40)]
    expected = await colocated_tokens(prompts, 12)
    async with world("prefill", "prefill", "decode", "decode", kv_nbytes=64 * 60) as w:

        async def one(index: int) -> bool:
            stream = w.router.submit(request(prompts[index % 40], 12))
            if index % 6 == 5:
                return await collect(stream) == expected[index % 40]
            for _ in range(rng.randrange(0, 120)):
                await asyncio.sleep(0)
            stream.abort()
            return stream.is_final

        assert all(await asyncio.gather(*[one(index) for index in range(240)]))


async def test_a_full_queue_is_refused_and_running_requests_are_not_touched() -> None:
    """Overload gets 429's error at once; what was admitted ends right."""
    async with world("prefill", "decode", max_queue=3) as w:
        accepted: list[RequestStream] = []
        with pytest.raises(OverloadedError, match="3 requests are waiting already") as caught:
            accepted.extend(w.router.submit(request(f"{index}" * 20, 5)) for index in range(30))
        assert caught.value.retry_after_s > 0
        assert accepted
        assert [len(await collect(stream)) for stream in accepted] == [5] * len(accepted)


async def test_waiting_for_blocks_on_decode_is_bounded_and_typed() -> None:
    """A reservation that cannot be met in time is an error with a reason, and everything is given back."""
    async with world("prefill", "decode", reserve_s=0.05) as w:
        decode = w.engine_worker("decode-0")
        taken = decode.pool.allocate(60, "in_use")
        stream = w.router.submit(request("x" * 30))
        with pytest.raises(RequestFailedError, match="no KV blocks within the time allowed") as caught:
            await collect(stream)
        assert caught.value.reason == FailReason.NO_BLOCKS
        decode.pool.release(taken)


async def test_blocks_that_a_finished_copy_frees_admit_a_waiting_prompt_at_once() -> None:
    """No other message wakes the worker: the copy's end is enough."""
    async with world("prefill", "decode", kv_nbytes=64 * 30, chunk_tokens=64) as w:
        writer = w.handles["prefill-0"]
        others = writer.worker.pool.allocate(10, "in_use")
        writer.transport.is_open = False
        first = asyncio.create_task(collect(w.router.submit(request("f" * 40, 3))))
        await w.until(lambda: bool(writer.worker.pool.counts["in_use"]), "the first prompt computed")
        second = asyncio.create_task(collect(w.router.submit(request("s" * 50, 3))))
        await w.until(lambda: bool(writer.worker.scheduler.waiting), "the second prompt waiting for blocks")
        writer.open_gate()
        assert len(await first) == len(await second) == 3
        writer.worker.pool.release(others)


async def test_an_output_that_is_no_number_fails_its_request_with_a_reason() -> None:
    """On prefill and on decode: an error for that request, the worker and the others live on."""
    for healthy_steps, worker in ((0, "prefill-0"), (3, "decode-0")):
        async with world("prefill", "decode") as w:
            engine = w.engine_worker(worker)._engine
            whole_step, steps = engine.step, itertools.count()

            def broken_step(batch: list[Chunk]) -> list[Sample]:
                samples = whole_step(batch)  # noqa: B023
                is_broken = next(steps) >= healthy_steps  # noqa: B023
                return [Sample(None, is_broken=True)] * len(batch) if is_broken else samples

            engine.step = broken_step
            stream = w.router.submit(request("broken", 20))
            with pytest.raises(RequestFailedError, match="not a number") as caught:
                await collect(stream)
            assert caught.value.reason == FailReason.BROKEN_OUTPUT
            engine.step = whole_step
            assert len(await collect(w.router.submit(request("whole", 20)))) == 20


async def test_what_is_told_twice_is_counted_and_changes_nothing() -> None:
    """Every message of a worker about a dispatch, delivered twice: the tokens are the same and nobody breaks."""
    (expected,) = await colocated_tokens(["told twice"], 12)
    async with world("prefill", "decode") as w:
        once = w.on_message

        def twice(worker: WorkerInfo, message: Message) -> None:
            once(worker, message)
            if not isinstance(message, Tokens):  # tokens carry no number: their channel must not repeat them
                once(worker, message)

        w.on_message = twice
        assert await collect(w.router.submit(request("told twice", 12))) == expected
        assert w.router.num_late_messages > 0


async def test_one_full_decode_worker_does_not_hold_up_requests_for_another() -> None:
    """A request that waits for blocks on one decode worker takes nobody else's place on prefill."""
    async with world("prefill", "decode", "decode", chunk_tokens=4, reserve_s=5.0) as w:
        full = w.engine_worker("decode-0").pool
        taken = full.allocate(64, "in_use")
        waiting = next(
            stream
            for stream in [w.router.submit(request(f"{i} waits or not", 3)) for i in range(2)]
            if w.router._by_stream[stream].decode.id == "decode-0"
        )
        for index in range(8):
            assert len(await collect(w.router.submit(request(f"{index} does not wait", 3)))) == 3
        assert len(await collect(w.router.submit(request("only one token", 1)))) == 1
        assert waiting.state is RequestState.RESERVING
        full.release(taken)
        w.handles["decode-0"].open_gate()
        assert len(await collect(waiting)) == 3


async def test_waiting_while_nobody_can_serve_is_bounded() -> None:
    """With no worker for longer than queue_s, queued requests fail with a typed reason instead of waiting for ever."""
    async with world("mixed", queue_s=0.1, workers=WorkersConfig(fallback=False)) as w:
        stream = w.router.submit(request("nobody is left", 100))
        await w.until(lambda: len(stream.tokens) > 2, "tokens")
        launch, w.launch = w.launch, w.refuse_to_launch
        w.supervisor._launcher = w
        w.handles["mixed-0"].kill()
        with pytest.raises(RequestFailedError, match=r"no worker could serve it for 0\.1 s") as caught:
            await collect(stream)
        assert caught.value.reason == FailReason.TIMEOUT
        w.launch = launch
        await w.until(lambda: w.workers[0].is_ready, "the worker back")


async def test_pools_of_a_few_blocks_serve_too() -> None:
    """The start-up probe takes no more blocks than there are."""
    async with world("prefill", "decode", kv_nbytes=64 * 4) as w:
        assert len(await collect(w.router.submit(request("tiny", 3)))) == 3


async def test_drain_admits_nothing_and_waits_for_the_last_stream() -> None:
    """Draining refuses with 503's error, and returns when the last stream has ended."""
    async with world("prefill", "decode") as w:
        stream = w.router.submit(request("last one", 20))
        draining = asyncio.create_task(w.router.drain())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            w.router.submit(request("too late"))
        assert not draining.done()
        assert len(await collect(stream)) == 20
        async with asyncio.timeout(DEADLINE_S):
            await draining


async def test_ending_all_streams_gives_each_an_error_and_frees_everything() -> None:
    """What is left when the drain time is over does not end silently."""
    async with world("prefill", "decode", chunk_tokens=4) as w:
        streams = [w.router.submit(request(f"{i}" * 30, 100)) for i in range(5)]
        await w.until(lambda: streams[0].state == RequestState.DECODING, "a decoding request")
        w.router.fail_all("the server is shutting down", FailReason.SHUTDOWN)
        for stream in streams:
            with pytest.raises(RequestFailedError, match="shutting down"):
                await collect(stream)


async def cancelled_prompts(w: World) -> float:
    """Ten prompts of 600 tokens given up at once; the virtual seconds that the next short request then takes."""
    loop = asyncio.get_running_loop()
    streams = [w.router.submit(request([32 + index + i % 60 for i in range(600)], 20)) for index in range(10)]
    await w.until(lambda: streams[0].state is RequestState.PREFILLING, "the first is being computed")
    await asyncio.sleep(0.2)
    for stream in streams:
        stream.abort()
    begun = loop.time()
    assert len(await collect(w.router.submit(request("short", 1)))) == 1
    return loop.time() - begun


def test_cancelled_long_prompts_delay_the_next_request_by_a_chunk_at_most() -> None:
    """Prefill looks between chunks, and what is queued for clients that have gone is dropped."""
    step_s = 0.1

    async def scenario() -> float:
        async with world("prefill", "decode", chunk_tokens=16, kv_nbytes=64 * 400) as w:
            for handle in w.handles.values():
                handle.step_s = step_s
            return await cancelled_prompts(w)

    assert run_virtual(scenario()) <= 2 * step_s + 0.01  # the rest of the running step, and its own
