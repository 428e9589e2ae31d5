"""``disagg worker --join``: this host's workers, lent to a server on another host.

    plan ─▶ dial ─▶ Offer ─▶ Welcome ─▶ start, feed and end worker processes as the head says ─▶ the link ends
       ▲                                                                                             │
       └── backoff ◀── every worker is dead: nothing that the head has given up goes on here ◀───────┘

The head talks to the workers themselves; what passes through here is not read. A worker's pool stays in this node: its descriptor
is kept, and goes along when the head connects two workers of this node.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable

import msgspec
import structlog
import uvloop

from disagg import __version__
from disagg import log as logging_setup
from disagg.channel import Pipe
from disagg.config import Config, parse_address
from disagg.cores import Cores, Occupancy, host_cpus
from disagg.deployment import free_memory, plan
from disagg.errors import LinkError, StartupError
from disagg.launcher import WorkerProcess, start_process
from disagg.link import Link, tls_of_node
from disagg.messages import Configure
from disagg.model import find_model, read_model_spec
from disagg.session import Activity, Beat, Bye, Data, Exited, Kill, Launch, LinkMessage, Offer, Refused, Side, Welcome, read_token
from disagg.text.tokenizer import load_tokenizer

log = structlog.get_logger(__name__)

_DIAL_S = 5.0
_EXIT_S = 10.0  # for a process that has been killed
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MOST_S = 5.0


def run(config: Config, address: str, name: str) -> int:
    """Lend workers to the server at ``address`` until a signal. Returns the exit code.

    ``name``: what the head calls this node; "" = the host's name. Raises ConfigError or StartupError when this cannot work.
    """
    logging_setup.configure(config.log)
    uvloop.run(Member(config, address, name or socket.gethostname().partition(".")[0]).serve())
    return 0


class Relay:
    """A worker process of this node, and the bytes that pass between it and the head."""

    def __init__(
        self,
        settings: Configure,
        epoch: int,
        occupancy: Occupancy,
        send: Callable[[LinkMessage], None],
        on_gone: Callable[[Relay], None],
    ) -> None:
        """Raises OSError when no process can be started."""
        self.worker, self.epoch = settings.worker, epoch
        self.pool_fd = -1
        self.gone = asyncio.Event()
        self._send = send
        self._on_gone = on_gone
        cores = Cores(settings.cpus, settings.lent_cpus)
        self._process = WorkerProcess(start_process(epoch, occupancy), cores, occupancy, self._exited)
        self._pipe = Pipe(self._process.socket, self._received, self._closed)

    def write(self, data: bytes, fds: list[int]) -> None:
        self._pipe.send(data, fds)

    def kill(self) -> None:
        self._process.kill()

    def activity(self) -> Activity:
        return Activity(self.worker, self.epoch, self._process.pid, *self._process.activity())

    def _received(self, data: bytes, fds: list[int]) -> None:
        for fd in fds:  # there is one in a worker's life: its pool
            self._close_pool()
            self.pool_fd = fd
        self._send(Data(self.worker, self.epoch, data))

    def _closed(self, error: Exception | None) -> None:
        """A worker that cannot be talked to is no use."""
        if error is not None:
            self.kill()

    def _exited(self, cause: str) -> None:
        self._pipe.drain()
        self._pipe.close()
        self._close_pool()
        self._on_gone(self)
        self._send(Exited(self.worker, self.epoch, cause))
        self.gone.set()

    def _close_pool(self) -> None:
        if self.pool_fd >= 0:
            os.close(self.pool_fd)
            self.pool_fd = -1


class Member:
    """This node: its offer, its link, and the processes that the head has started here."""

    def __init__(self, config: Config, address: str, name: str) -> None:
        """Reads the model's description and plans the workers; starts nothing. Raises ConfigError or StartupError."""
        self._address = address
        self._host, self._port = parse_address(address)
        self._name = name
        self._token = read_token(config.cluster.token_file)
        self._tls = tls_of_node(config.cluster.tls_ca)
        files = find_model(config.model.path)
        spec = read_model_spec(files)
        deployment = plan(
            config,
            files,
            spec,
            vocab_size=min(spec.vocab_size, load_tokenizer(files).vocab_size),
            run_id="",
            cpus=host_cpus(),
            free_nbytes=free_memory(),
            is_part=True,
        )
        workers = [msgspec.structs.replace(worker, worker=f"{name}/{worker.worker}") for worker in deployment.workers]
        if not workers:
            raise StartupError("workers.prefill and workers.decode are 0: a node that joins brings at least one worker")
        self._offer = Offer(name, __version__, files.name, deployment.layout, workers)
        self._running: dict[str, Relay] = {}
        self._occupancy = Occupancy()
        self._link: Link | None = None
        self._ended: asyncio.Future[LinkError] | None = None
        self._has_joined = False  # since it last dialled
        self._is_stopping = False

    async def serve(self) -> None:
        """Until a signal. Raises StartupError when the head will never take this node."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number, task)
        try:
            await self._keep_joining()
        except asyncio.CancelledError:
            if not self._is_stopping:
                raise
        finally:
            if self._link is not None:
                if self._has_joined:
                    self._link.send(Bye("it was stopped"))
                await self._link.aclose()
            await self._end_workers()

    async def _keep_joining(self) -> None:
        backoff_s = _BACKOFF_FIRST_S
        while True:
            self._has_joined = False
            error = await self._lend()
            await self._end_workers()
            if error.is_final:
                raise StartupError(f"cannot join {self._address} as {self._name}: {error}")
            if self._has_joined:
                backoff_s = _BACKOFF_FIRST_S
            log.warning("not connected", head=self._address, reason=str(error), retry_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(_BACKOFF_MOST_S, 2 * backoff_s)

    async def _lend(self) -> LinkError:
        """Dial, offer, and do what the head says. Returns how it ended."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._link = link = Link(Side.NODE, self._token, self)
        try:
            async with asyncio.timeout(_DIAL_S):
                await loop.create_connection(lambda: link, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            self._end(LinkError(f"no answer within {_DIAL_S:g} s"))
        except ssl.SSLError as error:
            self._end(LinkError(f"no TLS connection (is TLS on at one side only?): {error}"))
        except OSError as error:
            self._end(LinkError(error.strerror or str(error)))
        ended = await self._ended  # bounded: by the deadline of the handshake, then by the lease
        link.close()
        return ended

    async def _end_workers(self) -> None:
        relays = list(self._running.values())
        for relay in relays:
            relay.kill()
        try:
            async with asyncio.timeout(_EXIT_S):
                for relay in relays:
                    await relay.gone.wait()
        except TimeoutError as error:
            raise StartupError(f"{', '.join(self._running)}: not gone {_EXIT_S:g} s after being killed") from error

    def _signalled(self, number: int, task: asyncio.Task[None]) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            log.info("leaving", signal=signal.Signals(number).name)
            task.cancel()

    # ---------------------------------------------------------------- what the link tells

    def on_open(self, link: Link) -> None:
        link.send(self._offer)

    def on_message(self, link: Link, message: LinkMessage) -> None:
        match message:
            case Welcome():
                self._welcomed(link, message)
            case Refused():
                link.close()
                self._end(LinkError(message.reason, is_final=message.is_final))
            case Launch():
                self._launch(link, message)
            case Data():
                self._deliver(message)
            case Kill():
                if relay := self._find(message.worker, message.epoch):
                    relay.kill()
            case Bye():
                link.close()
                self._end(LinkError(message.reason))
            case Beat():
                pass
            case _:
                raise LinkError(f"{type(message).__name__} came out of turn")

    def on_closed(self, link: Link, error: LinkError) -> None:
        self._end(error)

    def _end(self, error: LinkError) -> None:
        """The lease is over, and with it everything that runs under it: killed here and now, before anything else happens."""
        for relay in self._running.values():
            relay.kill()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    def _welcomed(self, link: Link, message: Welcome) -> None:
        self._has_joined = True
        link.begin_lease(message.lease_s, lambda: Beat([relay.activity() for relay in self._running.values()]))
        workers = [worker.worker for worker in self._offer.workers]
        log.info("joined", head=self._address, node=self._name, workers=workers, run=message.run_id, lease_s=message.lease_s)
        try:
            sys.stdout.write(f"Joined {self._address} as {self._name}: {', '.join(workers)}\n")
            sys.stdout.flush()
        except OSError as error:  # nobody reads it; the log has said the same
            log.debug("joined line not written", reason=str(error))

    def _launch(self, link: Link, message: Launch) -> None:
        cause = ""
        offered = next((worker for worker in self._offer.workers if worker.worker == message.worker), None)
        if offered is None:
            cause = "this node has not offered it"
        elif message.worker in self._running:
            cause = f"epoch {self._running[message.worker].epoch} of it is still running"
        else:
            try:
                self._running[message.worker] = Relay(offered, message.epoch, self._occupancy, link.send, self._gone)
            except OSError as error:  # no descriptor, process or memory to be had: perhaps only for now
                cause = f"cannot start a process: {error}"
        if cause:
            link.send(Exited(message.worker, message.epoch, cause))

    def _deliver(self, message: Data) -> None:
        relay = self._find(message.worker, message.epoch)
        if relay is None:  # it has ended, and the word of it is on its way
            return
        if not message.pool_of:
            relay.write(message.data, [])
            return
        peer = self._running.get(message.pool_of)
        pool_fd = peer.pool_fd if peer is not None else -1
        if pool_fd >= 0:
            relay.write(message.data, [pool_fd])
        else:  # it has just died: an empty file instead, which the worker refuses as too small a pool
            with open(os.devnull, "rb") as nothing:
                relay.write(message.data, [nothing.fileno()])

    def _gone(self, relay: Relay) -> None:
        del self._running[relay.worker]

    def _find(self, worker: str, epoch: int) -> Relay | None:
        relay = self._running.get(worker)
        return relay if relay is not None and relay.epoch == epoch else None
