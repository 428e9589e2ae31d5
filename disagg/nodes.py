"""Workers on other nodes, as the head sees them: who may join with what, and their processes at the other end of a link.

    node joins: Offer ─▶ fits? ─▶ Welcome ─▶ its workers are kept alive like local ones: Launch, Data ⇄ Data, Exited
    link closed, Bye, or no word for lease_s ─▶ all its workers are down at once and rest ─▶ it joins again ─▶ epoch + 1

A worker of node b has an id like ``b/decode-0`` and is launched through the same seam as a local one; its channel's frames travel
in Data. Epochs rise over all the times that a node joins, so whatever comes late from an earlier one is told apart and refused.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from disagg import __version__, grammar
from disagg.channel import FrameReader, FrameWriter
from disagg.config import Config, parse_address
from disagg.deployment import Deployment, longest_sequence
from disagg.errors import DisaggError, LinkError, StartupError
from disagg.launcher import OnExit, OnMessage
from disagg.link import HANDSHAKE_S, Link, tls_of_head
from disagg.messages import VERSION, Configure, Connect, Message
from disagg.session import (
    Activity,
    Beat,
    Bye,
    Data,
    Exited,
    Kill,
    Launch,
    LinkMessage,
    Offer,
    Refused,
    Side,
    Welcome,
    read_token,
)
from disagg.supervisor import Role, Supervisor, WorkerInfo

log = structlog.get_logger(__name__)

_MAX_STRANGERS = 64  # connections that have not joined yet; the oldest makes room for the next
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class NodeWorker:
    """A worker process of another node: the ``WorkerHandle`` at this end of the link."""

    def __init__(self, link: Link, settings: Configure, on_message: OnMessage, on_exit: OnExit) -> None:
        self.id, self.epoch = settings.worker, settings.epoch
        self.pid = 0  # over there, once a beat has told it
        self._num_queued = self._num_left = 0
        self._link = link
        self._on_message = on_message
        self._on_exit = on_exit
        self._writer = FrameWriter(self.epoch)
        self._reader = FrameReader(self.epoch, has_descriptors=False)
        self._activity = (0.0, True)
        self._error: DisaggError | None = None  # why it cannot be talked to any more
        link.send(Launch(self.id, self.epoch))
        self.send(settings)

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        """``fds`` stay here. The only descriptor that a worker is ever sent is a peer's pool, which the peer's node has."""
        pool_of = message.peer if isinstance(message, Connect) and message.num_fds else ""
        self._link.send(Data(self.id, self.epoch, self._writer.frame(message), pool_of))
        self._num_queued += 1

    @property
    def num_sent(self) -> int:
        """As of the last time that nothing waited in the link: what still does has not been lost."""
        if not self._link.has_unsent:
            self._num_left = self._num_queued
        return self._num_left

    def activity(self) -> tuple[float, bool]:
        """As of the node's last beat. While beats are missing nothing is known, and the lease decides."""
        return (self._activity[0], True) if self._link.is_late else self._activity

    def kill(self) -> None:
        self._link.send(Kill(self.id, self.epoch))

    def received(self, data: bytes) -> None:
        """Bytes of its channel. What cannot be understood ends this worker, as on a local channel."""
        if self._error is not None:
            return
        self._reader.feed(data, [])
        try:
            for message, fds in self._reader.messages():
                self._on_message(message, fds)
        except DisaggError as error:
            self._error = error
            self.kill()

    def beaten(self, activity: Activity) -> None:
        self.pid, self._activity = activity.pid, (activity.cpu_s, activity.is_runnable)

    def exited(self, cause: str) -> None:
        self._on_exit(cause if self._error is None else f"{cause} after {self._error}")


@dataclass(eq=False, slots=True)
class Node:
    """What the head knows of one node, over all the times that it joins. Launches its workers (the ``Launcher`` of them)."""

    name: str
    link: Link | None = None  # None: not connected
    workers: dict[str, WorkerInfo] = field(default_factory=dict)  # ever offered, so that their epochs go on rising
    running: dict[str, NodeWorker] = field(default_factory=dict)
    num_joined: int = 0
    num_late: int = 0  # words about incarnations that had ended

    def launch(self, settings: Configure, on_message: OnMessage, on_exit: OnExit) -> NodeWorker:
        if self.link is None:
            raise StartupError(f"node {self.name} is not connected")
        worker = self.running[settings.worker] = NodeWorker(self.link, settings, on_message, on_exit)
        return worker

    def take(self, message: Data | Exited | Beat) -> None:
        match message:
            case Beat():
                for activity in message.workers:
                    if worker := self._find(activity.worker, activity.epoch):
                        worker.beaten(activity)
            case Data() if worker := self._find(message.worker, message.epoch):
                worker.received(message.data)
            case Exited() if worker := self._find(message.worker, message.epoch):
                del self.running[message.worker]
                worker.exited(message.cause)
            case _:
                self.num_late += 1

    def _find(self, worker_id: str, epoch: int) -> NodeWorker | None:
        worker = self.running.get(worker_id)
        return worker if worker is not None and worker.epoch == epoch else None


class Nodes:
    """Listens for nodes, and keeps the supervisor's list of their workers true."""

    def __init__(self, config: Config, deployment: Deployment, supervisor: Supervisor, *, model_name: str, run_id: str) -> None:
        """Raises ConfigError when the token or the certificate cannot be used."""
        self._config = config
        self._deployment = deployment
        self._supervisor = supervisor
        self._model_name = model_name
        self._run_id = run_id
        self._token = read_token(config.cluster.token_file)
        self._tls = tls_of_head(config.cluster.tls_cert, config.cluster.tls_key)
        self._nodes: dict[str, Node] = {}
        self._joined: dict[Link, Node] = {}
        self._strangers: dict[Link, None] = {}  # in the order in which they came
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Raises StartupError when the address cannot be had."""
        host, port = parse_address(self._config.cluster.listen)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._accept, host, port, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S if self._tls else None
            )
        except OSError as error:
            raise StartupError(f"cluster.listen: cannot listen on {host} port {port}: {error.strerror or error}") from error
        host, port = self._server.sockets[0].getsockname()[:2]
        log.info("nodes may join", host=host, port=port, tls=self._tls is not None, lease_s=self._config.cluster.lease_s)

    def admit_no_more(self) -> None:
        """Those that have joined stay; nobody else can, not even who is about to."""
        if self._server is not None:
            self._server.close()
        for link in self._strangers:
            link.close()
        self._strangers.clear()

    async def aclose(self) -> None:
        """Part with every node; their workers must have ended."""
        self.admit_no_more()
        links = list(self._joined)
        self._joined.clear()
        for link in links:
            link.send(Bye("the server has stopped"))
            link.close()
        for link in links:
            await link.aclose()

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "name": node.name,
                "connected": node.link is not None,
                "address": node.link.peer if node.link is not None else None,
                "joined": node.num_joined,
                "late_messages": node.num_late,
            }
            for node in self._nodes.values()
        ]

    # ---------------------------------------------------------------- what the links tell

    def on_open(self, link: Link) -> None:
        """It knows the secret; what it offers comes next."""

    def on_message(self, link: Link, message: LinkMessage) -> None:
        node = self._joined.get(link)
        if node is None:
            self._offered(link, message)
            return
        match message:
            case Data() | Exited() | Beat():
                node.take(message)
            case Bye():
                link.close()
                self._lost(link, node, message.reason)
            case _:
                raise LinkError(f"{type(message).__name__} came out of turn")

    def on_closed(self, link: Link, error: LinkError) -> None:
        if (node := self._joined.get(link)) is not None:
            self._lost(link, node, str(error))
        elif link in self._strangers:
            del self._strangers[link]
            log.warning("peer turned away", peer=link.peer, reason=str(error))

    def _accept(self) -> Link:
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            oldest.close()
            self.on_closed(oldest, LinkError(f"{_MAX_STRANGERS} others want to join as well"))
        link = Link(Side.HEAD, self._token, self)
        self._strangers[link] = None
        return link

    def _offered(self, link: Link, message: LinkMessage) -> None:
        if not isinstance(message, Offer):
            raise LinkError(f"{type(message).__name__} came before an offer")
        del self._strangers[link]
        refusal = self._refusal(message)
        if refusal is None and (known := self._nodes.get(message.name)) is not None and known.link is not None:
            refusal = Refused(f"a node of the name {message.name} is connected from {known.link.peer}", is_final=False)
        if refusal is not None:
            log.warning("node refused", node=message.name, peer=link.peer, reason=refusal.reason)
            link.send(refusal)
            link.close()
            return
        self._join(link, message)

    def _refusal(self, offer: Offer) -> Refused | None:
        """Why these workers cannot serve together with the head's."""
        ours, deployment, reason = self._model_name, self._deployment, None
        ids = [worker.worker for worker in offer.workers]
        if offer.release != __version__ or any(worker.version != VERSION for worker in offer.workers):
            reason = f"the node runs disagg {offer.release}, the server {__version__}"
        elif not _NAME.fullmatch(offer.name):
            reason = f"{offer.name[:80]!r} is no name for a node: letters, digits, dots and dashes, at most 64"
        elif not ids or len(set(ids)) < len(ids) or not all(name.startswith(f"{offer.name}/") for name in ids):
            reason = f"it offers {len(ids)} workers; one or more are needed, each with a name of its own below the node's"
        elif not {worker.role for worker in offer.workers} <= set(Role):
            reason = "it offers a worker with an unknown role"
        elif difference := deployment.layout.difference(offer.layout):
            reason = f"the server (here) has the model {ours}, the node (there) {offer.model}: {difference}"
        elif sizes := {worker.vocab_size for worker in offer.workers} - {deployment.vocab_size}:
            reason = f"the server's vocabulary has {deployment.vocab_size} tokens, the node's {sizes.pop()}"
        else:
            shortest = min(longest_sequence(worker.kv_nbytes, offer.layout) for worker in offer.workers)
            if shortest < (needed := deployment.max_model_len):
                reason = (
                    f"a worker of the node holds {max(shortest, 0)} tokens, the server's longest request has {needed}: "
                    f"give the node more kv.memory, or the server a smaller model.max_model_len"
                )
        return Refused(reason, is_final=True) if reason is not None else None

    def _join(self, link: Link, offer: Offer) -> None:
        node = self._nodes.setdefault(offer.name, Node(offer.name))
        node.link = link
        node.num_joined += 1
        self._joined[link] = node
        lease_s = self._config.cluster.lease_s
        link.send(Welcome(self._run_id, lease_s))
        link.begin_lease(lease_s, Beat)
        offered = {settings.worker: self._completed(settings) for settings in offer.workers}
        log.info("node joined", node=node.name, peer=link.peer, workers=list(offered))
        for worker_id, settings in offered.items():
            worker = node.workers.setdefault(worker_id, WorkerInfo(worker_id, Role(settings.role), settings, node.name))
            worker.settings = settings
        self._supervisor.forget([worker for worker in node.workers.values() if worker.id not in offered])
        self._supervisor.keep([node.workers[worker_id] for worker_id in offered], node)

    def _completed(self, offered: Configure) -> Configure:
        """What the node has planned (model, memory, cores, devices) with what all workers of this server have in common."""
        scheduler, kv, handoff = self._config.scheduler, self._config.kv, self._config.handoff
        return msgspec.structs.replace(
            offered,
            run_id=self._run_id,
            max_model_len=self._deployment.max_model_len,
            chunk_tokens=scheduler.chunk_tokens,
            pace_s=scheduler.pace_ms / 1e3,
            max_num_seqs=scheduler.max_num_seqs,
            prefix_cache=kv.prefix_cache,
            poison=kv.poison,
            verify_kv=kv.verify,
            has_far_peers=True,
            has_grammars=grammar.is_installed(),
            handoff=msgspec.structs.replace(offered.handoff, stall_s=handoff.stall_s),
        )

    def _lost(self, link: Link, node: Node, cause: str) -> None:
        """Nothing of this lease counts any more: on its side the node kills its workers, on this side they are down."""
        del self._joined[link]
        node.link = None
        node.running.clear()
        log.error("node lost", node=node.name, peer=link.peer, cause=cause)
        self._supervisor.rest(list(node.workers.values()), f"node {node.name} is not connected: {cause}")
