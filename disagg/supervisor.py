"""Keeps the workers alive: starts them, watches their progress, restarts them with backoff, and gives up in the end.

    STARTING ──Ready──▶ READY ──exit, no progress──▶ DOWN ──backoff──▶ STARTING (epoch + 1)
                                                       └ too many restarts ─▶ GONE, while others can serve; else the server ends
    A worker that has ``next`` settings, for another role, comes back with them at once: that is no death.

A worker proves that it lives by its messages (Stats at least every HEARTBEAT_S between steps). One that is silent is looked at:
if it neither uses its CPU nor waits for one for ``hang_s`` (stopped, deadlocked) it is killed, and so is one that
computes for ``stuck_s`` without a word: alive is not the same as responsive. A message lost on the way to it shows at the next
one, or else in its Stats, which lack it for LOST_S. The observer is told everything in the order in which it happened, and after
``on_down`` nothing of that epoch.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
import structlog

from disagg.config import WorkersConfig
from disagg.errors import StartupError
from disagg.launcher import Launcher, WorkerHandle
from disagg.messages import HEARTBEAT_S, VERSION, Configure, Loading, Message, Ready, Shutdown, StartFailed, Stats

log = structlog.get_logger(__name__)

_SHUTDOWN_S = 3.0
_SILENT_S = 4 * HEARTBEAT_S
_LOOK_S = 0.25
_BACKOFF_FIRST_S = 0.2
_YIELD_S = (
    1.0  # instead, while others serve on: loading would slow down, by a quarter, the prefills of the streams that were lost
)
_BACKOFF_MOST_S = 10.0
LOST_S = 5.0
"""A message that a worker's Stats have lacked for so long is lost."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    GONE = "gone"


@dataclass(slots=True)
class Receipts:
    """How far a worker's Stats have counted what was sent to it."""

    _received: int = 0
    _lacking_since: float | None = None  # arrival of the first Stats with this count that lacked something
    _num_overdue: int = 0  # Stats that have arrived LOST_S and more after it

    def lack_s(self, received: int, num_sent: int, now: float) -> float | None:
        """Take the count that Stats bring. Seconds for which they have lacked a message that is lost; None = nothing is.

        One overdue Stats proves nothing, since a worker may have written them before it looked: in a step that took so long,
        or while we were not running. It looks before it writes the next.
        """
        if received == num_sent:
            self._lacking_since = None
            return None
        if self._lacking_since is None or received != self._received:
            self._received, self._lacking_since, self._num_overdue = received, now, 0
        lacking_s = now - self._lacking_since
        self._num_overdue += lacking_s >= LOST_S
        return lacking_s if self._num_overdue > 1 else None


@dataclass(eq=False, slots=True)
class WorkerInfo:
    """What the parent knows of one worker, across its incarnations."""

    id: str
    role: Role
    settings: Configure
    node: str = ""  # "" = the one that the parent runs on
    state: WorkerState = WorkerState.DOWN
    epoch: int = 0
    restarts: int = 0
    handle: WorkerHandle | None = None
    ready: Ready | None = None  # of this epoch
    pool_fd: int = -1
    stats: Stats | None = None
    heard_at: float = 0.0  # loop time of its last message
    next: Configure | None = None  # it gets nothing new, and is started again with these; None again when it is ready
    cause: str = ""  # why it last went down, or said that it could not start
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    receipts: Receipts = field(default_factory=Receipts)

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def is_open(self) -> bool:
        """It may be given something new."""
        return self.is_ready and self.next is None

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        if self.handle is not None:
            self.handle.send(message, fds)

    def kill(self, cause: str) -> None:
        """End this incarnation, on which there is no relying any more; ``on_down`` follows. Killing twice is safe."""
        if self.handle is not None and not self.cause:
            log.error("worker killed", worker=self.id, cause=cause)
            self.cause = cause
            self.handle.kill()


class Observer(Protocol):
    def on_ready(self, worker: WorkerInfo) -> None: ...
    def on_message(self, worker: WorkerInfo, message: Message) -> None: ...
    def on_down(self, worker: WorkerInfo) -> None: ...


class Supervisor:
    """``run`` keeps every worker alive until it is cancelled; ``aclose`` ends them.

    Those of ``settings`` are there from the start. Others come by ``keep`` and rest while the node that they are on is away.
    """

    def __init__(self, settings: list[Configure], config: WorkersConfig, launcher: Launcher, observer: Observer) -> None:
        self.workers = [WorkerInfo(s.worker, Role(s.role), s) for s in settings]
        self._config = config
        self._launcher = launcher
        self._observer = observer
        self._is_closing = False
        self._tasks: asyncio.TaskGroup | None = None
        self._keeping: dict[WorkerInfo, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Raises StartupError (in an ExceptionGroup) when a worker cannot be kept alive."""
        async with asyncio.TaskGroup() as self._tasks:
            self.keep(self.workers, self._launcher)
            await asyncio.Event().wait()  # others may come

    def keep(self, workers: Iterable[WorkerInfo], launcher: Launcher) -> None:
        """Keep these alive from now on, under epochs above those they have had."""
        assert self._tasks is not None, "the supervisor does not run"
        for worker in workers:
            if worker not in self.workers:
                self.workers.append(worker)
            self._keeping[worker] = self._tasks.create_task(self._keep_alive(worker, launcher), name=f"keep {worker.id}")

    def rest(self, workers: Iterable[WorkerInfo], cause: str) -> None:
        """These are down, all at once, and stay so: their node is away. ``cause`` says so."""
        lost = []
        for worker in workers:
            if (task := self._keeping.pop(worker, None)) is not None:
                task.cancel()
            worker.cause = cause
            if self._take_down(worker):
                lost.append(worker)
        for worker in lost:  # now that none of them can be chosen
            self._observer.on_down(worker)

    def forget(self, workers: Iterable[WorkerInfo]) -> None:
        """These, which rest, will not come back."""
        for worker in workers:
            if worker in self.workers:
                self.workers.remove(worker)

    async def end(self, worker: WorkerInfo, cause: str) -> None:
        """Ask a worker to end, and kill it when it has not after _SHUTDOWN_S."""
        worker.cause = cause
        worker.send(Shutdown())
        if not await _within(worker.exited, _SHUTDOWN_S) and worker.handle is not None:
            worker.handle.kill()

    async def aclose(self) -> None:
        """Ask every worker to end, and kill what has not ended after _SHUTDOWN_S."""
        self._is_closing = True
        running = [worker for worker in self.workers if worker.handle is not None]
        for worker in running:
            worker.send(Shutdown())
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                for worker in running:
                    await worker.exited.wait()
        except TimeoutError:
            for worker in running:
                if worker.handle is not None:
                    log.warning("worker killed", worker=worker.id, cause=f"no exit within {_SHUTDOWN_S} s of being asked")
                    worker.handle.kill()
            for worker in running:
                await worker.exited.wait()

    async def _keep_alive(self, worker: WorkerInfo, launcher: Launcher) -> None:
        loop = asyncio.get_running_loop()
        deaths: deque[float] = deque()
        while not self._is_closing:
            try:
                self._launch(worker, launcher)
            except StartupError as error:
                worker.cause = str(error)
            else:
                await self._watch(worker)
            if self._is_closing:
                return
            if worker.next is not None and worker.settings is not worker.next:
                worker.settings, worker.role = worker.next, Role(worker.next.role)
                continue
            now = loop.time()
            deaths.append(now)
            while deaths[0] < now - self._config.restart_window_s:
                deaths.popleft()
            if len(deaths) > self._config.max_restarts:
                if self._give_up(worker):
                    return
                raise StartupError(
                    f"worker {worker.id} went down {len(deaths)} times within {self._config.restart_window_s:g} s, "
                    f"last: {worker.cause}"
                )
            if worker.ready is None and worker.epoch == 1 and not worker.node:
                raise StartupError(f"worker {worker.id} could not start: {worker.cause}")
            worker.restarts += 1
            first_s = _YIELD_S if self._others_serve() else _BACKOFF_FIRST_S
            backoff_s = min(_BACKOFF_MOST_S, first_s * 2 ** (len(deaths) - 1))
            log.warning("worker restarts", worker=worker.id, cause=worker.cause, restarts=worker.restarts, backoff_s=backoff_s)
            await asyncio.sleep(backoff_s)

    def _give_up(self, worker: WorkerInfo) -> bool:
        """Leave a worker that cannot be kept alive down for good, if the others may serve without it.

        One of another node never ends this server: the node may join again, better.
        """
        worker.state, worker.next = WorkerState.GONE, None
        can_go_on = bool(worker.node) or self._others_serve()
        log.error("worker given up", worker=worker.id, cause=worker.cause, others_serve_on=can_go_on)
        return can_go_on

    def _others_serve(self) -> bool:
        return self._config.fallback and any(worker.is_ready for worker in self.workers)

    def _launch(self, worker: WorkerInfo, launcher: Launcher) -> None:
        worker.epoch += 1
        worker.ready, worker.stats, worker.cause = None, None, ""
        worker.receipts = Receipts()
        worker.heard_at = asyncio.get_running_loop().time()
        worker.exited.clear()
        epoch = worker.epoch

        def on_message(message: Message, fds: list[int]) -> None:
            assert worker.epoch == epoch, "a channel outlived its worker"
            self._received(worker, message, fds)

        def on_exit(cause: str) -> None:
            self._went_down(worker, cause)

        settings = msgspec.structs.replace(worker.settings, epoch=epoch)
        worker.handle = launcher.launch(settings, on_message, on_exit)
        worker.state = WorkerState.STARTING
        log.info("worker started", worker=worker.id, epoch=epoch, pid=worker.handle.pid)

    async def _watch(self, worker: WorkerInfo) -> None:
        """Until the worker is down. Kills it when it does not start, or makes no progress."""
        loop = asyncio.get_running_loop()
        cpu_s, active_at = 0.0, loop.time()
        while not await _within(worker.exited, _LOOK_S):
            now = loop.time()
            silent_s = now - worker.heard_at
            is_starting = worker.state is WorkerState.STARTING
            if silent_s < _SILENT_S or worker.handle is None:
                active_at = now
                continue
            used_s, is_runnable = worker.handle.activity()
            if is_runnable or used_s != cpu_s:
                cpu_s, active_at = used_s, now
            cause = ""
            if now - active_at >= self._config.hang_s and not is_starting:
                cause = f"hung: silent for {silent_s:.1f} s, no CPU used for {now - active_at:.1f} s"
            elif silent_s >= (self._config.start_s if is_starting else self._config.stuck_s):
                cause = f"no sign of progress for {silent_s:.1f} s"
            if cause:
                worker.kill(cause)
                await worker.exited.wait()

    def _received(self, worker: WorkerInfo, message: Message, fds: list[int]) -> None:
        worker.heard_at = asyncio.get_running_loop().time()
        match message:
            case Stats() if worker.handle is not None:
                worker.stats = message
                num_sent = worker.handle.num_sent
                if (lack_s := worker.receipts.lack_s(message.received, num_sent, worker.heard_at)) is not None:
                    worker.kill(f"{message.received} of {num_sent} messages reached it, the rest not in {lack_s:.1f} s")
            case Loading():
                log.info("loading", worker=worker.id, fraction=round(message.fraction, 3), what=message.what)
            case StartFailed():
                worker.cause = message.reason
            case Ready():
                worker.ready, worker.pool_fd = message, fds[0] if fds else -1  # a pool on another node stays there
                if message.version != VERSION:
                    worker.kill(f"it speaks version {message.version}, the parent {VERSION}")
                    return
                worker.state, worker.next = WorkerState.READY, None
                log.info(
                    "worker ready", worker=worker.id, role=worker.role, device=message.device, blocks=message.num_blocks,
                    threads=message.num_threads, load_s=round(message.load_s, 2),
                )  # fmt: skip
                self._observer.on_ready(worker)
                return
        self._observer.on_message(worker, message)

    def _went_down(self, worker: WorkerInfo, cause: str) -> None:
        worker.cause = worker.cause or cause  # it may have told, or have been killed for, a better one
        if self._take_down(worker):
            self._observer.on_down(worker)

    def _take_down(self, worker: WorkerInfo) -> bool:
        """Whether it was ready, so that the observer must be told."""
        was_ready, was_running = worker.is_ready, worker.handle is not None
        worker.state, worker.handle = WorkerState.DOWN, None
        if worker.pool_fd >= 0:
            os.close(worker.pool_fd)
            worker.pool_fd = -1
        if was_running and not self._is_closing:
            tell = log.error if worker.next is None else log.info
            tell("worker down", worker=worker.id, epoch=worker.epoch, cause=worker.cause)
        worker.exited.set()
        return was_ready


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` is set within that time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False
