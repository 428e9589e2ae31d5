"""disagg.nodes with the real supervisor and links, against a node that a test speaks for."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from disagg import __version__, nodes
from disagg.channel import FrameReader, FrameWriter
from disagg.config import ClusterConfig, Config, KVConfig, SchedulerConfig, WorkersConfig
from disagg.deployment import Deployment
from disagg.errors import LinkError, StartupError
from disagg.kv import KVLayout
from disagg.link import Link
from disagg.messages import VERSION, Configure, Connect, Message, Ready, StartFailed
from disagg.nodes import Nodes
from disagg.session import Activity, Beat, Bye, Data, Exited, Kill, Launch, LinkMessage, Offer, Refused, Side, Welcome
from disagg.supervisor import Supervisor, WorkerInfo

SECRET = b"a secret of sixteen bytes"
DEADLINE_S = 20.0
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, block_size=4, head_dim=8, dtype="uint8", model="null")


def settings(worker: str, **changes: Any) -> Configure:
    values: dict[str, Any] = {
        "version": VERSION, "run_id": "", "worker": worker, "epoch": 0, "role": worker.split("/")[1].split("-")[0],
        "model": "null", "device": "cpu", "dtype": "uint8", "block_size": 4, "kv_nbytes": 51 * LAYOUT.block_nbytes,
        "max_model_len": 100, "vocab_size": 259, "chunk_tokens": 16, "max_num_seqs": 16, "prefix_cache": True, "cpus": [3],
        "nice": 0, "poison": False, "log": Config().log,
    }  # fmt: skip
    return Configure(**{**values, **changes})


def offer(*workers: Configure, **changes: Any) -> Offer:
    given = list(workers) or [settings("b/decode-0"), settings("b/decode-1")]
    return msgspec.structs.replace(Offer("b", __version__, "null", LAYOUT, given), **changes)


class Head:
    """A server as far as nodes are concerned: a supervisor without workers of its own, who listens to what it is told."""

    def __init__(self, folder: Path, **workers: Any) -> None:
        token = folder / "token"
        token.write_bytes(SECRET)
        token.chmod(0o600)
        self.config = Config(
            cluster=ClusterConfig(listen="127.0.0.1:0", token_file=str(token), lease_s=60.0),
            workers=WorkersConfig(**workers),
            scheduler=SchedulerConfig(chunk_tokens=99),
            kv=KVConfig(verify=True),
        )
        deployment = Deployment(mode="disagg", device="cpu", max_model_len=200, vocab_size=259, layout=LAYOUT, workers=[])
        self.supervisor = Supervisor([], self.config.workers, self, self)
        self.nodes = Nodes(self.config, deployment, self.supervisor, model_name="null", run_id="run")
        self.down: list[tuple[str, list[str]]] = []  # which worker, and who was ready when it was told
        self.changed = asyncio.Event()

    def worker(self, worker_id: str) -> WorkerInfo:
        return next(worker for worker in self.supervisor.workers if worker.id == worker_id)

    def launch(self, *_: object) -> Any:
        raise AssertionError("the head has no worker of its own")

    def on_ready(self, worker: WorkerInfo) -> None:
        self.changed.set()

    def on_message(self, worker: WorkerInfo, message: Message) -> None:
        self.changed.set()

    def on_down(self, worker: WorkerInfo) -> None:
        self.down.append((worker.id, [other.id for other in self.supervisor.workers if other.is_ready]))
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class Speaker:
    """The node's side of a link, which answers nothing by itself."""

    def __init__(self) -> None:
        self.link = Link(Side.NODE, SECRET, self)
        self.opened = asyncio.Event()
        self._heard: asyncio.Queue[LinkMessage | LinkError] = asyncio.Queue()
        self.writers: dict[str, FrameWriter] = {}
        self.readers: dict[str, FrameReader] = {}

    def on_open(self, link: Link) -> None:
        self.opened.set()

    def on_message(self, link: Link, message: LinkMessage) -> None:
        if message != Beat():
            self._heard.put_nowait(message)

    def on_closed(self, link: Link, error: LinkError) -> None:
        self._heard.put_nowait(error)

    async def hear(self) -> LinkMessage | LinkError:
        return await self._heard.get()

    async def hear_launch(self) -> tuple[Launch, Configure]:
        """And the frame behind it, which must be the worker's Configure."""
        launch, data = await self.hear(), await self.hear()
        assert isinstance(launch, Launch)
        self.writers[launch.worker] = FrameWriter(launch.epoch)
        self.readers[launch.worker] = FrameReader(launch.epoch, has_descriptors=False)
        configure = self.read(data)
        assert isinstance(configure, Configure)
        return launch, configure

    def read(self, data: object) -> Message:
        assert isinstance(data, Data)
        self.readers[data.worker].feed(data.data, [])
        ((message, _),) = self.readers[data.worker].messages()
        return message

    def say(self, worker: str, epoch: int, message: Message) -> None:
        self.link.send(Data(worker, epoch, self.writers[worker].frame(message)))

    async def joined(self, head: Head, offered: Offer | None = None) -> list[Launch]:
        """Offer, and make every worker ready that is launched."""
        offered = offered or offer()
        self.link.send(offered)
        assert await self.hear() == Welcome("run", 60.0)
        launches = [(await self.hear_launch())[0] for _ in offered.workers]
        for launch in launches:
            self.say(launch.worker, launch.epoch, READY)
        await head.until(lambda: all(head.worker(launch.worker).is_ready for launch in launches))
        return launches


READY = Ready(VERSION, LAYOUT, 51, "cpu", 1, 0.1, b"address")


@contextlib.asynccontextmanager
async def speaker(head: Head) -> AsyncIterator[Speaker]:
    spoken = Speaker()
    assert head.nodes._server is not None
    address = head.nodes._server.sockets[0].getsockname()
    await asyncio.get_running_loop().create_connection(lambda: spoken.link, *address)
    try:
        await spoken.opened.wait()
        yield spoken
    finally:
        spoken.link.close()


def run(scenario: Callable[[Head], Awaitable[None]], folder: Path, **workers: Any) -> None:
    """With a head that listens; it must still be running at the end, and no task or descriptor may be left of it."""

    async def bounded() -> None:
        head = Head(folder, **workers)
        running = asyncio.create_task(head.supervisor.run())
        await asyncio.sleep(0)
        await head.nodes.listen()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(head)
            assert not running.done()
        finally:
            await head.nodes.aclose()
            running.cancel()
            await asyncio.wait([running])
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    before = psutil.Process().num_fds()
    asyncio.run(bounded())
    assert psutil.Process().num_fds() == before


# ------------------------------------------------------------------------------------------------ joining


def test_workers_of_a_node_become_workers_of_the_server(tmp_path: Path) -> None:
    """Launched with what the node planned and the server's common settings; what they say reaches the supervisor."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as node:
            node.link.send(offer(settings("b/decode-0")))
            assert await node.hear() == Welcome("run", 60.0)
            launch, configure = await node.hear_launch()
            assert launch == Launch("b/decode-0", 1)
            assert (configure.worker, configure.epoch, configure.cpus) == ("b/decode-0", 1, [3])
            assert (configure.run_id, configure.max_model_len, configure.chunk_tokens) == ("run", 200, 99)
            assert (configure.verify_kv, configure.has_far_peers) == (True, True)
            node.say("b/decode-0", 1, READY)
            await head.until(lambda: head.worker("b/decode-0").is_ready)
            worker = head.worker("b/decode-0")
            assert (worker.node, worker.pool_fd, worker.ready) == ("b", -1, READY)
            handle = worker.handle
            assert handle is not None
            node.link.send(Beat([Activity("b/decode-0", 1, 4321, 1.5, False)]))
            worker.send(Connect("b/decode-0", 1, LAYOUT, 51), [99])
            asked = await node.hear()
            assert isinstance(asked, Data)
            assert asked.pool_of == "b/decode-0"
            worker.send(Connect("b/decode-0", 1, LAYOUT, 51, b"address", num_fds=0))
            asked = await node.hear()
            assert isinstance(asked, Data)
            assert asked.pool_of == ""
            assert (handle.pid, handle.activity(), handle.num_sent) == (4321, (1.5, False), 3)

    run(scenario, tmp_path)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (offer(release="0.0.1"), f"the node runs disagg 0.0.1, the server {__version__}"),
        (offer(settings("b/decode-0", version=VERSION + 1)), "the node runs disagg"),
        (
            offer(layout=msgspec.structs.replace(LAYOUT, model="x")),
            "the server .here. has the model null.*model 'null' here, 'x'",
        ),
        (offer(layout=msgspec.structs.replace(LAYOUT, block_size=8)), "block_size 4 here, 8 there"),
        (offer(settings("b/decode-0", vocab_size=7)), "the server's vocabulary has 259 tokens, the node's 7"),
        (
            offer(settings("b/decode-0", kv_nbytes=50 * LAYOUT.block_nbytes)),
            "holds 196 tokens, the server's longest request has 200",
        ),
        (offer(settings("b/decode-0", kv_nbytes=0)), "holds 0 tokens"),
        (offer(name="../b"), "is no name for a node"),
        (offer(workers=[]), "it offers 0 workers"),
        (offer(settings("b/decode-0"), settings("b/decode-0")), "each with a name of its own"),
        (offer(settings("c/decode-0")), "below the node's"),
        (offer(settings("b/decode-0", role="boss")), "an unknown role"),
    ],
)
def test_what_does_not_fit_is_refused_for_good(tmp_path: Path, made: Offer, reason: str) -> None:
    """The reason names both sides or the numbers; nothing of the offer is kept."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as node:
            node.link.send(made)
            refused = await node.hear()
            assert isinstance(refused, Refused)
            assert refused.is_final
            assert re.search(reason, refused.reason)
            assert isinstance(await node.hear(), LinkError)
            assert head.supervisor.workers == []
            assert head.nodes.status() == []

    run(scenario, tmp_path)


def test_a_name_that_is_taken_may_be_asked_for_again(tmp_path: Path) -> None:
    """The one who has it may be gone without our knowing yet: the refusal is not final, and its workers go on."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as first, speaker(head) as second:
            await first.joined(head)
            second.link.send(offer())
            refused = await second.hear()
            assert isinstance(refused, Refused)
            assert not refused.is_final
            assert head.worker("b/decode-0").is_ready

    run(scenario, tmp_path)


def test_strangers_cannot_take_every_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest connection that has not joined makes room for the next; one that has joined stays."""
    monkeypatch.setattr(nodes, "_MAX_STRANGERS", 2)

    async def scenario(head: Head) -> None:
        async with speaker(head) as joined:
            await joined.joined(head)
            async with speaker(head) as oldest, speaker(head), speaker(head):
                assert isinstance(await oldest.hear(), LinkError)
            assert head.worker("b/decode-0").is_ready

    run(scenario, tmp_path)


def test_what_comes_out_of_turn_ends_the_link(tmp_path: Path) -> None:
    """Before the offer and after it, a message that a node has no right to send closes its link and nothing else."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as eager:
            eager.link.send(Exited("b/decode-0", 1, ""))
            assert isinstance(await eager.hear(), LinkError)
        async with speaker(head) as node:
            await node.joined(head)
            node.link.send(offer())
            assert isinstance(await node.hear(), LinkError)
            assert head.worker("b/decode-0").cause == "node b is not connected: Offer came out of turn"

    run(scenario, tmp_path)


def test_an_address_that_is_taken_is_a_startup_error(tmp_path: Path) -> None:
    """With the setting, the address and the reason."""

    async def scenario(head: Head) -> None:
        assert head.nodes._server is not None
        port = head.nodes._server.sockets[0].getsockname()[1]
        taken = msgspec.structs.replace(head.config.cluster, listen=f"127.0.0.1:{port}")
        head.nodes._config = msgspec.structs.replace(head.config, cluster=taken)
        with pytest.raises(StartupError, match=rf"cluster.listen: cannot listen on 127.0.0.1 port {port}: .*in use"):
            await head.nodes.listen()

    run(scenario, tmp_path)


# ------------------------------------------------------------------------------------------------ ends of workers


def test_an_incarnation_that_has_ended_is_not_heard_any_more(tmp_path: Path) -> None:
    """Its late words are counted, whatever they say; the next epoch is another channel, with frames numbered from 0."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as node:
            await node.joined(head, offer(settings("b/decode-0")))
            late = node.writers["b/decode-0"]
            node.link.send(Exited("b/decode-0", 1, "killed by SIGKILL"))
            launch, _ = await node.hear_launch()
            assert launch == Launch("b/decode-0", 2)
            assert head.worker("b/decode-0").restarts == 1
            node.link.send(Data("b/decode-0", 1, late.frame(READY)))
            node.link.send(Exited("b/decode-0", 1, "again"))
            node.say("b/decode-0", 2, READY)
            await head.until(lambda: head.worker("b/decode-0").is_ready)
            assert head.nodes.status()[0]["late_messages"] == 2
            assert head.worker("b/decode-0").epoch == 2

    run(scenario, tmp_path)


def test_a_worker_that_talks_garbage_is_killed_alone(tmp_path: Path) -> None:
    """Its own channel is broken, not the node's link: the other worker goes on, and the cause says what was wrong."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as node:
            await node.joined(head)
            node.link.send(Data("b/decode-0", 1, b"\xff" * 100))
            assert await node.hear() == Kill("b/decode-0", 1)
            node.link.send(Data("b/decode-0", 1, b"\xff" * 100))
            node.link.send(Exited("b/decode-0", 1, "killed by SIGKILL"))
            assert (await node.hear_launch())[0] == Launch("b/decode-0", 2)
            assert head.down == [("b/decode-0", ["b/decode-1"])]

    run(scenario, tmp_path)


def test_a_worker_that_cannot_be_kept_alive_there_does_not_end_the_server_here(tmp_path: Path) -> None:
    """It is given up after its restarts, with its cause; when its node joins again it is tried again."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as node:
            node.link.send(offer(settings("b/decode-0")))
            await node.hear()
            for epoch in (1, 2):
                assert (await node.hear_launch())[0] == Launch("b/decode-0", epoch)
                node.say("b/decode-0", epoch, StartFailed("no memory there"))
                node.link.send(Exited("b/decode-0", epoch, "exited with code 1"))
            worker = head.worker("b/decode-0")
            await asyncio.wait([head.supervisor._keeping[worker]])
            assert (worker.state, worker.cause) == ("gone", "no memory there")
            node.link.send(Bye("for a while"))
        async with speaker(head) as node:
            assert (await node.joined(head, offer(settings("b/decode-0")))) == [Launch("b/decode-0", 3)]

    run(scenario, tmp_path, max_restarts=1)


# ------------------------------------------------------------------------------------------------ ends of nodes


def test_a_lost_node_takes_all_its_workers_down_at_once(tmp_path: Path) -> None:
    """When the first of them is told to be down none is ready any more: no stream is moved from one dead worker to the next."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as node:
            await node.joined(head)
        await head.until(lambda: len(head.down) == 2)
        assert head.down == [("b/decode-0", []), ("b/decode-1", [])]
        worker = head.worker("b/decode-1")
        assert (worker.state, worker.handle, worker.restarts) == ("down", None, 0)
        assert worker.cause == "node b is not connected: it closed the connection"
        assert head.nodes.status()[0]["connected"] is False

    run(scenario, tmp_path)


def test_a_node_that_joins_again_brings_new_epochs(tmp_path: Path) -> None:
    """What it offers again goes on above its last epoch, without a restart; what it offers no more is no worker any more."""

    async def scenario(head: Head) -> None:
        for epoch in (1, 2):
            async with speaker(head) as node:
                await node.joined(head, None if epoch == 1 else offer(settings("b/decode-1")))
                assert head.worker("b/decode-1").epoch == epoch
                assert head.worker("b/decode-1").restarts == 0
                node.link.send(Bye("for a while"))
            await head.until(lambda: not head.worker("b/decode-1").is_ready)
            assert head.worker("b/decode-1").cause == "node b is not connected: for a while"
        assert [worker.id for worker in head.supervisor.workers] == ["b/decode-1"]
        async with speaker(head) as node:
            assert await node.joined(head) == [Launch("b/decode-0", 2), Launch("b/decode-1", 3)]
        assert head.nodes.status()[0]["joined"] == 3

    run(scenario, tmp_path)


def test_nodes_are_told_that_the_server_ends(tmp_path: Path) -> None:
    """A node need not wait for the end of its lease."""

    async def scenario(head: Head) -> None:
        async with speaker(head) as node:
            await node.joined(head)
            await head.nodes.aclose()
            assert await node.hear() == Bye("the server has stopped")

    run(scenario, tmp_path)
