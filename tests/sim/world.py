"""A whole server without processes: the real router, supervisor, pairs, workers, schedulers and state tables, on one event loop.

Engines are null engines unless a test brings its own (the next token is a hash of the KV bytes read, so a wrong byte becomes a
wrong token), pools are poisoned, and every message is encoded and decoded as on a real channel.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np

from disagg.channel import FrameReader, FrameWriter
from disagg.config import LogConfig, SchedulerConfig, WorkersConfig
from disagg.engine.base import Engine, Sequence
from disagg.engine.null import NullEngine
from disagg.errors import ProtocolError, StartupError
from disagg.flip import Flipper
from disagg.handoff.host_pool import create_pool
from disagg.handoff.memory import MemoryNetwork, MemoryTransport
from disagg.handoff.shm import ShmTransport
from disagg.handoff.transports import Transports
from disagg.kv import KVLayout
from disagg.launcher import OnExit, OnMessage
from disagg.messages import HEARTBEAT_S, VERSION, Configure, Message, Ready, Reserved, Shutdown, StartFailed
from disagg.pairs import Pairs
from disagg.request import FailReason, Request, SamplingParams
from disagg.router import Router
from disagg.routes import Route
from disagg.stream import RequestStream
from disagg.supervisor import Supervisor, WorkerInfo
from disagg.worker import Worker
from tests.sim.loop import VirtualLoop
from tests.sim.rules import check_copy, check_grant, check_turn

BLOCK_SIZE = 4
DEADLINE_S = 10.0


def make_layout(block_size: int = BLOCK_SIZE) -> KVLayout:
    return KVLayout(num_layers=1, num_kv_heads=1, block_size=block_size, head_dim=8, dtype="uint8", model="null")


def worker_settings(worker: str, role: str, **changes: Any) -> Configure:
    defaults: dict[str, Any] = {
        "version": VERSION, "run_id": "sim", "worker": worker, "epoch": 0, "role": role, "model": "null", "device": "cpu",
        "dtype": "uint8", "block_size": BLOCK_SIZE, "kv_nbytes": 64 * make_layout().block_nbytes, "max_model_len": 200,
        "vocab_size": 259, "chunk_tokens": 16, "max_num_seqs": 16, "prefix_cache": True, "cpus": [], "nice": 0, "poison": True,
        "log": LogConfig(), "verify_kv": True,
    }  # fmt: skip
    return Configure(**{**defaults, **changes})


class Memory:
    """Bytes move by the memory transport; pools are poisoned byte arrays. ``by_address``: two-sided, as between nodes."""

    def __init__(self, *, by_address: bool = False) -> None:
        self.by_address = by_address
        self._near, self._far = MemoryNetwork(), MemoryNetwork(is_two_sided=True)

    def build(self, settings: Configure, layout: KVLayout, num_blocks: int) -> tuple[memoryview, Transports, int]:
        pool = memoryview(bytearray(b"\xff" * (num_blocks * layout.block_nbytes)))
        transports = []
        for network in (self._near, self._far):
            network.export(settings.worker, settings.epoch, layout, pool)
            transports.append(MemoryTransport(settings.worker, layout, pool, network))
        return pool, Transports(*transports), -1

    def withdraw(self, settings: Configure) -> None:
        for network in (self._near, self._far):
            network.withdraw(settings.worker, settings.epoch)

    def can_reach(self, key: int) -> bool:
        """Whether anybody takes what is pushed with ``key``."""
        return not key or key in self._far.expected


class Shm:
    """Bytes move by the shm transport: memory files, descriptors, a copying thread."""

    by_address = False

    def build(self, settings: Configure, layout: KVLayout, num_blocks: int) -> tuple[memoryview, Transports, int]:
        fd, mapping = create_pool(num_blocks * layout.block_nbytes, f"world-{settings.worker}")
        pool = memoryview(mapping)
        np.frombuffer(pool, dtype=np.uint8)[:] = 0xFF
        return pool, Transports(ShmTransport(settings.worker, layout, pool)), fd

    def withdraw(self, settings: Configure) -> None:
        """The memory goes with its last descriptor."""

    def can_reach(self, key: int) -> bool:
        return not key


class Gate:
    """A transport whose copies can be held back: while it is shut they have begun, but their bytes are written when it opens."""

    def __init__(self, transport: Transports, watch_copy: Callable[..., AbstractContextManager[None]]) -> None:
        self._transport = transport
        self._watch_copy = watch_copy
        self._under_way: list[tuple[Any, ...]] = []
        self.is_open = True
        self.loses_next = False  # if it goes to another node, whose receiver then waits in vain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def push(self, *arguments: Any) -> None:
        if self.is_open:
            *others, key = arguments
            if key and self.loses_next:
                self.loses_next, key = False, -1
            with self._watch_copy(*others, key):
                self._transport.push(*others, key)
        else:
            self._under_way.append(arguments)

    def open(self) -> None:
        self.is_open = True
        under_way, self._under_way = self._under_way, []
        for arguments in under_way:
            self.push(*arguments)


class Lane:
    """One direction of a worker's channel: real frames, which arrive in order, unless ``spoil`` lets something befall one."""

    def __init__(self, epoch: int, on_message: OnMessage, on_broken: Callable[[ProtocolError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer, self.reader = FrameWriter(epoch), FrameReader(epoch)
        self._on_message = on_message
        self._on_broken = on_broken
        self._under_way: deque[tuple[bytes, list[int]]] = deque()
        self._arrives_at = 0.0
        self._spoil: Spoil | None = None
        self._kept = b""
        self._is_repeated = False
        self.latency_s = 0.0
        self.num_sent = 0
        self.is_read = True  # else what arrives lies in the socket's buffer

    def send(self, message: Message, fds: list[int]) -> None:
        if self._is_repeated and hasattr(message, "dispatch"):
            self._is_repeated = False
            self.send(message, fds)
        frame, spoil, self._spoil = self._writer.frame(message), self._spoil, None
        self.num_sent += 1
        kept, self._kept = self._kept, b""
        now = self._loop.time()
        self._under_way.append((frame + kept if spoil is None else spoil(self, frame) + kept, fds))
        if self.latency_s or self._arrives_at > now:
            self._arrives_at = max(now + self.latency_s, self._arrives_at + 1e-6)
            self._loop.call_at(self._arrives_at, self._arrive)
        else:
            self._loop.call_soon(self._arrive)

    def spoil(self, how: Spoil) -> None:
        """``how(lane, frame)`` returns what becomes of the next frame."""
        self._spoil = how

    def repeat(self) -> None:
        """The sender says its next word about a dispatch twice, in two frames."""
        self._is_repeated = True

    def keep(self, frame: bytes) -> None:
        """Let it arrive behind the next one."""
        self._kept = frame

    def drain(self) -> None:
        """Deliver what is under way now."""
        while self._under_way and self.is_read:
            self._arrive()

    def close(self) -> None:
        """Nothing arrives any more."""
        self._under_way.clear()

    def _arrive(self) -> None:
        if self._under_way and self.is_read:
            data, fds = self._under_way.popleft()
            self.reader.feed(data, fds)
            try:
                for message, descriptors in self.reader.messages():
                    self._on_message(message, descriptors)
            except ProtocolError as error:
                self.close()
                self._on_broken(error)


Spoil = Callable[[Lane, bytes], bytes]


class InProcessWorker:
    """A worker on the loop: one callback for each frame it receives and each step it takes."""

    pid = 0

    def __init__(
        self,
        settings: Configure,
        engine: Engine,
        fabric: Memory | Shm,
        on_message: OnMessage,
        on_exit: OnExit,
        watch_copy: Callable[..., AbstractContextManager[None]],
    ) -> None:
        self.settings = settings
        self._loop = asyncio.get_running_loop()
        self._fabric = fabric
        self._on_exit = on_exit
        self.is_alive = True
        self._is_scheduled = False
        self.inbound = Lane(settings.epoch, self._receive, self._inbound_broken)
        self.outbound = Lane(settings.epoch, on_message, self._outbound_broken)
        num_blocks = settings.kv_nbytes // engine.layout.block_nbytes
        self.pool, transport, fd = fabric.build(settings, engine.layout, num_blocks)
        self.transport = Gate(transport, partial(watch_copy, self))
        self.worker = Worker(settings, engine, self.pool, self.transport, self._tell, self._loop.time)
        self._wake_fd = transport.fileno()
        if self._wake_fd >= 0:
            self._loop.add_reader(self._wake_fd, self._schedule)
        self.step_s = 0.0  # what a step that computes takes
        self._is_busy = False
        self.squeezed: list[int] = []  # blocks that a test has taken away
        self.is_stopped = False  # as by SIGSTOP: alive, but neither receives nor computes
        self.is_stalled = False  # in one step that takes very long
        self._loop.call_later(HEARTBEAT_S, self._beat)
        self._tell(Ready(VERSION, engine.layout, num_blocks, "cpu", 1, 0.0, transport.address), [fd])

    @property
    def num_sent(self) -> int:
        return self.inbound.num_sent

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        self.inbound.send(message, [os.dup(fd) if fd >= 0 else fd for fd in fds or []])

    def kill(self) -> None:
        self._end("killed by SIGKILL")

    def activity(self) -> tuple[float, bool]:
        return 0.0, not self.is_stopped

    def open_gate(self) -> None:
        """Let held copies happen, and wake the worker as a real transport's descriptor would."""
        self.transport.open()
        self._schedule()

    def stall(self) -> None:
        self.is_stalled, self.inbound.is_read = True, False

    def resume(self) -> None:
        """The long step is over; the worker tells of it before it looks at what has arrived."""
        self.is_stalled, self.inbound.is_read = False, True
        if self.is_alive and not self.is_stopped:
            self._tell_stats()
            self.inbound.drain()
            self._schedule()

    def _end(self, cause: str) -> None:
        """Gone now; what it had sent still arrives, and then the word of its end."""
        if self.is_alive:
            self.is_alive = False
            if self._wake_fd >= 0:
                self._loop.remove_reader(self._wake_fd)
            self.inbound.close()
            self.transport.close()
            self._fabric.withdraw(self.settings)
            self._loop.call_soon(self._ended, cause)

    def _ended(self, cause: str) -> None:
        self.outbound.drain()
        self._on_exit(cause)

    def _inbound_broken(self, error: ProtocolError) -> None:
        """As ``worker_process``: it says why, and exits."""
        self._tell(StartFailed(str(error)))
        self._end("exited with code 1")

    def _outbound_broken(self, error: ProtocolError) -> None:
        """As ``ProcessHandle``: a worker that cannot be understood is killed."""
        self._end(f"killed by SIGKILL after {error}")

    def _receive(self, message: Message, fds: list[int]) -> None:
        if isinstance(message, Shutdown):
            self._end("exited with code 0")
        elif self.is_alive and not self.is_stopped:
            self.worker.receive(message, fds)
            self._schedule()

    def _beat(self) -> None:
        if self.is_alive and not self.is_stopped:
            if not self.is_stalled:
                self._tell_stats()
            self._loop.call_later(HEARTBEAT_S, self._beat)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._is_scheduled = False
        if self.is_alive and not self.is_stopped and not self.is_stalled:
            waited = list(self.worker.scheduler.waiting)
            was_busy, self._is_busy = self._is_busy, self.worker.step()
            self._check_turns(waited)
            if self._is_busy:
                self._is_scheduled = True
                self._loop.call_later(self.step_s, self._step)
            elif (deadline := self.worker.decode.deadline) is not None:
                self._loop.call_at(deadline, self._schedule)
            if was_busy and not self._is_busy:
                self._tell_stats()

    def _check_turns(self, waited: list[Sequence]) -> None:
        left_behind = [sequence for sequence in waited if sequence in self.worker.scheduler.waiting]
        for sequence in waited:
            if sequence not in left_behind:
                check_turn(sequence.priority, [other.priority for other in left_behind], f"{self.worker!r}")

    def _tell_stats(self) -> None:
        self._tell(msgspec.structs.replace(self.worker.stats(), received=self.inbound.reader.num_taken))

    def _tell(self, message: Message, fds: list[int] | None = None) -> None:
        if isinstance(message, Reserved):
            check_grant(self.worker, message.dispatch)
        self.outbound.send(message, fds or [])


class WatchedRouter(Router):
    def _start(self, stream: RequestStream, route: Route) -> None:
        check_turn(stream.request.priority, [other.request.priority for other in self._queue], "the router's queue")
        super()._start(stream, route)


class NoMetrics:
    """Keeps what the router observed, for tests to look at."""

    def __init__(self) -> None:
        self.requests: list[RequestStream] = []
        self.transfers: list[int] = []
        self.num_corrupted = 0
        self.failovers: list[FailReason] = []

    def observe_request(self, stream: RequestStream) -> None:
        self.requests.append(stream)

    def observe_corrupted_block(self) -> None:
        self.num_corrupted += 1

    def observe_failover(self, reason: FailReason) -> None:
        self.failovers.append(reason)

    def observe_transfer(self, transport: str, nbytes: int, seconds: float) -> None:
        self.transfers.append(nbytes)


class World:
    def __init__(
        self,
        settings: list[Configure],
        scheduler: SchedulerConfig,
        workers: WorkersConfig,
        make_engine: Callable[[Configure], Engine],
        fabric: Memory | Shm,
    ) -> None:
        # 0: look after every turn of the loop, since states between two messages last one turn. A virtual clock needs more.
        self.look_s = 0.001 if isinstance(asyncio.get_running_loop(), VirtualLoop) else 0.0
        self._make_engine = make_engine
        self._fabric = fabric
        self.step_s = 0.0  # of workers that are still to be launched
        self.handles: dict[str, InProcessWorker] = {}
        self.supervisor = Supervisor(settings, workers, launcher=self, observer=self)
        self.workers = self.supervisor.workers
        mint = itertools.count(1)
        self.metrics = NoMetrics()
        self.pairs = Pairs(self.workers, mint, on_verified=lambda: self.router.on_change(), by_address=fabric.by_address)
        loop = asyncio.get_running_loop()
        self.router = WatchedRouter(
            self.workers, self.pairs, scheduler, mint, loop.time, self.metrics, fallback=workers.fallback, stuck_s=workers.stuck_s
        )

        self.flipper = Flipper(self.router, self.pairs, self.supervisor, start_s=DEADLINE_S)

    def launch(self, settings: Configure, on_message: OnMessage, on_exit: OnExit) -> InProcessWorker:
        engine = self._make_engine(settings)
        self.handles[settings.worker] = InProcessWorker(
            settings, engine, self._fabric, on_message, on_exit, watch_copy=self._watch_copy
        )
        self.handles[settings.worker].step_s = self.step_s
        return self.handles[settings.worker]

    def refuse_to_launch(self, settings: Configure, on_message: OnMessage, on_exit: OnExit) -> InProcessWorker:
        """In the place of ``launch``: a host that has no process to give."""
        raise StartupError("cannot start a process: no more of them")

    def on_ready(self, worker: WorkerInfo) -> None:
        self.router.on_ready(worker)

    def on_message(self, worker: WorkerInfo, message: Message) -> None:
        self.router.on_message(worker, message)

    def on_down(self, worker: WorkerInfo) -> None:
        self.router.on_down(worker)

    @contextmanager
    def _watch_copy(
        self,
        writer: InProcessWorker,
        dispatch: int,
        peer: str,
        epoch: int,
        source: list[int],
        target: list[int],
        key: int,
    ) -> Iterator[None]:
        """While bytes move: they reach the blocks of their dispatch, or nobody."""
        reader = self.handles[peer]
        before = None
        if writer.is_alive and reader.settings.epoch == epoch and self._fabric.can_reach(key):
            if reader.is_alive:  # else the memory is nobody's
                check_copy(writer.worker, reader.worker, dispatch, source, target)
        else:
            before = bytes(reader.pool)
        yield
        assert before in (None, bytes(reader.pool)), f"{dispatch} for epoch {epoch} of {peer} has changed {reader.worker!r}"

    def engine_worker(self, name: str) -> Worker:
        return self.handles[name].worker

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
        """Turn the loop until ``condition`` holds, or fail saying ``what`` was waited for."""
        async with asyncio.timeout(timeout_s):
            try:
                for num_looks in itertools.count(1):
                    if condition():
                        return
                    await asyncio.sleep(self.look_s * (1 + num_looks // 100))  # what takes long need not be seen at once
            except asyncio.CancelledError:
                raise AssertionError(
                    f"never happened: {what}; {self.router!r}, {[h.worker for h in self.handles.values()]}"
                ) from None

    async def all_empty(self, timeout_s: float = DEADLINE_S) -> None:
        """Queues, tables and blocks: nothing of any request, and of no probe, is left anywhere."""
        await self.until(lambda: self.router.is_empty, "router empty", timeout_s)
        await self.until(
            lambda: all(_is_empty(handle.worker) for handle in self.handles.values()), "all workers empty", timeout_s
        )


def _is_empty(worker: Worker) -> bool:
    roles = (repr(worker.prefill), repr(worker.decode))
    return worker.pool.is_idle and not worker.scheduler.has_work and roles == ("PrefillRole()", "DecodeRole()")


def null_engine(settings: Configure) -> Engine:
    return NullEngine(make_layout(settings.block_size))


@asynccontextmanager
async def world(
    *roles: str,
    max_queue: int = 1000,
    reserve_s: float = 5.0,
    queue_s: float = 5.0,
    max_attempts: int = 4,
    chunk_tokens: int = 16,
    workers: WorkersConfig | None = None,
    make_engine: Callable[[Configure], Engine] = null_engine,
    fabric: Memory | Shm | None = None,
    **changes: Any,
) -> AsyncIterator[World]:
    """A ready world with one worker for each of ``roles``; at its end everything is empty."""
    counts = dict.fromkeys(roles, 0)
    settings = []
    for role in roles:
        settings.append(worker_settings(f"{role}-{counts[role]}", role, chunk_tokens=chunk_tokens, **changes))
        counts[role] += 1
    scheduler = SchedulerConfig(
        max_queue=max_queue,
        reserve_s=reserve_s,
        queue_s=queue_s,
        chunk_tokens=chunk_tokens,
        max_attempts=max_attempts,
    )
    built = World(settings, scheduler, workers or WorkersConfig(), make_engine, fabric or Memory())
    running = asyncio.create_task(built.supervisor.run())
    num_pairs = roles.count("prefill") * roles.count("decode")
    await built.until(
        lambda: all(w.is_ready for w in built.workers) and len(built.pairs.verified()) == num_pairs, "all workers and pairs ready"
    )
    await built.all_empty()
    try:
        yield built
        await built.all_empty()
    finally:
        await built.supervisor.aclose()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def request(prompt: str | list[int], max_tokens: int = 8, *, priority: int = 0, **params: Any) -> Request:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(id=f"test-{ids[:3]}", prompt=ids, params=sampling, priority=priority)


async def collect(stream: RequestStream, timeout_s: float = DEADLINE_S) -> list[int]:
    """All tokens of a stream, to its end."""
    tokens = []
    async with asyncio.timeout(timeout_s):
        async for outputs in stream:
            tokens += [output.token for output in outputs]
    return tokens
