"""A worker as a process: ``python -m disagg.worker_process FD PARENT_PID EPOCH CORES_FD``. The supervisor starts it, nobody else.

It dies with its parent in every case: the kernel kills it (PDEATHSIG) even if its main thread is stuck in a kernel call, and
the control socket's end of file ends it otherwise. It has a session of its own, so terminal signals reach the parent only.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from disagg import grammar
from disagg import log as logging_setup
from disagg.channel import ChannelClosed, Connection
from disagg.cores import Cores, Occupancy, Turns
from disagg.errors import DisaggError, ProtocolError, StartupError
from disagg.grammar import Compiler
from disagg.handoff.host_pool import Backing, create_pool
from disagg.handoff.shm import ShmTransport
from disagg.handoff.transport import Transport
from disagg.handoff.transports import Transports
from disagg.kv import KVLayout
from disagg.messages import HEARTBEAT_S, VERSION, Configure, Loading, Message, Ready, Shutdown, StartFailed
from disagg.model import ModelFiles, find_model, forget_files
from disagg.text.grammar_vocabulary import grammar_vocabulary
from disagg.text.tokenizer import load_tokenizer
from disagg.worker import Worker

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG = 1
_CONFIGURE_TIMEOUT_S = 30.0
_LOADING_INTERVAL_S = 0.5


def main() -> int:
    _die_with(parent_pid=int(sys.argv[2]))
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    occupancy = Occupancy(int(sys.argv[4]))
    connection = Connection(control, epoch=int(sys.argv[3]))
    try:
        settings, early = _receive_settings(connection)
        if Shutdown() in early:
            return 0
        logging_setup.configure(settings.log, worker=settings.worker, epoch=settings.epoch)
        try:
            _take_cpus(settings)
            _serve(connection, settings, occupancy)
        except DisaggError as error:
            log.error("worker cannot serve", reason=str(error))
            connection.send(StartFailed(str(error)))
            return 1
    except ChannelClosed:
        return 0  # the parent is gone, or has closed the channel to end this worker
    return 0


def _serve(connection: Connection, settings: Configure, occupancy: Occupancy) -> None:
    """Load, say Ready, then receive and step until Shutdown. Raises ChannelClosed at the parent's end, DisaggError for ours."""
    started = time.monotonic()
    reporter = _LoadingReporter(connection)
    from disagg.engine.load import load_engine  # imports torch, unless there was time for that before
    from disagg.kernels.crew import borrow

    borrow(settings.lent_cpus, *occupancy.addresses)
    files = find_model(settings.model)
    compiler = _compiler(files, settings.vocab_size) if settings.has_grammars else None
    engine = load_engine(
        files,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        quantize=settings.quantize,
        activations=settings.activations,
        block_size=settings.block_size,
        vocab_size=settings.vocab_size,
        device=settings.device,
        num_threads=_num_threads(),
        progress=reporter.report,
        compiler=compiler,
    )
    forget_files()
    layout = engine.layout
    num_blocks = settings.kv_nbytes // layout.block_nbytes
    pool_fd, pool = create_pool(num_blocks * layout.block_nbytes, f"disagg-{settings.run_id}-{settings.worker}")
    if settings.poison:
        _poison(pool)
    backing = Backing(pool)
    transports = Transports(ShmTransport(settings.worker, layout, pool), _far_transport(settings, layout, pool))
    worker = Worker(settings, engine, pool, transports, connection.send, time.monotonic)
    load_s = time.monotonic() - started
    connection.send(Ready(VERSION, layout, num_blocks, settings.device, _num_threads(), load_s, transports.address), [pool_fd])
    os.close(pool_fd)  # the parent hands it to the peers; this process has its mapping
    pace_s = settings.pace_s if settings.role == "decode" else 0.0
    turns = Turns(occupancy, Cores(settings.cpus, settings.lent_cpus), pace_s)
    try:
        _run(connection, worker, transports, lambda: backing.reach(worker.pool.num_touched * layout.block_nbytes), turns)
    finally:
        backing.close()
        transports.close()


def _compiler(files: ModelFiles, vocab_size: int) -> Compiler | None:
    """For requests with a grammar; None where the vocabulary cannot be read, and they are refused. Raises StartupError.

    It takes 0.4 s for 50,000 tokens, most of it with the interpreter's lock: after the start streams would pause for it.
    """
    if not grammar.is_installed():
        raise StartupError(f"the server promises grammars, which need llguidance, and this host lacks it: {grammar.INSTALL}")
    try:
        return Compiler(grammar_vocabulary(load_tokenizer(files), vocab_size))
    except Exception as error:  # noqa: BLE001 - whatever it is, other requests can be served
        log.warning("requests with a grammar will be refused: the vocabulary cannot be read", reason=str(error))
        return None


def _far_transport(settings: Configure, layout: KVLayout, pool: memoryview) -> Transport | None:
    """For peers in other nodes, where there can be any."""
    config = settings.handoff
    if not settings.has_far_peers:
        return None
    from disagg.handoff.ucx import UcxTransport

    return UcxTransport(settings.worker, layout, pool, tls=config.ucx_tls, devices=config.ucx_devices, stall_s=config.stall_s)


def _run(connection: Connection, worker: Worker, transports: Transports, back_pool: Callable[[], None], turns: Turns) -> None:
    """The worker's life: look for messages between steps, without waiting while there is something to compute and it is its turn.

    ``back_pool`` is called after every step.
    """
    is_busy, told_at, next_at = False, 0.0, 0.0
    while True:
        now = time.monotonic()
        if is_busy:
            timeout_s = max(0.0, next_at - now)
        else:
            deadlines = [told_at + HEARTBEAT_S, worker.decode.deadline or float("inf")]
            timeout_s = max(0.0, min(deadlines) - now)
        if timeout_s > 0:
            turns.end()
        for message, fds in connection.receive(timeout_s, transports.fileno()):
            if isinstance(message, Shutdown):
                return
            worker.receive(message, fds)
        now = time.monotonic()
        if is_busy and now < next_at:
            worker.poll()
            continue
        turns.begin()  # if there is something to compute: the step tells
        was_busy, is_busy = is_busy, worker.step()
        next_at = turns.next_at(now)
        back_pool()
        now = time.monotonic()
        if now - told_at >= HEARTBEAT_S or (was_busy and not is_busy):
            connection.send(msgspec.structs.replace(worker.stats(), received=connection.num_received))
            told_at = now


def _receive_settings(connection: Connection) -> tuple[Configure, list[Message]]:
    """The first message, and those that came right behind it: before Ready there is nothing to say but Shutdown.

    While there is none, the engine's libraries are imported: the parent starts its first workers before it knows their settings.
    """
    received = [message for message, _ in connection.receive(0.0)]
    if not received:
        importlib.import_module("disagg.engine.load")
        received = [message for message, _ in connection.receive(_CONFIGURE_TIMEOUT_S)]
    settings = received[0] if received else None
    if not isinstance(settings, Configure):
        raise ProtocolError(f"expected Configure first, got {type(settings).__name__}")
    if settings.version != VERSION:
        raise ProtocolError(f"the parent speaks version {settings.version}, this worker {VERSION}")
    return settings, received[1:]


def _die_with(parent_pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(1)


def _take_cpus(settings: Configure) -> None:
    """Confine this process to its cores, also the threads of libraries that it has imported already. Raises StartupError."""
    try:
        for thread in map(int, os.listdir("/proc/self/task")):
            if settings.cpus:
                os.sched_setaffinity(thread, settings.cpus)
            if settings.nice:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + settings.nice)
        if settings.nice:
            _yield_as_group(settings.nice)
    except OSError as error:
        raise StartupError(f"cannot run on the cores {settings.cpus}: {error}; --no-pin-cpus leaves them alone") from error
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(_num_threads())


def _yield_as_group(nice: int) -> None:
    """Where sessions are scheduled as groups, a thread's own niceness counts only within its session."""
    try:
        Path("/proc/self/autogroup").write_text(str(nice))
    except OSError as error:  # no such groups here, or the kernel's limit on how often an ordinary user may set one
        log.info("scheduling group keeps its weight", reason=str(error))


def _num_threads() -> int:
    return len(os.sched_getaffinity(0))


def _poison(pool: memoryview) -> None:
    """0xFF everywhere: NaN in every floating type, so that an unwritten slot cannot pass for a number."""
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pool)), 0xFF, len(pool))


class _LoadingReporter:
    """Passes loading progress on, at most every _LOADING_INTERVAL_S: a fast loader floods neither the channel nor the log."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._told_at = 0.0

    def report(self, fraction: float, what: str) -> None:
        now = time.monotonic()
        if fraction >= 1.0 or now - self._told_at >= _LOADING_INTERVAL_S:
            self._told_at = now
            self._connection.send(Loading(fraction, what))


if __name__ == "__main__":
    sys.exit(main())
