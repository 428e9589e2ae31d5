"""Faults as data: a schedule says who is there, who asks for what, and what goes wrong when. ``play`` runs it and judges.

What must hold whatever happens: every stream gets the tokens of an undisturbed run, or a beginning of them and then a typed error
or its own abort; every request ends in bounded time; the rules of ``tests.sim.rules`` hold in every worker; none goes down
unless a fault explains it; and at the end nothing of any request is left anywhere, and the world serves as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from disagg.config import WorkersConfig
from disagg.engine.base import Chunk, Sequence
from disagg.engine.null import NullEngine
from disagg.errors import InvalidRequestError, OverloadedError, RequestFailedError, UnavailableError
from disagg.messages import Message, Stats
from disagg.request import FailReason, Request, SamplingParams
from disagg.routes import Load
from disagg.supervisor import Role, WorkerInfo
from tests.sim.rules import check_books
from tests.sim.world import BLOCK_SIZE, InProcessWorker, Lane, Memory, World, make_layout, world

STEP_S = 0.01
LIMIT_S = 100.0  # virtual; more than the waits that have a deadline (20 s each) can take one after another


@dataclass(frozen=True)
class Client:
    at_s: float
    num_prompt: int
    max_tokens: int
    prompt: int  # which of a few: equal ones share a prefix
    leaves_after_s: float | None
    priority: int = 0


@dataclass(frozen=True)
class Fault:
    kind: str  # a method of Play
    at_s: float
    worker: int  # index, modulo their number
    for_s: float
    is_inbound: bool = False  # which direction of its channel: to the worker, or from it


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
    is_two_sided: bool = False
    verify_kv: bool = True


TO_WORKERS = ("kill", "vanish", "hang", "stall", "slow", "squeeze", "flip")
TO_COPIES = ("hold", "lose")
TO_MESSAGES = ("lag", "drop", "duplicate", "reorder", "truncate", "repeat")
KINDS = TO_WORKERS + TO_COPIES + TO_MESSAGES
MORTAL = ("kill", "vanish", "hang", "drop", "reorder", "truncate")
"""Faults that a worker may be restarted for."""

MOMENT_S = 1.5


def draw(rng: random.Random) -> Schedule:
    """Clients come and leave, and faults begin, while requests run: a long one alone takes more than half a second."""

    def seconds(most: float) -> float:
        return rng.randrange(round(most * 1e3) + 1) / 1e3

    clients = [
        Client(
            at_s=seconds(0.5),
            num_prompt=rng.randint(1, 60),
            max_tokens=rng.randint(1, 60),
            prompt=rng.randrange(4),
            leaves_after_s=seconds(0.5) if rng.randrange(2) else None,
            priority=rng.choice((-1, 0, 0, 1)),
        )
        for _ in range(rng.randint(1, 10))
    ]
    victim = rng.randrange(8)  # faults of one worker that follow each other find more than ever so many of different ones
    faults = [
        Fault(
            kind=rng.choice(rng.choice((TO_WORKERS, TO_COPIES, TO_MESSAGES))),
            at_s=seconds(0.6),
            worker=rng.choice((victim, rng.randrange(8))),
            for_s=seconds(MOMENT_S),
            is_inbound=bool(rng.randrange(2)),
        )
        for _ in range(rng.randrange(7))
    ]
    return Schedule(
        num_prefill=rng.choice((1, 1, 2, 2, 3, 4)),  # a big world takes the time of many small ones
        num_decode=rng.choice((1, 1, 2, 2, 3, 4)),
        chunk_tokens=rng.choice((3, 8, 32)),
        num_blocks=rng.choice((40, 64, 200)),
        prefix_cache=bool(rng.randrange(2)),
        fallback=bool(rng.randrange(2)),
        clients=tuple(clients),
        faults=tuple(faults),
        is_two_sided=bool(rng.randrange(2)),
        verify_kv=bool(rng.randrange(2)),
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
        self._may_restart: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._deliver = w.on_message
        w.on_message = self._observe  # type: ignore[method-assign]

    async def run(self) -> None:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for client in self.schedule.clients:
                tasks.create_task(self._client(client))
            for fault in self.schedule.faults:
                tasks.create_task(self._fault(fault))
        await self._check_end()

    async def _client(self, client: Client) -> None:
        await asyncio.sleep(client.at_s)
        prompt = prompt_of(client)
        expected = undisturbed(prompt, client.max_tokens)
        got: list[int] = []
        try:
            params = SamplingParams(max_tokens=client.max_tokens)
            request = Request(id="client", prompt=list(prompt), params=params, priority=client.priority)
            stream = self.world.router.submit(request)
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

    async def _check_end(self) -> None:
        """Every worker and every pair is back, and one more client is served."""
        w = self.world

        def is_whole() -> bool:
            roles = [worker.role for worker in w.workers if worker.is_open]
            num_pairs = roles.count(Role.PREFILL) * roles.count(Role.DECODE)
            return len(roles) == len(w.workers) and len(w.pairs.verified()) == num_pairs

        await w.until(is_whole, "every worker and pair back", timeout_s=LIMIT_S)
        await self._client(LAST)
        await w.all_empty(timeout_s=LIMIT_S)
        for worker in w.workers:
            assert worker.restarts <= self._may_restart[worker.id], f"{worker.id} went down for no reason: {worker.cause}"
            assert w.router._routes.load(worker) == Load(), worker.id

    async def _fault(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        # Only prefill workers copy anything.
        workers = self.world.workers
        names = [worker.id for worker in workers if fault.kind not in TO_COPIES or worker.role is Role.PREFILL]
        names = names or [worker.id for worker in workers]  # they have all been flipped
        name = names[fault.worker % len(names)]
        self._may_restart[name] += fault.kind in MORTAL
        await getattr(self, fault.kind)(self.world.handles[name], fault)

    async def kill(self, handle: InProcessWorker, fault: Fault) -> None:
        """Dead at once; what it had sent still arrives."""
        handle.kill()

    async def vanish(self, handle: InProcessWorker, fault: Fault) -> None:
        """As with its node: what it had sent is lost as well."""
        handle.outbound.close()
        handle.kill()

    async def hang(self, handle: InProcessWorker, fault: Fault) -> None:
        """Stopped for good: the supervisor has to find out."""
        handle.is_stopped = True

    async def stall(self, handle: InProcessWorker, fault: Fault) -> None:
        """One step takes very long, longer than a lost message may go unnoticed: that is no reason to end it."""
        handle.stall()
        await asyncio.sleep(fault.for_s * 5)
        handle.resume()

    async def slow(self, handle: InProcessWorker, fault: Fault) -> None:
        """A peer that computes twenty times slower for a while."""
        handle.step_s = 20 * STEP_S
        await asyncio.sleep(fault.for_s)
        handle.step_s = STEP_S

    async def squeeze(self, handle: InProcessWorker, fault: Fault) -> None:
        """Half of what is free in its pool is not there for a while."""
        pool = handle.worker.pool
        taken = pool.allocate(pool.num_available // 2, "in_use")  # type: ignore[arg-type]
        handle.squeezed += taken
        await asyncio.sleep(fault.for_s)
        pool.release(taken)
        handle.squeezed = [block for block in handle.squeezed if block not in taken]
        handle.open_gate()

    async def flip(self, handle: InProcessWorker, fault: Fault) -> None:
        """It is given another role, or the same at another time; what it has may go on for a while. Some flips are refused."""
        role = list(Role)[round(fault.for_s * 1e3) % len(Role)]
        with contextlib.suppress(InvalidRequestError):
            await self.world.flipper.flip(handle.settings.worker, role, fault.for_s / 2)

    async def hold(self, handle: InProcessWorker, fault: Fault) -> None:
        """Copies do not complete for a while."""
        handle.transport.is_open = False
        await asyncio.sleep(fault.for_s)
        handle.open_gate()

    async def lose(self, handle: InProcessWorker, fault: Fault) -> None:
        """The next bytes for a peer in another node never arrive."""
        handle.transport.loses_next = True

    async def lag(self, handle: InProcessWorker, fault: Fault) -> None:
        """Messages from and to it take half as long as it lasts."""
        for lane in (handle.inbound, handle.outbound):
            lane.latency_s = fault.for_s / 2
        await asyncio.sleep(fault.for_s)
        for lane in (handle.inbound, handle.outbound):
            lane.latency_s = 0.0

    async def drop(self, handle: InProcessWorker, fault: Fault) -> None:
        """The next frame of its channel never arrives."""
        lane_of(handle, fault).spoil(lambda lane, frame: b"")

    async def duplicate(self, handle: InProcessWorker, fault: Fault) -> None:
        """The next frame of its channel arrives twice."""
        lane_of(handle, fault).spoil(lambda lane, frame: frame + frame)

    async def reorder(self, handle: InProcessWorker, fault: Fault) -> None:
        """The next frame of its channel arrives behind the one after it."""

        def keep(lane: Lane, frame: bytes) -> bytes:
            lane.keep(frame)
            return b""

        lane_of(handle, fault).spoil(keep)

    async def truncate(self, handle: InProcessWorker, fault: Fault) -> None:
        """Only the beginning of the next frame of its channel arrives: more of it, the longer ``for_s``."""
        lane_of(handle, fault).spoil(lambda lane, frame: frame[: int((len(frame) - 1) * fault.for_s / MOMENT_S)])

    async def repeat(self, handle: InProcessWorker, fault: Fault) -> None:
        """Its next word about a dispatch, or the next word to it, is said twice."""
        lane_of(handle, fault).repeat()

    def _observe(self, worker: WorkerInfo, message: Message) -> None:
        dispatch = getattr(message, "dispatch", "")
        self.trace.append((round(self._loop.time(), 6), worker.id, f"{type(message).__name__} {dispatch}"))
        self._deliver(worker, message)
        if not isinstance(message, Stats):
            handle = self.world.handles[worker.id]
            check_books(handle.worker, handle.squeezed)


LAST = Client(at_s=0.0, num_prompt=9, max_tokens=4, prompt=9, leaves_after_s=None)


def lane_of(handle: InProcessWorker, fault: Fault) -> Lane:
    return handle.inbound if fault.is_inbound else handle.outbound


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
        fabric=Memory(by_address=schedule.is_two_sided),
        verify_kv=schedule.verify_kv,
    ) as w:
        w.step_s = STEP_S
        for handle in w.handles.values():
            handle.step_s = STEP_S
        running = Play(w, schedule)
        await running.run()
        return running.trace
