"""One kind of fault each, at the moment where it would hurt: late and doubled words, full pools, busy peers, overload."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from disagg import messages as m
from disagg.config import WorkersConfig
from disagg.engine.base import Engine
from disagg.engine.null import NullEngine
from disagg.errors import OverloadedError, StartupError, UnavailableError
from disagg.messages import Message
from disagg.request import RequestState
from disagg.stream import RequestStream
from disagg.supervisor import WorkerInfo
from tests.sim.loop import run_virtual
from tests.sim.world import InProcessWorker, World, collect, make_layout, request, world

BLOCK_NBYTES = make_layout().block_nbytes
FROM_WORKERS = (m.Reserved, m.Prefilled, m.Pushed, m.Tokens)
STEP_S = 0.005


async def undisturbed(prompts: Iterable[str], max_tokens: int) -> list[list[int]]:
    async with world("mixed", prefix_cache=False) as w:
        return [await collect(w.router.submit(request(prompt, max_tokens))) for prompt in prompts]


async def turns(count: int) -> None:
    """Let the loop turn: enough for every message that is under way to arrive, and for what it starts."""
    for _ in range(count):
        await asyncio.sleep(0)


def info(w: World, worker: str) -> WorkerInfo:
    return next(one for one in w.workers if one.id == worker)


def concerns(message: Message, w: World, stream: RequestStream) -> bool:
    dispatch = w.router._by_stream.get(stream)
    dispatches = [output.dispatch for output in message.outputs] if isinstance(message, m.Tokens) else [message.dispatch]
    return dispatch is not None and dispatch.id in dispatches


# ---------------------------------------------------------------- a client leaves


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", FROM_WORKERS)
def test_a_leave_that_meets_a_workers_word_frees_everything_within_a_second(kind: type[Message], is_before: bool) -> None:
    """The client goes just before, or just after, the router hears of the reservation, the first token, the copy, a step."""

    async def scenario() -> tuple[float, list[int], int]:
        async with world("prefill", "decode", chunk_tokens=4) as w:
            for handle in w.handles.values():
                handle.step_s = STEP_S
            victim: list[RequestStream] = []
            told, left_at = w.on_message, []

            def on_message(worker: WorkerInfo, message: Message) -> None:
                is_moment = victim and not left_at and isinstance(message, kind) and concerns(message, w, victim[0])
                if is_moment and is_before:
                    victim[0].abort()
                told(worker, message)
                if is_moment:
                    victim[0].abort()
                    left_at.append(asyncio.get_running_loop().time())

            w.on_message = on_message
            bystander = asyncio.create_task(collect(w.router.submit(request("bystander", 20))))
            victim.append(w.router.submit(request("one that leaves in the middle", 40)))
            await w.until(lambda: bool(left_at), "the moment to leave")
            tokens = await bystander
            await w.all_empty()
            return asyncio.get_running_loop().time() - left_at[0], tokens, victim[0].num_attempts

    async def expected() -> list[int]:
        (tokens,) = await undisturbed(["bystander"], 20)
        return tokens

    took_s, tokens, num_attempts = run_virtual(scenario())
    assert tokens == run_virtual(expected())
    assert took_s < 1.0
    assert num_attempts == 1


@pytest.mark.parametrize("state", ["queued", "reserving", "prefilling", "handing_off", "decoding"])
def test_blocks_come_back_without_any_other_traffic(state: str) -> None:
    """The only request there is leaves, in each phase: within one step, everything is free, whether or not anything follows."""

    async def scenario() -> float:
        async with world("prefill", "decode", chunk_tokens=4, reserve_s=60.0) as w:
            writer, decode = w.handles["prefill-0"], w.engine_worker("decode-0")
            for handle in w.handles.values():
                handle.step_s = STEP_S
            taken = decode.pool.allocate(60, "in_use") if state in ("queued", "reserving") else []
            streams = [w.router.submit(request(f"{index} has nobody beside it", 50)) for index in range(3 if taken else 1)]
            writer.transport.is_open = state != "handing_off"
            victim = streams[-1] if state == "queued" else streams[0]
            await w.until(lambda: victim.state == state, f"a request in state {state}")
            for stream in streams:
                stream.abort()
            decode.pool.release(taken)
            writer.open_gate()
            left_at = asyncio.get_running_loop().time()
            await w.all_empty()
            return asyncio.get_running_loop().time() - left_at

    assert run_virtual(scenario()) < 2 * STEP_S + 0.01


async def test_a_client_that_leaves_ends_no_other_stream_of_its_name() -> None:
    """Two requests with one id: streams are told apart by their dispatch, never by what a client calls them."""
    (expected,) = await undisturbed(["same name"], 30)
    async with world("prefill", "decode") as w:
        leaving, staying = (w.router.submit(request("same name", 30)) for _ in range(2))
        assert leaving.request.id == staying.request.id
        await w.until(lambda: leaving.state == RequestState.DECODING, "decoding")
        leaving.abort()
        assert await collect(staying) == expected


# ---------------------------------------------------------------- words that come late, twice, or from nowhere

UNKNOWN = 10**9


@pytest.mark.parametrize(
    "message",
    [
        m.Reserved(UNKNOWN, [0, 1], 0),
        m.Refused(UNKNOWN, "no room"),
        m.Prefilled(UNKNOWN, m.TokenOutput(UNKNOWN, 65), 0, None, 0.0, 0.0),
        m.Pushed(UNKNOWN, 0, 0.0, None, []),
        m.Quiesced(UNKNOWN),
        m.Tokens([m.TokenOutput(UNKNOWN, 65)]),
    ],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
async def test_words_about_no_dispatch_of_ours_are_counted_and_change_nothing(message: Message, worker: str) -> None:
    """Whoever says them, in the middle of a stream: its tokens are right and the router goes on."""
    (expected,) = await undisturbed(["undisturbed by it"], 20)
    async with world("prefill", "decode") as w:
        stream = w.router.submit(request("undisturbed by it", 20))
        await w.until(lambda: len(stream.tokens) >= 3, "3 tokens")
        num_late = w.router.num_late_messages
        w.on_message(info(w, worker), message)
        assert w.router.num_late_messages == num_late + 1
        assert await collect(stream) == expected


@pytest.mark.parametrize(
    "message",
    [m.Commit(UNKNOWN, 65), m.Verify(UNKNOWN), m.Abort(UNKNOWN)],
    ids=lambda message: type(message).__name__,
)
async def test_orders_about_no_dispatch_of_its_own_are_counted_by_the_worker(message: Message) -> None:
    """It lives on, counts them, and answers an Abort all the same, since the parent waits for the answer."""
    async with world("prefill", "decode") as w:
        worker = w.engine_worker("decode-0")
        num_late = worker.stats().late_messages
        answers: list[Message] = []
        told, w.on_message = w.on_message, lambda _, answer: answers.append(answer)
        w.handles["decode-0"].send(message)
        await w.until(lambda: worker.stats().late_messages == num_late + 1, "counted")
        await w.until(lambda: any(isinstance(answer, m.Stats) for answer in answers), "it speaks on")
        w.on_message = told
        assert (m.Quiesced(UNKNOWN) in answers) == isinstance(message, m.Abort)
        assert len(await collect(w.router.submit(request("still there", 5)))) == 5


def tell_twice(handle: InProcessWorker) -> None:
    """Every order but the one that carries a descriptor reaches the worker two times, one right behind the other."""
    once = handle.send

    def send(message: Message, fds: list[int] | None = None) -> None:
        once(message, fds)
        if not isinstance(message, m.Connect | m.Shutdown):
            once(message, fds)

    handle.send = send  # type: ignore[method-assign]


@pytest.mark.parametrize("leaves", [False, True], ids=["to its end", "aborted"])
async def test_a_worker_told_everything_twice_does_it_once(leaves: bool) -> None:
    """Reserve, Prefill, Commit, and Abort while bytes are under way: the tokens are the same and every block comes back once."""
    (expected,) = await undisturbed(["told twice"], 20)
    async with world("prefill", "decode", chunk_tokens=4) as w:
        for handle in w.handles.values():
            tell_twice(handle)
        stream = w.router.submit(request("told twice", 20))
        if leaves:
            w.handles["prefill-0"].transport.is_open = False
            await w.until(lambda: stream.state == RequestState.HANDING_OFF, "bytes under way")
            stream.abort()
            await turns(50)
            w.handles["prefill-0"].open_gate()
        tokens = await collect(stream)
        assert tokens == expected[: len(tokens)]
        assert leaves or tokens == expected
        await w.all_empty()
        assert w.engine_worker("decode-0").stats().late_messages > 0


async def test_a_probe_that_is_ordered_twice_is_made_once() -> None:
    """A restarted worker's pair is proven, and the probe's blocks come back, however often a step of it is asked for."""
    async with world("prefill", "decode") as w:
        tell_twice(w.handles["prefill-0"])
        w.handles["decode-0"].kill()
        await w.until(lambda: bool(w.pairs.verified()) and info(w, "decode-0").epoch == 2, "verified again")
        await w.all_empty()
        assert len(await collect(w.router.submit(request("proven", 5)))) == 5


# ---------------------------------------------------------------- the first token


async def test_the_first_token_is_streamed_while_the_blocks_are_still_under_way() -> None:
    """It is prefill's: no copy that takes long, and no decode step, stands before it. The second comes when the copy is done."""
    (expected,) = await undisturbed(["first of all"], 10)
    async with world("prefill", "decode") as w:
        writer, decode = w.handles["prefill-0"], w.engine_worker("decode-0")
        writer.transport.is_open = False
        stream = w.router.submit(request("first of all", 10))
        async with asyncio.timeout(10):
            (first,) = await anext(stream)
        assert (first.token, stream.state, decode.stats().steps) == (expected[0], RequestState.HANDING_OFF, 0)
        writer.open_gate()
        assert [first.token, *await collect(stream)] == expected


async def test_a_stop_string_completed_by_the_first_token_ends_everything_there() -> None:
    """The api stops the stream while its blocks are still being copied: no second token, no step on decode, nothing left."""
    async with world("prefill", "decode") as w:
        writer, decode = w.handles["prefill-0"], w.engine_worker("decode-0")
        writer.transport.is_open = False
        stream = w.router.submit(request("one token is enough", 10))
        async with asyncio.timeout(10):
            outputs = await anext(stream)
        stream.stop()
        writer.open_gate()
        assert await collect(stream) == []
        assert (len(outputs), stream.state, decode.stats().steps) == (1, RequestState.FINISHED, 0)


async def test_a_prompt_that_ends_with_its_first_token_moves_no_block() -> None:
    """A stop token: prefill knows, so it does not even begin to copy."""
    (tokens,) = await undisturbed(["stops at once"], 1)
    async with world("prefill", "decode") as w:
        w.metrics.transfers.clear()
        assert await collect(w.router.submit(request("stops at once", 9, stop_token_ids=(tokens[0],)))) == tokens
        await w.all_empty()
        assert sum(w.metrics.transfers) == 0


async def test_a_next_attempt_knows_what_was_prompt_and_what_was_generated() -> None:
    """Penalties and usage depend on the border: after a failover it is still the prompt's end, and the draws' seed the same."""
    async with world("prefill", "decode") as w:
        sent: list[m.Reserve | m.Prefill] = []
        for handle in w.handles.values():
            send = handle.send

            def watched(message: Message, fds: list[int] | None = None, send: Any = send) -> None:
                if isinstance(message, m.Reserve | m.Prefill):
                    sent.append(message)
                send(message, fds)

            handle.send = watched  # type: ignore[method-assign]
        stream = w.router.submit(request("where it ends", 30, seed=7, frequency_penalty=0.5))
        await w.until(lambda: len(stream.tokens) >= 5, "5 tokens")
        w.handles["decode-0"].kill()
        await w.until(lambda: stream.num_attempts == 2, "the next attempt")
        assert len({message.num_prompt for message in sent}) == 1
        assert len({(message.params.seed, message.params.frequency_penalty) for message in sent}) == 1
        assert len(sent[-1].tokens) > sent[-1].num_prompt == len("where it ends")
        await collect(stream)
        assert stream.num_cached_tokens == 0, "what its own first attempt left in the cache is no hit"


# ---------------------------------------------------------------- full pools


async def test_reservations_leave_running_streams_blocks_to_grow_into() -> None:
    """A prompt that would take the last blocks waits until the stream has ended; nothing is preempted for it."""
    async with world("prefill", "decode", kv_nbytes=BLOCK_NBYTES * 22, prefix_cache=False) as w:
        decode = w.engine_worker("decode-0")
        running = w.router.submit(request("grows", 15))
        await w.until(lambda: running.state == RequestState.DECODING, "decoding")
        greedy = w.router.submit(request("g" * 4 * 18, 3))
        assert len(await collect(running)) == 15
        assert len(await collect(greedy)) == 3
        assert decode.stats().preemptions == 0


async def test_reservations_wait_behind_a_stream_that_had_to_give_its_blocks_back() -> None:
    """What a preempted stream gave back is not enough for it, and would be for a new prompt, which waits all the same."""
    async with world("prefill", "decode", prefix_cache=False) as w:
        decode = w.engine_worker("decode-0")
        stream = w.router.submit(request("was here first", 60))
        await w.until(lambda: stream.state == RequestState.DECODING, "decoding")
        taken = decode.pool.allocate(decode.pool.num_available, "in_use")
        await w.until(lambda: bool(decode.scheduler.waiting), "preempted")
        newcomer = w.router.submit(request("later", 4))
        await w.until(lambda: newcomer.state == RequestState.RESERVING, "reserving")
        await turns(50)
        assert (newcomer.state, decode.pool.counts["reserved"]) == (RequestState.RESERVING, 0)
        assert decode.pool.num_available > make_layout().num_blocks(len("later") + 1)
        decode.pool.release(taken)
        w.handles["decode-0"].open_gate()
        assert (len(await collect(stream)), len(await collect(newcomer))) == (60, 4)


async def test_reservations_count_as_places_in_the_batch() -> None:
    """Never more streams and reservations on decode than it can run at once; the others wait their turn, and all end right."""
    prompts = [f"{index}" for index in range(6)]
    expected = await undisturbed(prompts, 30)
    async with world("prefill", "decode", max_num_seqs=2, chunk_tokens=64) as w:
        decode = w.engine_worker("decode-0")
        most, told = 0, w.on_message

        def on_message(worker: WorkerInfo, message: Message) -> None:
            nonlocal most
            told(worker, message)
            most = max(most, len(decode.scheduler.running) + decode.decode._num_reserved)

        w.on_message = on_message
        assert await asyncio.gather(*[collect(w.router.submit(request(prompt, 30))) for prompt in prompts]) == expected
        assert most == 2


async def test_a_prompt_is_not_admitted_into_the_last_block_that_a_stream_will_need() -> None:
    """Where one worker does both: the prompt waits for the stream's end rather than being begun, preempted and begun again."""
    async with world("mixed", kv_nbytes=BLOCK_NBYTES * 20, prefix_cache=False) as w:
        worker = w.engine_worker("mixed-0")
        running = w.router.submit(request("grows", 7))
        await w.until(lambda: bool(running.tokens), "the first token")
        greedy = w.router.submit(request("g" * 4 * 18, 1))
        assert (len(await collect(running)), len(await collect(greedy))) == (7, 1)
        assert worker.stats().preemptions == 0


async def test_a_preempted_stream_waits_before_prompts_that_came_after_it() -> None:
    """It keeps its place: the line is in order of arrival, whoever has been at its head before."""
    prompts = [f"{index}" * 4 * 7 for index in range(3)]
    expected = await undisturbed(prompts, 40)
    async with world("mixed", kv_nbytes=BLOCK_NBYTES * 20, prefix_cache=False, chunk_tokens=64) as w:
        worker = w.engine_worker("mixed-0")
        running = [asyncio.create_task(collect(w.router.submit(request(prompt, 40)))) for prompt in prompts]
        await w.until(lambda: worker.stats().preemptions == 1, "the second stream preempted")
        waiting = [sequence.dispatch for sequence in worker.scheduler.waiting]
        assert (len(waiting), waiting) == (2, sorted(waiting))
        assert await asyncio.gather(*running) == expected


async def test_prompts_that_each_fill_both_pools_are_served_one_after_the_other() -> None:
    """Prefill's blocks wait for decode's and decode's for prefill's, all of them: nobody holds what the other needs."""
    prompts = [f"{index}" * 4 * 10 for index in range(4)]
    expected = await undisturbed(prompts, 3)
    for chunk_tokens in (4, 64):
        async with world("prefill", "decode", kv_nbytes=BLOCK_NBYTES * 12, chunk_tokens=chunk_tokens) as w:
            streams = [w.router.submit(request(prompt, 3)) for prompt in prompts]
            assert await asyncio.gather(*map(collect, streams)) == expected


# ---------------------------------------------------------------- busy is not dead


@pytest.mark.parametrize(("stuck_s", "epoch"), [(300.0, 1), (10.0, 2)], ids=["within stuck_s", "beyond it"])
def test_a_worker_that_computes_for_long_is_left_alone_up_to_stuck_s(stuck_s: float, epoch: int) -> None:
    """A step of 40 s without a word is no hang: only one longer than stuck_s is, and then its streams go on elsewhere."""

    async def scenario() -> tuple[list[int], int]:
        workers = WorkersConfig(hang_s=2.0, stuck_s=stuck_s)
        async with world("prefill", "decode", workers=workers, chunk_tokens=8) as w:
            handle = w.handles["prefill-0"]
            handle._beat = lambda: None  # type: ignore[method-assign]  # its one thread is in the step
            handle.step_s = 40.0
            stream = w.router.submit(request("takes its time", 3))
            tokens: list[int] = []
            async for outputs in stream:
                tokens += [output.token for output in outputs]
            await w.until(lambda: info(w, "prefill-0").is_ready, "prefill ready")
            return tokens, info(w, "prefill-0").epoch

    async def expected() -> list[int]:
        (tokens,) = await undisturbed(["takes its time"], 3)
        return tokens

    assert run_virtual(scenario()) == (run_virtual(expected()), epoch)


def test_a_worker_that_cannot_be_started_is_tried_less_and_less_often_and_then_not_at_all() -> None:
    """Backoff doubles, a limit ends it, and the supervisor says how often, within what time and why."""

    async def scenario() -> tuple[list[float], str]:
        loop, launches = asyncio.get_running_loop(), []
        async with world("mixed", workers=WorkersConfig(max_restarts=5)) as w:

            def refuse(*arguments: Any) -> Any:
                launches.append(loop.time())
                return w.refuse_to_launch(*arguments)

            w.launch = refuse  # type: ignore[method-assign]
            died_at = loop.time()
            w.handles["mixed-0"].kill()
            keeper = next(task for task in asyncio.all_tasks() if task.get_name() == "keep mixed-0")
            with pytest.raises(StartupError) as caught:
                await keeper
            return [b - a for a, b in zip([died_at, *launches], launches, strict=False)], str(caught.value)

    gaps, message = run_virtual(scenario())
    assert gaps == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2])
    assert message == "worker mixed-0 went down 6 times within 300 s, last: cannot start a process: no more of them"


# ---------------------------------------------------------------- who comes back as another


async def test_a_worker_that_comes_back_with_another_layout_serves_in_no_pair() -> None:
    """Another model behind the same name: refused with both sides named, nothing is handed over, and its next life is taken."""
    model = "null"

    def make_engine(settings: m.Configure) -> Engine:
        layout = make_layout()
        return NullEngine(type(layout)(**{**vars_of(layout), "model": model if settings.role == "decode" else "null"}))

    async with world("prefill", "decode", make_engine=make_engine, workers=WorkersConfig(fallback=False)) as w:
        refusals: list[str] = []
        told = w.on_message

        def on_message(worker: WorkerInfo, message: Message) -> None:
            if isinstance(message, m.Connected) and message.error:
                refusals.append(message.error)
            told(worker, message)

        w.on_message = on_message
        model = "another"
        w.handles["decode-0"].kill()
        await w.until(lambda: bool(refusals), "refused")
        assert all(word in refusals[0] for word in ("prefill-0", "decode-0", "null", "another"))
        assert not w.pairs.verified()
        with pytest.raises(UnavailableError):
            w.router.submit(request("to nobody"))
        model = "null"
        w.handles["decode-0"].kill()
        await w.until(lambda: bool(w.pairs.verified()), "its next life verified")
        assert len(await collect(w.router.submit(request("to both", 5)))) == 5


def vars_of(layout: Any) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in layout.__struct_fields__}


async def test_a_pair_whose_probe_arrives_changed_serves_nobody_until_one_arrives_whole() -> None:
    """The pattern's digests differ once: the pair is not used, and proven again later, without any other event."""
    async with world("prefill", "decode", workers=WorkersConfig(fallback=False)) as w:
        changed: list[Message] = []
        told = w.on_message

        def on_message(worker: WorkerInfo, message: Message) -> None:
            if isinstance(message, m.Verified) and not changed:
                changed.append(message)
                message = msgspec.structs.replace(message, digest=b"of other bytes")
            told(worker, message)

        w.on_message = on_message
        w.handles["decode-0"].kill()
        await w.until(lambda: bool(changed), "the probe's digest")
        await turns(200)
        assert not w.pairs.verified()
        with pytest.raises(UnavailableError):
            w.router.submit(request("to nobody"))
        await w.until(lambda: bool(w.pairs.verified()), "proven after all")
        assert len(await collect(w.router.submit(request("to both", 5)))) == 5


async def test_word_of_a_connection_to_an_earlier_life_opens_no_pair() -> None:
    """Connected names the epoch it reached: one that comes after the peer has been restarted proves nothing of the new one."""
    async with world("prefill", "decode") as w:
        late: list[m.Connected] = []
        told = w.on_message

        def on_message(worker: WorkerInfo, message: Message) -> None:
            if isinstance(message, m.Connected):
                if message.epoch == 2 and not late:
                    late.append(message)
                    w.handles["decode-0"].kill()  # it dies while this word is under way
                    return
                if message.epoch == 3 and late:
                    told(worker, late[0])
                    assert not any(pair.transport for pair in w.pairs)
            told(worker, message)

        w.on_message = on_message
        w.handles["decode-0"].kill()
        await w.until(lambda: bool(w.pairs.verified()) and info(w, "decode-0").epoch == 3, "the third life verified")
        assert len(late) == 1
        assert len(await collect(w.router.submit(request("to the third", 5)))) == 5


# ---------------------------------------------------------------- overload


def test_after_ten_times_too_much_the_server_is_as_fast_as_before() -> None:
    """What does not fit is refused at once, what was admitted ends right, and the same work then takes the same time."""
    prompts = [f"{index} measured" for index in range(8)]

    async def scenario() -> tuple[float, float, int, bool]:
        loop = asyncio.get_running_loop()
        async with world(
            "prefill", "decode", max_queue=20, kv_nbytes=BLOCK_NBYTES * 80, prefix_cache=False, max_num_seqs=8, reserve_s=60.0
        ) as w:
            for handle in w.handles.values():
                handle.step_s = STEP_S

            async def measured() -> float:
                begun = loop.time()
                await asyncio.gather(*[collect(w.router.submit(request(prompt, 20))) for prompt in prompts])
                return loop.time() - begun

            before = await measured()
            streams, num_refused = [], 0
            for index in range(300):
                try:
                    streams.append(w.router.submit(request(f"{index} too many of these", 30)))
                except OverloadedError as error:
                    num_refused += error.retry_after_s > 0
            texts = await asyncio.gather(*map(collect, streams))
            await w.all_empty()
            return before, await measured(), num_refused, all(len(text) == 30 for text in texts) and len(texts) >= 20

    before, after, num_refused, are_whole = run_virtual(scenario())
    assert num_refused > 250
    assert are_whole
    assert after == pytest.approx(before, rel=0.05)
