"""A whole server without processes: the real router, supervisor, pairs, workers, schedulers and state tables, on one event loop.

Engines are null engines (the next token is a hash of the KV bytes read, so a wrong byte becomes a wrong token), pools are
poisoned, bytes move by the memory transport, and every message is encoded and decoded as on a real channel.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

from disagg.config import LogConfig, SchedulerConfig, WorkersConfig
from disagg.engine.null import NullEngine
from disagg.handoff.memory import MemoryNetwork, MemoryTransport
from disagg.handoff.transport import Completed
from disagg.kv import KVLayout
from disagg.launcher import OnExit, OnMessage
from disagg.messages import VERSION, Configure, Message, Ready, Shutdown, decode, encode
from disagg.pairs import Pairs
from disagg.request import Request, SamplingParams
from disagg.router import Router
from disagg.stream import RequestStream
from disagg.supervisor import Supervisor, WorkerInfo
from disagg.worker import Worker

BLOCK_SIZE = 4
DEADLINE_S = 10.0


def make_layout(block_size: int = BLOCK_SIZE) -> KVLayout:
    return KVLayout(num_layers=1, num_kv_heads=1, block_size=block_size, head_dim=8, dtype="uint8", model="null")


def worker_settings(worker: str, role: str, **changes: Any) -> Configure:
    defaults: dict[str, Any] = {
        "version": VERSION, "run_id": "sim", "worker": worker, "epoch": 0, "role": role, "model": "null", "device": "cpu",
        "dtype": "uint8", "block_size": BLOCK_SIZE, "kv_nbytes": 64 * make_layout().block_nbytes, "max_model_len": 200,
        "vocab_size": 259, "chunk_tokens": 16, "max_num_seqs": 16, "prefix_cache": True, "cpus": [], "nice": 0, "poison": True,
        "log": LogConfig(),
    }  # fmt: skip
    return Configure(**{**defaults, **changes})


class GatedTransport(MemoryTransport):
    """A transport whose completions can be held back: bytes may still be on their way as long as ``is_open`` is False."""

    is_open = True

    def completed(self) -> list[Completed]:
        return super().completed() if self.is_open else []


class InProcessWorker:
    """A worker on the loop: one callback for each message it receives and each step it takes."""

    pid = 0

    def __init__(self, settings: Configure, network: MemoryNetwork, on_message: OnMessage, on_exit: OnExit) -> None:
        self.settings = settings
        self._loop = asyncio.get_running_loop()
        self._network = network
        self._on_message = on_message
        self._on_exit = on_exit
        self._is_alive = True
        self._is_scheduled = False
        layout = make_layout(settings.block_size)
        num_blocks = settings.kv_nbytes // layout.block_nbytes
        pool = memoryview(bytearray(b"\xff" * (num_blocks * layout.block_nbytes)))
        network.export(settings.worker, settings.epoch, layout, pool)
        self.transport = GatedTransport(settings.worker, layout, pool, network)
        self.worker = Worker(settings, NullEngine(layout), pool, self.transport, self._tell, self._loop.time)
        self._tell(Ready(VERSION, layout, num_blocks, "cpu", 1, 0.0, num_fds=0))

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        self._loop.call_soon(self._receive, decode(encode(message)))

    def kill(self) -> None:
        if self._is_alive:
            self._is_alive = False
            self._network.withdraw(self.settings.worker, self.settings.epoch)
            self._loop.call_soon(self._on_exit, "killed by SIGKILL")

    def open_gate(self) -> None:
        """Let held completions through, and wake the worker as a real transport's descriptor would."""
        self.transport.is_open = True
        self._schedule()

    def _receive(self, message: Message) -> None:
        if isinstance(message, Shutdown):
            self.kill()
        elif self._is_alive:
            self.worker.receive(message, [-1])
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._is_scheduled = False
        if self._is_alive:
            if self.worker.step():
                self._schedule()
            elif (deadline := self.worker.decode.deadline) is not None:
                self._loop.call_at(deadline, self._schedule)
            self._tell(self.worker.stats())

    def _tell(self, message: Message) -> None:
        self._loop.call_soon(self._deliver, decode(encode(message)))

    def _deliver(self, message: Message) -> None:
        if self._is_alive:
            self._on_message(message, [-1])


class NoMetrics:
    """Keeps what the router observed, for tests to look at."""

    def __init__(self) -> None:
        self.requests: list[RequestStream] = []
        self.transfers: list[int] = []

    def observe_request(self, stream: RequestStream) -> None:
        self.requests.append(stream)

    def observe_transfer(self, transport: str, nbytes: int, seconds: float) -> None:
        self.transfers.append(nbytes)


class World:
    def __init__(self, settings: list[Configure], scheduler: SchedulerConfig) -> None:
        self.network = MemoryNetwork()
        self.handles: dict[str, InProcessWorker] = {}
        self.supervisor = Supervisor(settings, WorkersConfig(), launcher=self, observer=self)
        self.workers = self.supervisor.workers
        mint = itertools.count(1)
        self.metrics = NoMetrics()
        self.pairs = Pairs(self.workers, mint, on_verified=lambda: self.router.on_change())
        loop = asyncio.get_running_loop()
        self.router = Router(self.workers, self.pairs, scheduler, mint, loop.time, self.metrics)

    def launch(self, settings: Configure, on_message: OnMessage, on_exit: OnExit) -> InProcessWorker:
        self.handles[settings.worker] = InProcessWorker(settings, self.network, on_message, on_exit)
        return self.handles[settings.worker]

    def on_ready(self, worker: WorkerInfo) -> None:
        self.pairs.on_ready(worker)
        self.router.on_change()

    def on_message(self, worker: WorkerInfo, message: Message) -> None:
        if not self.pairs.take(message):
            self.router.on_message(worker, message)

    def on_down(self, worker: WorkerInfo) -> None:
        self.pairs.on_down(worker)
        self.router.on_down(worker)

    def engine_worker(self, name: str) -> Worker:
        return self.handles[name].worker

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Turn the loop until ``condition`` holds, or fail saying ``what`` was waited for."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0)  # look after every turn of the loop: states between two messages last one turn
            except asyncio.CancelledError:
                raise AssertionError(f"never happened: {what}; {self.router!r}, {list(self.handles.items())}") from None

    async def all_empty(self) -> None:
        """Queues, tables and blocks: nothing of any request is left anywhere."""
        await self.until(lambda: self.router.is_empty, "router empty")
        await self.until(lambda: all(h.worker.pool.is_idle for h in self.handles.values()), "all blocks free or cached")
        for handle in self.handles.values():
            assert repr(handle.worker.prefill) == "PrefillRole()"
            assert repr(handle.worker.decode) == "DecodeRole()"
            assert not handle.worker.scheduler.has_work


@asynccontextmanager
async def world(*roles: str, max_queue: int = 1000, reserve_s: float = 5.0, chunk_tokens: int = 16, **changes: Any):
    """A ready world with one worker for each of ``roles``; at its end everything is empty."""
    counts = dict.fromkeys(roles, 0)
    settings = []
    for role in roles:
        settings.append(worker_settings(f"{role}-{counts[role]}", role, chunk_tokens=chunk_tokens, **changes))
        counts[role] += 1
    built = World(settings, SchedulerConfig(max_queue=max_queue, reserve_s=reserve_s, chunk_tokens=chunk_tokens))
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


def request(prompt: str | list[int], max_tokens: int = 8, **params: Any) -> Request:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return Request(id=f"test-{ids[:3]}", prompt=ids, params=SamplingParams(max_tokens=max_tokens, **params))


async def collect(stream: RequestStream) -> list[int]:
    """All tokens of a stream, to its end."""
    tokens = []
    async with asyncio.timeout(DEADLINE_S):
        async for outputs in stream:
            tokens += [output.token for output in outputs]
    return tokens
