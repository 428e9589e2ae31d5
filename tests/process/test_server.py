"""The command as a user runs it, on the null engine: deaths, signals, disconnects, and what they leave behind."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.process.harness import DEADLINE_S, Server, alive, terminate, until
from tests.process.harness import null_server as server

LONG = 100_000  # tokens: a stream that a test always ends itself


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    """A server that several tests use; each leaves it empty."""
    with server() as shared:
        yield shared


def memory_files(process_id: int) -> list[str]:
    """The KV pools a process maps."""
    return [line for line in Path(f"/proc/{process_id}/maps").read_text().splitlines() if "memfd:disagg" in line]


def test_prefill_and_decode_are_two_processes_and_bytes_move_between_them(running: Server) -> None:
    """Roles, pids, a verified pair, bytes handed over, and nothing computed twice."""
    text = running.complete("two processes", 20)
    assert len(text) == 20
    status = running.status()
    assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode"]
    assert len({worker["pid"] for worker in status["workers"]} | {running.process.pid}) == 3
    assert status["pairs"][0]["transport"] == "shm"
    assert status["pairs"][0]["gb_per_s"] > 0
    metrics = running.request("GET", "/metrics")[1]
    moved = next(line for line in metrics.splitlines() if line.startswith('disagg_transfer_bytes_total{transport="shm"}'))
    assert float(moved.split()[-1]) > 0
    assert all(worker["decode_prefill_tokens"] == 0 for worker in status["workers"])
    running.wait_until_empty(1.0)


def test_text_equals_the_colocated_servers(running: Server) -> None:
    """Forty prompts of many lengths, one after another and all at once, against a server with one mixed worker."""
    prompts = [f"{index} " + "long " * (index * 3) for index in range(40)]
    with server("--mode", "colocated") as colocated:
        expected = [colocated.complete(prompt, 24) for prompt in prompts]
    assert [running.complete(prompt, 24) for prompt in prompts] == expected
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: running.complete(prompt, 24), prompts)) == expected
    running.wait_until_empty(1.0)


def test_clients_that_leave_free_everything_within_a_second(running: Server) -> None:
    """Five hundred streams closed after 0 to 9 events, some while they queue: all blocks of both workers come back."""
    for turn in range(10):
        streams = [running.stream(f"leaving {turn} {index}", LONG) for index in range(50)]
        for index, stream in enumerate(streams):
            assert all(stream.next_event() for _ in range(index % 10))
            stream.close()
    running.wait_until_empty(1.0)
    assert running.worker("decode-0")["restarts"] == 0


def test_abort_while_a_long_prompt_is_computed(running: Server) -> None:
    """A client that leaves during prefill, before any event: prefill stops and decode's reservation is returned."""
    parts = running.connect()
    body = json.dumps({"prompt": [65] * 100_000, "max_tokens": 500, "stream": True})
    parts.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    until(lambda: running.status()["requests"]["prefilling"] == 1, "the prompt is being computed")
    parts.close()
    running.wait_until_empty(1.0)
    assert running.worker("decode-0")["blocks"]["reserved"] == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_is_replaced_and_nothing_is_left_of_it(role: str) -> None:
    """kill -9 of a worker that is in the middle of a long prompt: the request is answered all the same, right."""
    prompts = [[65 + index] * 60_000 for index in range(2)]  # the second is not in any prefix cache
    with server("--mode", "colocated") as colocated:
        expected = [colocated.complete(prompt, 16) for prompt in prompts]
    with server() as running:
        before = running.worker(f"{role}-0")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(running.complete, prompts[0], 16)
            until(lambda: running.status()["requests"]["prefilling"] == 1, "the prompt is being computed")
            os.kill(before["pid"], signal.SIGKILL)
            assert answer.result(DEADLINE_S) == expected[0]
        until(lambda: running.worker(f"{role}-0")["restarts"] == 1, "restarted")
        running.wait_until_ready()
        after = running.worker(f"{role}-0")
        assert (after["epoch"], after["restarts"]) == (2, 1)
        assert after["pid"] != before["pid"]
        assert running.complete(prompts[1], 16) == expected[1]
        running.wait_until_empty(1.0)
        # The survivor has let go of the dead worker's memory: at most its own pool and the new peer's.
        for worker in running.status()["workers"]:
            assert len(memory_files(worker["pid"])) <= 2


@pytest.mark.slow
def test_streams_survive_kills_at_any_token() -> None:
    """kill -9 at token 1, 2, 3, 10, 50 of each role, eight streams at a time: every text is the undisturbed one."""
    prompts = [f"stream {index} of a worker that dies" for index in range(8)]
    num_tokens = 2000
    with server("--max-restarts", "100") as running:
        expected = [running.complete(prompt, num_tokens) for prompt in prompts]
        kills = 0
        for at_token in (1, 2, 3, 10, 50):
            for role in ("prefill", "decode"):
                running.wait_until_ready()
                streams = [running.stream(prompt, num_tokens) for prompt in prompts]
                for _ in range(at_token):
                    assert streams[0].next_event()
                os.kill(running.worker(f"{role}-0")["pid"], signal.SIGKILL)
                kills += 1
                for stream, text in zip(streams, expected, strict=True):
                    assert stream.read_to_end()[-1] == "[DONE]"
                    assert stream.text() == text, f"{role} killed at token {at_token}"
                    stream.close()
        running.wait_until_ready()
        assert sum(worker["restarts"] for worker in running.status()["workers"]) == kills == 10
        running.wait_until_empty(1.0)


def test_a_stopped_worker_is_found_and_its_streams_go_on() -> None:
    """SIGSTOP: alive, but it neither speaks nor computes. It is killed and replaced; no token is lost."""
    with server() as running:
        expected = running.complete("a worker that hangs", 3000)
        stream = running.stream("a worker that hangs", 3000)
        assert stream.next_event()
        before = running.worker("decode-0")
        os.kill(before["pid"], signal.SIGSTOP)
        assert stream.read_to_end()[-1] == "[DONE]"
        assert stream.text() == expected
        stream.close()
        running.wait_until_ready()
        assert running.worker("decode-0")["pid"] != before["pid"]
        running.wait_until_empty(1.0)


def test_kill_9_of_the_parent_leaves_no_process_and_no_memory() -> None:
    """Workers go with their parent also while they are busy; the pools have no names that could stay."""
    names_before = set(os.listdir("/dev/shm"))
    with server() as running:
        stream = running.stream("busy", LONG)
        assert stream.next_event()
        children = running.children
        assert len(alive(children)) >= 2
        running.process.kill()
        until(lambda: not alive(children), "the workers are gone", 3.0)
        stream.close()
    assert set(os.listdir("/dev/shm")) <= names_before


def test_a_stopped_worker_dies_with_its_parent_all_the_same() -> None:
    """A worker that cannot run a single instruction of its own (SIGSTOP) is gone within 3 s of the parent."""
    with server() as running:
        running.complete("hello", structured_outputs={"choice": ["yes"]})  # once ready, a process for this one is started, too
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert len(alive(children)) >= 2
        for child in children:
            child.suspend()
        running.process.kill()
        until(lambda: not alive(children), "the workers are gone", 3.0)


def test_sigterm_lets_streams_finish_and_refuses_new_requests() -> None:
    """Drain: not ready, 503 with Retry-After for new requests, twenty running streams to their ends, exit code 0."""
    num_tokens = 4000
    with server() as running:
        expected = [running.complete(f"to its end {index}", num_tokens) for index in range(3)]
        streams = [running.stream(f"to its end {index % 3}", num_tokens) for index in range(20)]
        for stream in streams:
            assert stream.next_event()
        running.process.send_signal(signal.SIGTERM)
        until(lambda: running.request("GET", "/readyz")[0] == 503, "not ready")
        connection = running.connect()
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "late"}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        connection.close()
        for index, stream in enumerate(streams):
            assert stream.read_to_end()[-1] == "[DONE]"
            assert stream.text() == expected[index % 3]
            stream.close()
        assert running.process.wait(DEADLINE_S) == 0


@pytest.mark.slow
def test_what_outlives_the_drain_time_ends_with_an_error_event() -> None:
    """Never a bare close: an error event, [DONE], exit code 0; also when a second signal cuts the drain short."""
    with server("--drain-s", "0.3") as running:
        stream = running.stream("too long", LONG)
        assert stream.next_event()
        assert terminate(running) == 0
        *_, error, done = stream.read_to_end()
        assert "shutting down" in json.loads(error)["error"]["message"]
        assert done == "[DONE]"
        stream.close()
    with server() as running:
        stream = running.stream("too long", LONG)
        assert stream.next_event()
        running.process.send_signal(signal.SIGINT)
        until(lambda: running.request("GET", "/readyz")[0] == 503, "draining")
        begun = time.monotonic()
        assert terminate(running, signal.SIGINT) == 0
        assert time.monotonic() - begun < 10, "the second signal did not cut the drain short"
        assert "shutting down" in stream.read_to_end()[-2]
        stream.close()


def test_a_thousand_requests_are_all_right_while_others_leave(running: Server) -> None:
    """Sixteen clients at a time, every text checked against the colocated one, every fifth stream left in the middle."""
    prompts = [f"request {index} " + "of many " * (index % 9) for index in range(50)]
    with server("--mode", "colocated") as colocated:
        expected = [colocated.complete(prompt, 20) for prompt in prompts]

    def one(index: int) -> bool:
        if index % 5 == 4:
            stream = running.stream(prompts[index % 50], LONG)
            assert stream.next_event()
            stream.close()
            return True
        return running.complete(prompts[index % 50], 20) == expected[index % 50]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(1000)))
    running.wait_until_empty(1.0)


def test_an_occupied_port_is_refused_before_anything_is_loaded() -> None:
    """One clear line, exit code 1, no worker left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "disagg", "serve", "--model", "null", "--port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_memory_that_is_not_there_is_refused_with_the_number_needed() -> None:
    """Before a process starts: what was asked for, what it needs, what is free."""
    command = [sys.executable, "-m", "disagg", "serve", "--model", "null", "--port", "0", "--kv-memory", "100TiB"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 1
    assert "for each of 2 workers needs 204800.0 GiB" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_two_servers_at_once_do_not_meet(running: Server) -> None:
    """No fixed port, name or path: both serve, with the same text."""
    with server() as other:
        assert other.url != running.url
        assert other.complete("side by side", 30) == running.complete("side by side", 30)
        assert terminate(other) == 0
    assert running.request("GET", "/readyz")[0] == 200


def kill_twice(running: Server, worker_id: str) -> None:
    for restarts in (0, 1):
        until(lambda restarts=restarts: running.worker(worker_id)["restarts"] == restarts, "restarted")
        until(lambda: running.worker(worker_id)["state"] == "ready", "ready")
        os.kill(running.worker(worker_id)["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_dies_again_and_again_ends_the_server() -> None:
    """Backoff, a limit, then a non-zero exit, so that a service manager can act."""
    with server("--max-restarts", "1", "--no-fallback") as running:
        kill_twice(running, "decode-0")
        assert running.process.wait(DEADLINE_S) == 1


def test_or_the_other_role_serves_alone_and_says_so() -> None:
    """With fallback, a worker given up does not end the server: the rest do both, ready but degraded, with the same text."""
    with server("--max-restarts", "1") as running:
        expected = running.complete("before", 30)
        kill_twice(running, "decode-0")
        until(lambda: running.worker("decode-0")["state"] == "gone", "given up")
        assert running.complete("before", 30) == expected
        assert running.status()["degraded"]
        assert running.request("GET", "/readyz")[0] == 200
        assert terminate(running) == 0
