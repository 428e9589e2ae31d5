"""``disagg flip`` with real processes: streams go on while a worker changes what it does."""

from __future__ import annotations

import concurrent.futures
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from disagg.drain import ask
from tests.process.harness import DEADLINE_S, Server, Stream, null_server, until

NUM_TOKENS = 3000
PROMPTS = [f"stream {index} of eight, with its own prompt" for index in range(8)]


class Operated(NamedTuple):
    server: Server
    socket: str

    def flip(self, worker: str, role: str, wait_s: float) -> tuple[int, str]:
        """Exit code and what was printed."""
        command = [sys.executable, "-m", "disagg", "flip", worker, role, "--socket", self.socket, "--wait-s", str(wait_s)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)
        return ended.returncode, ended.stdout + ended.stderr

    def num_failovers(self) -> float:
        metrics = self.server.request("GET", "/metrics")[1]
        return float(re.search(r'^disagg_failovers_total\{reason="worker_died"\} (\S+)$', metrics, re.MULTILINE)[1])

    def roles(self) -> dict[str, str]:
        return {worker["id"]: worker["role"] for worker in self.server.status()["workers"]}


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """1P2D for this whole file; each test leaves it so, ready and empty."""
    socket = str(tmp_path_factory.mktemp("flip") / "admin.sock")
    with null_server("--mode", "disagg", "--decode", "2", "--admin-socket", socket, "--kv-memory", "16MiB") as server:
        yield Operated(server, socket)


def read_to_end(stream: Stream) -> str:
    assert stream.read_to_end()[-1] == "[DONE]"
    stream.close()
    return stream.text()


@pytest.mark.parametrize("wait_s", [0, pytest.param(20, marks=pytest.mark.slow)], ids=["at-once", "in-peace"])
def test_eight_streams_say_the_same_while_a_worker_flips_and_flips_back(operated: Operated, wait_s: float) -> None:
    """decode → prefill → decode: every text is the undisturbed one, roles and epochs show in the status, nothing is left."""
    server = operated.server
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        opened = [server.stream(prompt, NUM_TOKENS) for prompt in PROMPTS]
        undisturbed = list(pool.map(read_to_end, opened))
        for role in ("prefill", "decode"):
            before, num_lost = server.worker("decode-1"), operated.num_failovers()
            streams = [server.stream(prompt, NUM_TOKENS) for prompt in PROMPTS]
            assert all(stream.next_event() for stream in streams)
            reading = [pool.submit(read_to_end, stream) for stream in streams]
            asked = json.dumps({"worker": "decode-1", "role": role, "wait_s": wait_s}).encode()
            assert json.loads(ask(operated.socket, "POST", "/flip", asked, timeout_s=2 * DEADLINE_S))["is_ready"]
            if role == "prefill":  # it had streams, and the other way round it has prompts, for a moment
                assert (operated.num_failovers() > num_lost) == (wait_s == 0)
            worker = server.worker("decode-1")
            assert (worker["role"], worker["epoch"], worker["restarts"]) == (role, before["epoch"] + 1, 0)
            pairs = server.status()["pairs"]
            assert len(pairs) == 2
            assert all(pair["verified"] for pair in pairs)
            assert [future.result(DEADLINE_S) for future in reading] == undisturbed
    server.wait_until_empty(5.0)
    assert not server.status()["degraded"]


def test_a_server_that_flips_a_worker_is_ready_all_the_time(operated: Operated) -> None:
    """Others serve meanwhile, so a load balancer need not notice; the status says who is being flipped to what."""
    server = operated.server
    stream = server.stream("the last one on it", 100_000)
    assert stream.next_event()
    until(lambda: any(worker["requests"]["running"] for worker in server.status()["workers"]), "it is told where it runs")
    (busy,) = [worker["id"] for worker in server.status()["workers"] if worker["requests"]["running"]]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        flip = pool.submit(operated.flip, busy, "mixed", 60)
        until(lambda: server.worker(busy)["next_role"] == "mixed", "it has begun")
        assert server.request("GET", "/readyz")[0] == 200
        assert len(server.complete("served by the others", 5)) == 5
        stream.close()
        while not flip.done():
            assert server.request("GET", "/readyz")[0] == 200
        assert flip.result() == (0, f"{busy} is mixed.\n")
    assert operated.roles()[busy] == "mixed"
    assert operated.flip(busy, "decode", 5) == (0, f"{busy} is decode.\n")
    server.wait_until_empty(5.0)


def test_what_is_refused_is_said_in_one_line(operated: Operated, tmp_path: Path) -> None:
    """Exit code 1 with the server's sentence; 2 where nobody answers."""
    code, said = operated.flip("prefill-0", "decode", 5)
    assert (code, said) == (
        1,
        "disagg: error: with prefill-0 as decode no worker that is ready could do prefill: flip another one first\n",
    )
    code, said = operated.flip("prefill-7", "decode", 5)
    assert code == 1
    assert "there is no worker 'prefill-7'" in said
    assert operated.roles() == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    nobody = Operated(operated.server, str(tmp_path / "nobody.sock"))
    assert nobody.flip("decode-1", "prefill", 5)[0] == 2
