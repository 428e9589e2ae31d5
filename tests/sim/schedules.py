"""Faults as data: a schedule says who is there, who asks for what, and what goes wrong when. ``play`` runs it and judges.

What must hold whatever happens: every stream gets the tokens of an undisturbed run, or a beginning of them and then a typed error
or its own abort; every request ends in bounded time; after every message the books of every worker are right (each block in
one state, held exactly as often as it is referenced); and at the end nothing of any request is left anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from hypothesis import strategies as st

from disagg.config import WorkersConfig
from disagg.engine.base import Chunk, Sequence
from disagg.engine.null import NullEngine
from disagg.errors import OverloadedError, RequestFailedError, UnavailableError
from disagg.messages import Message
from disagg.request import FailReason, Request, SamplingParams
from disagg.supervisor import WorkerInfo
from tests.sim.world import BLOCK_SIZE, InProcessWorker, World, make_layout, world

STEP_S = 0.005
LIMIT_S = 100.0  # virtual; more than the waits that have a deadline (20 s each) can take one after another


@dataclass(frozen=True)
class Client:
    at_s: float
    num_prompt: int
    max_tokens: int
    prompt: int  # which of a few: equal ones share a prefix
    leaves_after_s: float | None


@dataclass(frozen=True)
class Fault:
    kind: str  # a method of Play
    at_s: float
    worker: int  # index, modulo their number
    for_s: float


@dataclass(frozen=True)
class Schedule:
    num_prefill: int
    num_decode: int
    chunk_tokens: int
    num_blocks: int
    prefix_cache: bool
    fallback: bool
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]


KINDS = ("kill", "hang", "hold", "slow", "squeeze", "lag")


def schedules() -> st.SearchStrategy[Schedule]:
    moments = st.floats(0.0, 1.5).map(lambda s: round(s, 3))
    clients = st.builds(
        Client,
        at_s=moments,
        num_prompt=st.integers(1, 60),
        max_tokens=st.integers(1, 60),
        prompt=st.integers(0, 3),
        leaves_after_s=st.none() | moments,
    )
    faults = st.builds(Fault, kind=st.sampled_from(KINDS), at_s=moments, worker=st.integers(0, 7), for_s=moments)
    return st.builds(
        Schedule,
        num_prefill=st.integers(1, 3),
        num_decode=st.integers(1, 3),
        chunk_tokens=st.sampled_from((3, 8, 32)),
        num_blocks=st.sampled_from((40, 64, 200)),
        prefix_cache=st.booleans(),
        fallback=st.booleans(),
        clients=st.lists(clients, min_size=1, max_size=8).map(tuple),
        faults=st.lists(faults, max_size=6).map(tuple),
    )


@lru_cache(maxsize=4096)
def undisturbed(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What the null engine says to ``prompt``, asked directly."""
    engine, layout = NullEngine(make_layout()), make_layout()
    num_blocks = layout.num_blocks(len(prompt) + max_tokens)
    engine.bind(memoryview(bytearray(num_blocks * layout.block_nbytes)))
    params = SamplingParams(max_tokens=max_tokens)
    sequence = Sequence(0, list(prompt), params, num_prompt=len(prompt), blocks=list(range(num_blocks)))
    for _ in range(max_tokens):
        (sample,) = engine.step([Chunk(sequence, sequence.num_computed, sequence.num_uncomputed)])
        sequence.num_computed = len(sequence.tokens)
        assert sample.token is not None
        sequence.tokens.append(sample.token)
    return tuple(sequence.tokens[len(prompt) :])


def prompt_of(client: Client) -> tuple[int, ...]:
    rng = random.Random(client.prompt)
    return tuple(rng.randrange(32, 127) for _ in range(client.num_prompt))


class Play:
    """One schedule being run in one world."""

    def __init__(self, w: World, schedule: Schedule) -> None:
        self.world = w
        self.schedule = schedule
        self.trace: list[tuple[float, str, str]] = []
        self._loop = asyncio.get_running_loop()
        self._deliver = w.on_message
        w.on_message = self._observe  # type: ignore[method-assign]

    async def run(self) -> None:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for client in self.schedule.clients:
                tasks.create_task(self._client(client))
            for fault in self.schedule.faults:
                tasks.create_task(self._fault(fault))

    async def _client(self, client: Client) -> None:
        await asyncio.sleep(client.at_s)
        prompt = prompt_of(client)
        expected = undisturbed(prompt, client.max_tokens)
        got: list[int] = []
        try:
            params = SamplingParams(max_tokens=client.max_tokens)
            stream = self.world.router.submit(Request(id="client", prompt=list(prompt), params=params))
        except (OverloadedError, UnavailableError):
            assert self.schedule.faults, "refused although nothing was wrong"
            return
        if client.leaves_after_s is not None:
            self._loop.call_later(client.leaves_after_s, stream.abort)
        try:
            async for outputs in stream:
                got += [output.token for output in outputs]
                assert tuple(got) == expected[: len(got)], f"a wrong token at {len(got)} of {client}"
        except RequestFailedError as error:
            self._judge(error)
        else:
            is_whole = len(got) == client.max_tokens
            assert is_whole or client.leaves_after_s is not None, f"a silent end after {len(got)} of {client.max_tokens} tokens"

    def _judge(self, error: RequestFailedError) -> None:
        assert self.schedule.faults, f"failed although nothing was wrong: {error}"
        assert error.reason in (FailReason.NO_BLOCKS, FailReason.TIMEOUT), error  # attempts are never used up here

    async def _fault(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        names = sorted(self.world.handles)
        handle = self.world.handles[names[fault.worker % len(names)]]
        undo = getattr(self, fault.kind)(handle)
        if undo is not None:
            await asyncio.sleep(fault.for_s)
            undo()

    def kill(self, handle: InProcessWorker) -> None:
        handle.kill()

    def hang(self, handle: InProcessWorker) -> None:
        """Stopped for good: the supervisor has to find out."""
        handle.is_stopped = True

    def hold(self, handle: InProcessWorker):
        """Copies do not complete for a while."""
        handle.transport.is_open = False
        return handle.open_gate

    def slow(self, handle: InProcessWorker):
        """A peer that computes twenty times slower for a while."""
        handle.step_s = 20 * STEP_S

        def undo() -> None:
            handle.step_s = STEP_S

        return undo

    def lag(self, handle: InProcessWorker):
        """Messages from and to it take long for a while."""
        handle.latency_s = 0.2

        def undo() -> None:
            handle.latency_s = 0.0

        return undo

    def squeeze(self, handle: InProcessWorker):
        """Half of what is free in its pool is not there for a while."""
        pool = handle.worker.pool
        taken = pool.allocate(pool.num_available // 2, "in_use")  # type: ignore[arg-type]
        handle.squeezed += taken

        def undo() -> None:
            pool.release(taken)
            handle.squeezed = [block for block in handle.squeezed if block not in taken]
            handle.open_gate()

        return undo

    def _observe(self, worker: WorkerInfo, message: Message) -> None:
        dispatch = getattr(message, "dispatch", "")
        self.trace.append((round(self._loop.time(), 6), worker.id, f"{type(message).__name__} {dispatch}"))
        self._deliver(worker, message)
        for handle in self.world.handles.values():
            check_books(handle)


def check_books(handle: InProcessWorker) -> None:
    """Every block is in one state, and is held by as many owners as it has references."""
    worker = handle.worker
    pool = worker.pool
    assert sum(pool.counts.values()) == pool.num_blocks
    held = Counter(handle.squeezed)
    for role in (worker.prefill, worker.decode):
        for dispatch in role._dispatches.values():
            held.update(dispatch.sequence.blocks)
    for probe in worker.prober._running.values():
        held.update(probe.blocks)
    references = {block: count for block, count in enumerate(pool._refs) if count}
    assert references == dict(held), f"{handle.settings.worker}: {pool!r}"


async def play(schedule: Schedule) -> list[tuple[float, str, str]]:
    """Run the schedule and return its trace. Raises AssertionError for whatever must not happen."""
    roles = ["prefill"] * schedule.num_prefill + ["decode"] * schedule.num_decode
    async with world(
        *roles,
        kv_nbytes=schedule.num_blocks * make_layout(BLOCK_SIZE).block_nbytes,
        chunk_tokens=schedule.chunk_tokens,
        prefix_cache=schedule.prefix_cache,
        workers=WorkersConfig(fallback=schedule.fallback, max_restarts=1000),
        max_attempts=50,
        reserve_s=20.0,
        queue_s=20.0,
    ) as w:
        for handle in w.handles.values():
            handle.step_s = STEP_S
        running = Play(w, schedule)
        await running.run()
        await w.until(lambda: all(worker.is_ready for worker in w.workers), "every worker restarted")
        return running.trace
