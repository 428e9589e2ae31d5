"""Workers on another host: what is served over the wire, what a broken wire and a dead node cost, and who may not join."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.harness import DEADLINE_S, Node, Server, Stream, alive, server, terminate, until
from tests.process.network import Network, network

pytest.importorskip("ucxx")

LEASE_S = 2.0
REJOIN_S = 60.0
NUM_TOKENS = 1500
UCX_BYTES = 'disagg_transfer_bytes_total{transport="ucx"}'
NULL = ("--model", "null", "--kv-memory", "64MiB", "--max-restarts", "100")
OVER_TCP = ("--ucx-tls", "tcp", "--stall-s", "5")  # on one machine UCX would find shared memory, past the wire
PROMPTS = [f"stream {index} between two hosts" for index in range(8)]


@pytest.fixture
def wire() -> Iterator[Network]:
    with network() as made:
        yield made


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("the secret of these two hosts")
    path.chmod(stat.S_IRUSR)
    return path


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What one server on one host answers to PROMPTS."""
    with server(*NULL, "--mode", "colocated") as colocated:
        return [colocated.complete(prompt, NUM_TOKENS) for prompt in PROMPTS]


@contextlib.contextmanager
def node_of(wire: Network, token: Path, *arguments: str) -> Iterator[Node]:
    """One that wants to join the head as b."""
    device = ("--ucx-devices", wire.node.device)
    lent = Node(*NULL, *OVER_TCP, *device, "--token-file", str(token), *join(wire, "b"), *arguments, host=wire.node)
    try:
        yield lent
    finally:
        lent.close()


@contextlib.contextmanager
def cluster(
    wire: Network, token: Path, *, head: tuple[str, ...] = ("--decode", "0"), node: tuple[str, ...] = ("--prefill", "0")
) -> Iterator[tuple[Server, Node]]:
    """A server on one host and a node on the other, joined; unless told otherwise with prefill here and decode there."""
    listen = ("--cluster-listen", address(wire), "--cluster-token-file", str(token), "--cluster-lease-s", str(LEASE_S))
    device = ("--ucx-devices", wire.head.device)
    with node_of(wire, token, *node) as lent, server(*NULL, *OVER_TCP, *device, *listen, *head, host=wire.head) as running:
        lent.wait_until_joined()
        yield running, lent


def address(wire: Network) -> str:
    return f"{wire.head.address}:7000"


def join(wire: Network, name: str) -> tuple[str, ...]:
    return ("--join", address(wire), "--name", name)


def count(running: Server, series: str) -> float:
    metrics = running.request("GET", "/metrics")[1]
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(series))


def open_streams(running: Server, at_token: int) -> list[Stream]:
    """All prompts, each after that many events."""
    streams = [running.stream(prompt, NUM_TOKENS) for prompt in PROMPTS]
    for stream in streams:
        assert all(stream.next_event() for _ in range(at_token))
    return streams


def texts(streams: list[Stream]) -> list[str]:
    """What each has said when it has come to its proper end."""
    try:
        with concurrent.futures.ThreadPoolExecutor(len(streams)) as pool:
            assert [events[-1] for events in pool.map(Stream.read_to_end, streams)] == ["[DONE]"] * len(streams)
        return [stream.text() for stream in streams]
    finally:
        for stream in streams:
            stream.close()


def test_prefill_here_and_decode_there_equal_one_server(wire: Network, token: Path, expected: list[str]) -> None:
    """Bytes move over UCX, nothing is computed twice, each stream has the text of one host alone, and all blocks return."""
    with cluster(wire, token) as (running, lent):
        (pair,) = running.status()["pairs"]
        assert (pair["prefill"], pair["decode"], pair["transport"]) == ("prefill-0", "b/decode-0", "ucx")
        before = wire.num_carried
        assert texts(open_streams(running, 0)) == expected
        assert count(running, UCX_BYTES) > 0
        assert wire.num_carried > before
        assert all(worker["decode_prefill_tokens"] == 0 for worker in running.status()["workers"])
        running.wait_until_empty(DEADLINE_S)
        code, log = lent.end(signal.SIGTERM)
        assert code == 0, log
        until(lambda: "it was stopped" in running.worker("b/decode-0")["cause"], "the head knows why")
        assert terminate(running) == 0


@pytest.mark.slow
def test_both_roles_there_share_memory_there(wire: Network, token: Path, expected: list[str]) -> None:
    """A pair within one node needs no network for its blocks, wherever the node is; and the head needs no worker of its own."""
    with cluster(wire, token, head=("--prefill", "0", "--decode", "0"), node=()) as (running, _):
        (pair,) = running.status()["pairs"]
        assert (pair["prefill"], pair["decode"], pair["transport"]) == ("b/prefill-0", "b/decode-0", "shm")
        assert texts(open_streams(running, 0)) == expected
        os.kill(running.worker("b/decode-0")["pid"], signal.SIGKILL)
        until(lambda: running.worker("b/decode-0")["restarts"] == 1, "restarted there")
        running.wait_until_ready()
        assert texts(open_streams(running, 0)) == expected


def cut(wire: Network, lent: Node) -> None:
    wire.is_cut = True


def mend(wire: Network, lent: Node) -> None:
    wire.is_cut = False


def freeze(wire: Network, lent: Node) -> None:
    lent.process.send_signal(signal.SIGSTOP)


def thaw(wire: Network, lent: Node) -> None:
    lent.process.send_signal(signal.SIGCONT)


def check_that_the_head_serves_on(running: Server, cause: str) -> None:
    """Without the node, and that it says so."""
    gone = running.worker("b/decode-0")
    assert (gone["state"], gone["cause"]) == ("down", f"node b is not connected: {cause}")
    assert running.status()["degraded"]
    assert running.request("GET", "/readyz")[0] == 200
    assert count(running, "disagg_failovers_total") > 0
    assert running.worker("prefill-0")["restarts"] == 0
    until(lambda: running.worker("prefill-0")["blocks"]["reserved"] == 0, "nothing is held for the node")


@pytest.mark.parametrize(("harm", "heal"), [(cut, mend), pytest.param(freeze, thaw, marks=pytest.mark.slow)])
def test_streams_outlive_a_lost_node_and_it_comes_back(
    wire: Network,
    token: Path,
    expected: list[str],
    harm: Callable[[Network, Node], None],
    heal: Callable[[Network, Node], None],
) -> None:
    """Cut off or frozen in the middle of eight streams: they go on here, with the undisturbed text. Then the node joins again.

    Its workers of the lost lease are dead by then; new ones, of the next epoch, serve over UCX, and no restart is counted.
    """
    with cluster(wire, token) as (running, lent):
        processes = lent.workers()
        assert len(processes) == 1
        streams = open_streams(running, 10)
        harm(wire, lent)
        assert texts(streams) == expected
        check_that_the_head_serves_on(running, f"no word for {LEASE_S:.1f} s")
        heal(wire, lent)
        until(lambda: not running.status()["degraded"], "the pair serves again", REJOIN_S)
        assert not alive(processes)
        back = running.worker("b/decode-0")
        assert (back["epoch"], back["restarts"], back["node"]) == (2, 0, "b")
        before = count(running, UCX_BYTES)
        assert texts(open_streams(running, 0)) == expected
        assert count(running, UCX_BYTES) > before
        running.wait_until_empty(DEADLINE_S)


@pytest.mark.slow
def test_streams_outlive_a_killed_node_and_another_takes_its_place(wire: Network, token: Path, expected: list[str]) -> None:
    """kill -9 in the middle of eight streams, noticed at once. The next of that name brings two workers, and epochs rise."""
    with cluster(wire, token) as (running, lent):
        streams = open_streams(running, 10)
        processes = lent.workers()
        lent.process.kill()
        until(lambda: running.worker("b/decode-0")["state"] == "down", "noticed before the lease is over", LEASE_S)
        until(lambda: not alive(processes), "its workers are dead with it")
        assert texts(streams) == expected
        check_that_the_head_serves_on(running, "it closed the connection")
        with node_of(wire, token, "--prefill", "0", "--decode", "2"):
            until(
                lambda: [pair["verified"] for pair in running.status()["pairs"]] == [True] * 2, "two pairs are proven", REJOIN_S
            )
            assert running.worker("b/decode-0")["epoch"] == 2
            assert running.worker("b/decode-1")["epoch"] == 1
            assert texts(open_streams(running, 0)) == expected


def test_a_slow_and_lossy_wire_costs_time_only(wire: Network, token: Path, expected: list[str]) -> None:
    """With 50 ms each way and one packet in a hundred lost, the texts are right, and no worker and no node is given up."""
    with cluster(wire, token) as (running, _):
        wire.delay_s, wire.loss = 0.05, 0.01
        assert texts(open_streams(running, 0)) == expected
        assert wire.num_lost > 0
        assert running.status()["nodes"][0]["joined"] == 1
        assert all(worker["restarts"] == 0 for worker in running.status()["workers"])


def test_who_may_not_join_is_told_why(wire: Network, token: Path, tmp_path: Path) -> None:
    """Another token, another model's layout, too little memory: one line, exit code 1, and the server serves on."""
    other = tmp_path / "other"
    other.write_text("the secret of two other hosts")
    other.chmod(stat.S_IRUSR)
    with cluster(wire, token) as (running, _):
        for arguments, reason in (
            (("--token-file", str(other)), "it has another token"),
            (("--token-file", str(token), "--block-size", "32"), "block_size 16 here, 32 there"),
            (("--token-file", str(token), "--kv-memory", "1KiB"), "the server's longest request has"),
        ):
            refused = Node(*NULL, *arguments, "--prefill", "0", *join(wire, "c"), host=wire.node)
            code, log = refused.wait()
            assert code == 1, log
            assert f"disagg: error: cannot join {address(wire)} as c: " in log
            assert reason in log
        assert [node["name"] for node in running.status()["nodes"]] == ["b"]
        assert len(running.complete("and the server serves on", 8)) == 8


def test_a_node_can_be_stopped_while_it_waits_for_a_head(token: Path) -> None:
    """Nobody there, or somebody who says nothing: it says what it waits for, and ends with code 0 when it is told to."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        silent_port, closed_port = silent.getsockname()[1], closed.getsockname()[1]
        closed.close()
        for port, reason in ((silent_port, "no handshake within 5 s"), (closed_port, "Connection refused")):
            lent = Node(*NULL, "--prefill", "0", "--token-file", str(token), "--join", f"127.0.0.1:{port}")
            try:
                assert lent.process.stderr is not None
                assert reason in lent.process.stderr.readline()
                code, log = lent.end(signal.SIGTERM)
                assert code == 0, log
            finally:
                lent.close()
