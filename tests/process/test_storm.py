"""Too much at once, on the null engine: workers that die faster than they start, a thousand streams, too small a /dev/shm."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.process.harness import DEADLINE_S, Server, null_server, terminate, until

LONG = 100_000  # tokens: a stream that a test, or the server's end, cuts off


def kill_whenever_it_starts(running: Server, worker_id: str) -> int:
    """Until it is given up: kill -9 as soon as it has a process. Returns how often."""
    killed: set[int] = set()
    worker = running.worker(worker_id)
    while worker["state"] != "gone":
        if worker["pid"] is not None and worker["pid"] not in killed:
            os.kill(worker["pid"], signal.SIGKILL)
            killed.add(worker["pid"])
        before = worker
        until(lambda before=before: running.worker(worker_id) != before, "it changes")
        worker = running.worker(worker_id)
    return len(killed)


def num_pools(process_id: int) -> int:
    """KV pools that a process maps: its own, and those of peers that it writes to."""
    return Path(f"/proc/{process_id}/maps").read_text().count("memfd:disagg")


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.slow)])
def test_a_restart_storm_of_one_worker_is_no_harm_to_the_streams(role: str) -> None:
    """Killed at each start until it is given up: old and new streams go on with the other worker; the server says degraded."""
    prompts = [f"{index} in the storm" for index in range(3)]
    max_restarts = 3
    with null_server("--max-restarts", str(max_restarts)) as running:
        expected = [running.complete(prompt, 200) for prompt in prompts]
        whole = running.complete("through it all", 3_000)
        is_over = threading.Event()

        def ask(index: int) -> int:
            num_asked = 0
            while not is_over.is_set():
                assert running.complete(prompts[index], 200) == expected[index]
                num_asked += 1
            return num_asked

        stream = running.stream("through it all", 3_000)
        assert stream.next_event()
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(ask, index) for index in range(len(prompts))]
            try:
                num_kills = kill_whenever_it_starts(running, f"{role}-0")
            finally:
                is_over.set()
            assert all(future.result(DEADLINE_S) > 0 for future in asked)
        assert num_kills == max_restarts + 1
        assert stream.read_to_end()[-1] == "[DONE]"
        assert stream.text() == whole
        stream.close()
        (survivor,) = (worker for worker in running.status()["workers"] if worker["state"] == "ready")
        until(lambda: num_pools(survivor["pid"]) == 1, "the memory of the dead is let go")
        assert running.status()["degraded"]
        assert running.request("GET", "/readyz") == (200, {"status": "ok", "reasons": []})
        assert running.complete(prompts[0], 200) == expected[0]
        assert terminate(running) == 0


def test_with_both_roles_beyond_the_limit_the_server_ends_and_says_so_to_its_streams() -> None:
    """Nobody is left to serve: an error event and [DONE] for what is open, a non-zero exit code, and nothing lingers."""
    with null_server("--max-restarts", "1") as running:
        kill_whenever_it_starts(running, "decode-0")
        assert running.status()["degraded"]
        stream = running.stream("the last one", LONG)
        assert stream.next_event()
        os.kill(running.worker("prefill-0")["pid"], signal.SIGKILL)
        until(
            lambda: running.worker("prefill-0")["restarts"] == 1 and running.worker("prefill-0")["pid"] is not None, "restarted"
        )
        os.kill(running.worker("prefill-0")["pid"], signal.SIGKILL)
        assert running.process.wait(DEADLINE_S) == 1
        *_, error, done = stream.read_to_end()
        assert json.loads(error)["error"]["code"] == "shutdown"
        assert done == "[DONE]"
        stream.close()


@pytest.mark.slow
def test_a_thousand_streams_at_once_are_all_right() -> None:
    """All open at the same time, and not read before they are: each says what it should. Then all leave, and leave nothing."""
    prompts = [f"{index} of a crowd" for index in range(4)]
    with null_server("--max-num-seqs", "1024") as running:
        expected = [running.complete(prompt, 8) for prompt in prompts]
        connections = [running.connect() for _ in range(1000)]
        for index, connection in enumerate(connections):
            body = {"prompt": prompts[index % 4], "max_tokens": LONG, "temperature": 0, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        until(lambda: running.status()["requests"]["decoding"] == 1000, "a thousand streams decode")
        for index, connection in enumerate(connections):
            with connection.getresponse() as answer:
                text = ""
                while len(text) < 8:
                    if (line := answer.readline()).startswith(b"data: "):
                        text += json.loads(line[6:])["choices"][0]["text"]
                assert text[:8] == expected[index % 4]
            connection.close()
        running.wait_until_empty(5.0)
        assert running.complete(prompts[0], 8) == expected[0]


@pytest.mark.slow
def test_a_small_shared_memory_file_system_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV pools are anonymous memory files: with a /dev/shm of 1 MiB, as in some containers, pools of 64 MiB are served from."""
    inside = 'mount -t tmpfs -o size=1M tmpfs /dev/shm && exec "$@"'
    enter = ["unshare", "--mount", "sh", "-c", inside, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no permission to mount a file system")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec unshare --mount sh -c '{inside}' sh {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    with null_server() as ordinary:
        expected = ordinary.complete("small " * 300, 100)
    monkeypatch.setattr(sys, "executable", str(python))
    with null_server() as running:
        mounts = Path(f"/proc/{running.process.pid}/mountinfo").read_text()
        assert "size=1024k" in next(line for line in mounts.splitlines()[::-1] if " /dev/shm " in line)
        assert running.complete("small " * 300, 100) == expected
        running.wait_until_empty(1.0)
