"""Starts a worker and tells how it ends: the seam between the supervisor's decisions and processes.

The death of a child is known exactly: its pidfd becomes readable when it has gone, and only then is ``on_exit`` called, once,
after every message it had sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from disagg.channel import Channel
from disagg.cores import Cores, Occupancy
from disagg.errors import StartupError
from disagg.messages import Configure, Message

_FIRST_EPOCH = 1

WORKER_ENVIRONMENT = {
    # glibc gives large buffers back to the kernel when they are freed, and the next step faults its pages in again: 2,000
    # faults in a decode step. A worker's buffers are the same size each step, so it keeps them.
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "67108864",
    # Huge pages for what is allocated (glibc 2.35, where the kernel allows it): 3 to 9% off a decode step here, and a process
    # whose memory has fewer pages is gone sooner when it is killed, which is when its streams can go on.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}

OnMessage = Callable[[Message, list[int]], None]
OnExit = Callable[[str], None]


class WorkerHandle(Protocol):
    """A running worker as its supervisor sees it."""

    pid: int

    @property
    def num_sent(self) -> int:
        """Messages that have left for the worker; a live one says in its Stats how many it has taken."""
        ...

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """Queue a message; ignored once the worker is gone."""
        ...

    def activity(self) -> tuple[float, bool]:
        """(CPU seconds used so far, whether it could use more at once): a worker that only waits for a core is not stuck."""
        ...

    def kill(self) -> None:
        """End it now, without its cooperation; ``on_exit`` follows. Killing twice is safe."""
        ...


class Launcher(Protocol):
    def launch(self, settings: Configure, on_message: OnMessage, on_exit: OnExit) -> WorkerHandle:
        """Start a worker with ``settings``. Both callbacks run on the event loop; ``on_exit`` gets the cause in words.

        Raises StartupError, with nothing left behind, when the host cannot give what a worker needs.
        """
        ...


class Started(NamedTuple):
    """A worker's process, not yet in anybody's care, and the parent's end of its socket."""

    process: subprocess.Popen[bytes]
    socket: socket.socket

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


class ProcessLauncher:
    """Workers as child processes of this one.

    ``start_ahead`` starts processes before it is known what for: while this process imports its libraries and reads the model,
    they import theirs, which is 1.3 s of the 1.7 s that a worker of the built-in model needs until it is ready. Each becomes the
    first incarnation of a worker; ``close`` ends those that never did.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self._ahead: list[Started] = []
        self._occupancy = Occupancy()

    def start_ahead(self, count: int) -> None:
        """Of what the host cannot give now nothing is said: ``launch`` will."""
        with contextlib.suppress(OSError):
            for _ in range(count):
                self._ahead.append(start_process(_FIRST_EPOCH, self._occupancy))

    def close(self) -> None:
        while self._ahead:
            self._ahead.pop().end()

    def launch(self, settings: Configure, on_message: OnMessage, on_exit: OnExit) -> ProcessHandle:
        try:
            return ProcessHandle(settings, self._take(settings.epoch), self._occupancy, on_message, on_exit)
        except OSError as error:  # no descriptor, process or memory to be had: perhaps only for now
            raise StartupError(f"cannot start a process: {error}") from error

    def _take(self, epoch: int) -> Started:
        return self._ahead.pop(0) if self._ahead and epoch == _FIRST_EPOCH else start_process(epoch, self._occupancy)


class ProcessHandle:
    def __init__(
        self, settings: Configure, started: Started, occupancy: Occupancy, on_message: OnMessage, on_exit: OnExit
    ) -> None:
        self._on_exit = on_exit
        cores = Cores(settings.cpus, settings.lent_cpus)
        self._process = WorkerProcess(started, cores, occupancy, self._exited)
        self.pid = self._process.pid
        self._channel = Channel(self._process.socket, settings.epoch, on_message, self._channel_closed)
        self._channel_error: Exception | None = None
        self.send(settings)

    @property
    def num_sent(self) -> int:
        return self._channel.num_sent

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        self._channel.send(message, fds)

    def kill(self) -> None:
        self._process.kill()

    def activity(self) -> tuple[float, bool]:
        return self._process.activity()

    def _channel_closed(self, error: Exception | None) -> None:
        """A worker that cannot be talked to is no use: make sure that it ends."""
        self._channel_error = error
        if error is not None:
            self.kill()

    def _exited(self, cause: str) -> None:
        try:
            self._channel.drain()
        finally:
            self._channel.close()
            self._on_exit(cause if self._channel_error is None else f"{cause} after {self._channel_error}")


class WorkerProcess:
    """A worker's process and the parent's end of its ``socket``, which whoever uses it must close.

    From now until it has gone or says otherwise it wants its own cores: it loads there, without help and without being slowed.
    """

    def __init__(self, started: Started, cores: Cores, occupancy: Occupancy, on_exit: OnExit) -> None:
        """Raises OSError, with nothing left behind, when the host cannot give what it needs."""
        self._cores, self._occupancy = cores, occupancy
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._process, self.socket = started
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            started.end()
            raise
        self._loop.add_reader(self._pidfd, self._exited)
        if cores.own:
            with contextlib.suppress(OSError):  # the worker says so itself
                os.sched_setaffinity(self.pid, cores.own)
        occupancy.mark(cores.own, True)

    def kill(self) -> None:
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def activity(self) -> tuple[float, bool]:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it is gone; ``on_exit`` is about to say so
            return 0.0, True
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R"

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        code = self._process.wait()
        self._occupancy.forget(self._cores)
        self._on_exit(f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}")


def start_process(epoch: int, occupancy: Occupancy) -> Started:
    """A process that waits for its settings. Raises OSError, with nothing left behind, when the host cannot give one."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            return Started(_start(theirs.fileno(), epoch, occupancy.fd), ours)
        except BaseException:
            ours.close()
            raise


def _start(fd: int, epoch: int, occupancy_fd: int) -> subprocess.Popen[bytes]:
    """``-P``: a worker must not import what lies in the directory that the server was started in."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "disagg.worker_process", str(fd), str(os.getpid()), str(epoch), str(occupancy_fd)],
        pass_fds=[fd, occupancy_fd],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,  # ours belongs to what the user asked for
        start_new_session=True,
        env={**_cleaned(os.environ), **WORKER_ENVIRONMENT},
    )


def _cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what would change a worker behind the configuration's back: UCX_TLS=tcp in a shell profile is a slow server.

    Nor is it a worker's to talk to the service manager.
    """
    return {name: value for name, value in environment.items() if not name.startswith(("UCX_", "NOTIFY_", "WATCHDOG_"))}
