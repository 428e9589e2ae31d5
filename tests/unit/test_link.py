"""disagg.link on loopback sockets: deadlines, the lease, backpressure, TLS, and that each end hears one cause, once."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import uvloop

from disagg import link as link_module
from disagg.errors import ConfigError, LinkError
from disagg.link import Link, tls_of_head, tls_of_node
from disagg.session import Beat, Bye, Data, LinkMessage, Side

SECRET = b"a secret of sixteen bytes"
DEADLINE_S = 20.0


class Owner:
    """Keeps what it is told of one link."""

    def __init__(self, side: Side, secret: bytes = SECRET) -> None:
        self.link = Link(side, secret, self)
        self.opened = asyncio.Event()
        self.closed: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
        self.heard: list[LinkMessage] = []
        self.changed = asyncio.Event()

    def on_open(self, link: Link) -> None:
        assert not self.heard
        self.opened.set()

    def on_message(self, link: Link, message: LinkMessage) -> None:
        assert not self.closed.done()
        self.heard.append(message)
        self.changed.set()

    def on_closed(self, link: Link, error: LinkError) -> None:
        self.closed.set_result(error)  # raises when it is told twice

    async def cause(self) -> str:
        return str(await self.closed)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class Network:
    """The network between the two ends: bytes pass in each direction while its event is set."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.to_head, self.to_node = asyncio.Event(), asyncio.Event()
        self.to_head.set()
        self.to_node.set()
        self._tasks: list[asyncio.Task[None]] = []

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head_reader, head_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._tasks += [
            asyncio.create_task(self._pump(reader, head_writer, self.to_head)),
            asyncio.create_task(self._pump(head_reader, writer, self.to_node)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_open: asyncio.Event) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                await is_open.wait()
                writer.write(data)
                await writer.drain()

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def ends(secret_of_node: bytes = SECRET) -> AsyncIterator[tuple[Owner, Owner, Network]]:
    """A head, a node and the path between them; nothing is left open at the end."""
    loop = asyncio.get_running_loop()
    head, node = Owner(Side.HEAD), Owner(Side.NODE, secret_of_node)
    listener = await loop.create_server(lambda: head.link, "127.0.0.1", 0)
    path = Network(listener.sockets[0].getsockname()[1])
    between = await asyncio.start_server(path.carry, "127.0.0.1", 0)
    try:
        await loop.create_connection(lambda: node.link, "127.0.0.1", between.sockets[0].getsockname()[1])
        yield head, node, path
    finally:
        head.link.close()
        node.link.close()
        listener.close()
        between.close()
        await path.aclose()


def run(scenario: Callable[[], Awaitable[None]], *, on_uvloop: bool = False) -> None:
    """Within the deadline, and no descriptor is open afterwards that was not before."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)

    (uvloop.run if on_uvloop else asyncio.run)(asyncio.sleep(0))  # what the loop keeps open from its first use on
    before = psutil.Process().num_fds()
    (uvloop.run if on_uvloop else asyncio.run)(bounded())
    assert psutil.Process().num_fds() == before


@pytest.mark.parametrize("on_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_messages_cross_in_order_in_both_directions(on_uvloop: bool) -> None:
    """Once open, a thousand messages each way arrive as they were sent, the last ones although the link is closed at once."""

    async def scenario() -> None:
        async with ends() as (head, node, _):
            await asyncio.gather(head.opened.wait(), node.opened.wait())
            said: list[LinkMessage] = [Data("decode-0", 1, bytes([index % 256]) * index) for index in range(1000)]
            for message in said:
                head.link.send(message)
                node.link.send(message)
            await head.until(lambda: len(head.heard) == len(said))
            node.link.send(Bye("the last word"))
            node.link.close()
            assert await head.cause() == "it closed the connection"
            assert head.heard == [*said, Bye("the last word")]
            assert not node.closed.done()  # who closes a link itself is not told

    run(scenario, on_uvloop=on_uvloop)


class Leaver(Owner):
    """Closes its link at the first word of the peer, and leaves the others unread."""

    def on_message(self, link: Link, message: LinkMessage) -> None:
        super().on_message(link, message)
        link.send(Bye("the last word"))
        link.close()


@pytest.mark.parametrize("on_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_the_last_word_arrives_although_the_peers_are_not_read_any_more(on_uvloop: bool) -> None:
    """Closing over unread bytes would reset the connection, and why a node has left would be lost with it."""

    async def scenario() -> None:
        head, node = Owner(Side.HEAD), Leaver(Side.NODE)
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: head.link, "127.0.0.1", 0) as listener:
            await loop.create_connection(lambda: node.link, *listener.sockets[0].getsockname())
            await head.opened.wait()
            for _ in range(64):
                head.link.send(Data("decode-0", 1, bytes(64 << 10)))
            assert await head.cause() == "it closed the connection"
            assert head.heard == [Bye("the last word")]
            await node.link.aclose()

    run(scenario, on_uvloop=on_uvloop)


def test_a_peer_with_another_token_is_turned_away() -> None:
    """Both ends are closed; at least the first to notice says why, and nothing was heard."""

    async def scenario() -> None:
        async with ends(b"another secret, as long") as (head, node, _):
            assert await head.cause() == await node.cause() == "it has another token"
            assert not head.opened.is_set()

    run(scenario)


def test_a_silent_peer_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection on which nothing is said holds its descriptor no longer than the handshake may take."""
    monkeypatch.setattr(link_module, "HANDSHAKE_S", 0.2)

    async def scenario() -> None:
        head = Owner(Side.HEAD)
        async with await asyncio.get_running_loop().create_server(lambda: head.link, "127.0.0.1", 0) as listener:
            with socket.create_connection(listener.sockets[0].getsockname()) as stranger:
                assert await head.cause() == "no handshake within 0.2 s"
                assert stranger.getpeername() == listener.sockets[0].getsockname()

    run(scenario)


@pytest.mark.parametrize("on_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_a_peer_that_is_gone_before_it_is_looked_at_is_told_as_gone(on_uvloop: bool) -> None:
    """A port scanner's reset comes before its connection is accepted: no address is known, and the end is told all the same."""

    async def scenario() -> None:
        head = Owner(Side.HEAD)
        async with await asyncio.get_running_loop().create_server(lambda: head.link, "127.0.0.1", 0) as listener:
            with socket.create_connection(listener.sockets[0].getsockname()) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert "during the handshake" in await head.cause()

    run(scenario, on_uvloop=on_uvloop)


def test_a_peer_that_proves_itself_but_offers_nothing_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of the handshake ends with the lease's beginning, not with the proof."""
    monkeypatch.setattr(link_module, "HANDSHAKE_S", 0.5)

    async def scenario() -> None:
        async with ends() as (head, node, _):
            await head.opened.wait()
            assert await head.cause() == "no handshake within 0.5 s"
            await node.closed

    run(scenario)


def test_garbage_closes_the_connection() -> None:
    """A stranger that speaks something else sees the end of the connection, and the owner a short reason."""

    async def scenario() -> None:
        head = Owner(Side.HEAD)
        async with await asyncio.get_running_loop().create_server(lambda: head.link, "127.0.0.1", 0) as listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100_000)
            assert "no message of this link" in await head.cause()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

    run(scenario)


def test_silence_ends_the_lease_on_both_sides() -> None:
    """While both beat the link holds; when the path swallows everything, each side finds out by itself."""

    async def scenario() -> None:
        async with ends() as (head, node, path):
            await asyncio.gather(head.opened.wait(), node.opened.wait())
            loop = asyncio.get_running_loop()
            began = loop.time()
            for end in (head, node):
                end.link.begin_lease(0.5, Beat)
            await head.until(lambda: head.heard.count(Beat()) >= 10)
            assert loop.time() - began >= 0.5
            assert not head.closed.done()
            assert not head.link.is_late
            path.to_head.clear()
            path.to_node.clear()
            causes = await asyncio.gather(head.cause(), node.cause())
            assert causes == ["no word for 0.5 s"] * 2

    run(scenario)


def test_a_loop_that_was_kept_from_running_does_not_blame_its_peer() -> None:
    """A pause of our own, longer than the lease, is no silence of the peer: what it said meanwhile is read first."""

    async def scenario() -> None:
        async with ends() as (head, node, _):
            await asyncio.gather(head.opened.wait(), node.opened.wait())
            head.link.begin_lease(0.2, Beat)
            node.link.begin_lease(0.2, Beat)
            pause = asyncio.get_running_loop().time() + 0.6
            while asyncio.get_running_loop().time() < pause:
                pass  # what a starved process does: nothing
            before = len(head.heard)
            await head.until(lambda: len(head.heard) >= before + 10)
            assert not head.closed.done()
            assert not node.closed.done()

    run(scenario)


def test_a_peer_that_does_not_read_loses_the_link() -> None:
    """Although it goes on beating: what is sent to it must not pile up here for longer than the lease."""

    async def scenario() -> None:
        async with ends() as (head, node, path):
            await asyncio.gather(head.opened.wait(), node.opened.wait())
            head.link.begin_lease(0.5, Beat)
            node.link.begin_lease(60.0, Beat)
            path.to_node.clear()
            for _ in range(64):
                head.link.send(Data("decode-0", 1, bytes(1 << 20)))
            assert await head.cause() == "it has not read for 0.5 s"
            assert head.heard.count(Beat()) > 0

    run(scenario)


def test_no_more_than_the_limit_waits_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded in bytes, and its overflow is told after the sender has finished what it was doing."""
    monkeypatch.setattr(link_module, "_MAX_UNSENT", 8 << 20)

    async def scenario() -> None:
        async with ends() as (head, node, path):
            await asyncio.gather(head.opened.wait(), node.opened.wait())
            path.to_node.clear()
            for _ in range(64):
                head.link.send(Data("decode-0", 1, bytes(1 << 20)))
            assert not head.closed.done()
            assert await head.cause() == "it does not read: 8 MiB wait for it"

    run(scenario)


@pytest.fixture
def certificate(tmp_path: Path) -> str:
    """A PEM file with a key and a self-signed certificate for 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    pem = tmp_path / "head.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subject = ["-subj", "/CN=head", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key"), "-out", str(pem)]
    subprocess.run([*command, *subject], check=True, capture_output=True, timeout=DEADLINE_S)
    pem.write_text(pem.read_text() + (tmp_path / "key").read_text())
    pem.chmod(0o600)
    return str(pem)


@pytest.mark.parametrize("on_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_a_link_works_inside_tls(certificate: str, on_uvloop: bool) -> None:
    """With a certificate on the head, and the same file as what the node trusts."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        head, node = Owner(Side.HEAD), Owner(Side.NODE)
        async with await loop.create_server(lambda: head.link, "127.0.0.1", 0, ssl=tls_of_head(certificate, "")) as listener:
            port = listener.sockets[0].getsockname()[1]
            transport, _ = await loop.create_connection(lambda: node.link, "127.0.0.1", port, ssl=tls_of_node(certificate))
            assert transport.get_extra_info("cipher") is not None
            await asyncio.gather(head.opened.wait(), node.opened.wait())
            for end in (head, node):
                end.link.begin_lease(5.0, Beat)
            node.link.send(Data("decode-0", 1, bytes(3 << 20)))
            await head.until(lambda: Data("decode-0", 1, bytes(3 << 20)) in head.heard)
            node.link.send(Bye("the last word"))
            await node.link.aclose()
            assert await head.cause() == "it closed the connection"
            assert head.heard[-1] == Bye("the last word")

    run(scenario, on_uvloop=on_uvloop)


def test_tls_on_one_side_only_ends_with_a_hint(certificate: str) -> None:
    """Either way round nobody waits for ever, and one of the two says what is wrong."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        head, node = Owner(Side.HEAD), Owner(Side.NODE)
        async with await loop.create_server(lambda: head.link, "127.0.0.1", 0, ssl=tls_of_head(certificate, "")) as listener:
            await loop.create_connection(lambda: node.link, *listener.sockets[0].getsockname())
            assert "is TLS on at one side only" in await node.cause()
        async with await loop.create_server(lambda: head.link, "127.0.0.1", 0) as listener:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await loop.create_connection(
                    lambda: Owner(Side.NODE).link, *listener.sockets[0].getsockname(), ssl=tls_of_node(certificate)
                )
            assert "is TLS on at one side only" in await head.cause()

    run(scenario)


@pytest.mark.parametrize("on_uvloop", [False, True], ids=["asyncio", "uvloop"])
def test_a_stranger_without_tls_is_forgotten(certificate: str, on_uvloop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it does: neither loop tells the end of a connection whose TLS handshake has failed."""
    monkeypatch.setattr(link_module, "HANDSHAKE_S", 0.2)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        accepted: asyncio.Queue[Owner] = asyncio.Queue()

        def accept() -> Link:
            accepted.put_nowait(owner := Owner(Side.HEAD))
            return owner.link

        tls = tls_of_head(certificate, "")
        async with await loop.create_server(accept, "127.0.0.1", 0, ssl=tls, ssl_handshake_timeout=0.2) as listener:
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
                _, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
                writer.write(said)
                writer.close()
                await writer.wait_closed()
                assert await (await accepted.get()).cause() == "no handshake within 0.2 s"

    run(scenario, on_uvloop=on_uvloop)


def test_unusable_certificates_are_named(tmp_path: Path) -> None:
    """A file that is missing or no PEM is the operator's error, told before anything listens."""
    (tmp_path / "nonsense").write_text("nonsense")
    (tmp_path / "nonsense").chmod(0o600)
    for name in ("none", "nonsense"):
        with pytest.raises(ConfigError, match=r"cluster\.tls_cert"):
            tls_of_head(str(tmp_path / name), "")
        with pytest.raises(ConfigError, match=r"cluster\.tls_ca"):
            tls_of_node(str(tmp_path / name))


def test_a_key_that_everybody_can_read_or_that_is_encrypted_is_refused(certificate: str, tmp_path: Path) -> None:
    """The first is no secret; for the second there is nobody at the terminal of a service whom OpenSSL could ask."""
    key, locked = tmp_path / "key", tmp_path / "locked"
    command = ["openssl", "pkcs8", "-topk8", "-in", str(key), "-out", str(locked), "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    locked.chmod(0o600)
    with pytest.raises(ConfigError, match=r"cluster\.tls_cert: cannot use"):
        tls_of_head(certificate, str(locked))
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"cluster\.tls_key: every user of this host can read"):
        tls_of_head(certificate, str(key))


def test_a_key_alone_is_not_taken_for_no_tls() -> None:
    """Who has named a key means to have TLS: a plain link would be the opposite, and nobody would notice."""
    with pytest.raises(ConfigError, match=r"cluster\.tls_key: there is no cluster\.tls_cert"):
        tls_of_head("", "key.pem")
