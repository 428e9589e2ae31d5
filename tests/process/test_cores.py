"""Workers of a real server on the cores of this host: their own, those of the other, and what the operating system is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disagg.kernels.native import best_library

from disagg.cores import Cores, Occupancy
from disagg.launcher import Started, WorkerProcess
from tests.process.harness import Server, server, until

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 or best_library() is None, reason="needs two cores and the compiled kernels"
)


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server("--mode", "disagg", "--kv-memory", "64MiB", "--max-model-len", "1024") as running:
        yield running


def wanted(running: Server) -> Occupancy:
    """The page in which the workers of this server say which cores they want."""
    for link in Path(f"/proc/{running.process.pid}/fd").iterdir():
        if os.readlink(link).startswith("/memfd:cpu-owners"):
            return Occupancy(os.open(link, os.O_RDWR))
    raise AssertionError("no such page")


def threads(worker: dict[str, Any]) -> dict[int, set[int]]:
    """By thread id, the cores it may run on."""
    ids = [int(name) for name in os.listdir(f"/proc/{worker['pid']}/task")]
    return {thread: os.sched_getaffinity(thread) for thread in ids}


def test_each_worker_has_its_own_cores_and_a_thread_on_each_of_the_others(running: Server) -> None:
    """All cores of the host are used by both; no other thread of theirs is where it may be in the other's way."""
    workers = {worker["role"]: worker for worker in running.status()["workers"]}
    prefill, decode = workers["prefill"], workers["decode"]
    assert set(prefill["cpus"]) | set(decode["cpus"]) == os.sched_getaffinity(0)
    for worker, other in ((prefill, decode), (decode, prefill)):
        assert worker["lent_cpus"] == other["cpus"]
        places = threads(worker)
        borrowed = [next(iter(cores)) for cores in places.values() if not cores <= set(worker["cpus"])]
        assert sorted(borrowed) == other["cpus"]
        assert places[worker["pid"]] == set(worker["cpus"])


def test_prefill_runs_after_everybody_else_and_decode_as_everybody_does(running: Server) -> None:
    """Wherever they compute: SCHED_BATCH and nice for the one, nothing special for the other."""

    def computing(worker: dict[str, Any]) -> list[int]:
        return [worker["pid"], *(thread for thread, cores in threads(worker).items() if cores <= set(worker["lent_cpus"]))]

    workers = {worker["role"]: worker for worker in running.status()["workers"]}
    nice = os.getpriority(os.PRIO_PROCESS, running.process.pid)
    for thread in computing(workers["prefill"]):
        assert os.sched_getscheduler(thread) == os.SCHED_BATCH
        assert os.getpriority(os.PRIO_PROCESS, thread) == min(19, nice + 10)
    for thread in computing(workers["decode"]):
        assert os.sched_getscheduler(thread) == os.SCHED_OTHER
        assert os.getpriority(os.PRIO_PROCESS, thread) == nice


def test_cores_are_wanted_while_there_is_work_and_no_longer(running: Server) -> None:
    """Decode's while it streams; nobody's when nothing is asked; and a worker that dies leaves none behind."""
    page, decode = wanted(running), running.worker("decode-0")
    until(lambda: repr(page) == "Occupancy([])", "idle")
    stream = running.stream("Count:", 900, ignore_eos=True)
    for _ in range(5):
        stream.next_event()
    until(lambda: repr(page) == f"Occupancy({decode['cpus']})", "decode alone wants its cores")
    os.kill(decode["pid"], signal.SIGKILL)
    stream.close()
    until(lambda: running.worker("decode-0")["epoch"] == 2, "started again")
    running.wait_until_ready()
    until(lambda: repr(page) == "Occupancy([])", "idle again")
    assert running.complete("Count:", max_tokens=2)


def test_decode_keeps_its_pace_while_prefill_wants_cores() -> None:
    """Ten steps take ten times ``--pace-ms``, but for the first's jitter, and in between prefill may have the cores of both."""
    with server("--mode", "disagg", "--kv-memory", "64MiB", "--max-model-len", "1024", "--pace-ms", "100") as running:
        prefill = running.worker("prefill-0")
        stream = running.stream("Count:", 200, ignore_eos=True)
        for _ in range(3):
            stream.next_event()
        until(lambda: repr(wanted(running)) == f"Occupancy({running.worker('decode-0')['cpus']})", "decode alone")
        with contextlib.closing(stream):
            os.kill(prefill["pid"], signal.SIGSTOP)  # else it says itself, before long, that it has nothing to do
            wanted(running).mark(prefill["cpus"], True)
            for _ in range(3):  # of before
                stream.next_event()
            began = time.monotonic()
            for _ in range(10):
                stream.next_event()
            took = time.monotonic() - began
            os.kill(prefill["pid"], signal.SIGCONT)
        assert took > 0.8


def spinning() -> subprocess.Popen[bytes]:
    """A process that computes from now on."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    return process


async def test_a_worker_that_others_keep_from_its_core_is_not_taken_for_stuck() -> None:
    """It could compute at once, and says so at every look, although it hardly gets a core. One that was stopped does not."""
    cpu = max(os.sched_getaffinity(0))
    starved, others = spinning(), [spinning() for _ in range(3)]
    for other in others:
        os.sched_setaffinity(other.pid, [cpu])
    os.sched_setscheduler(starved.pid, os.SCHED_IDLE, os.sched_param(0))
    ours, theirs = socket.socketpair()
    theirs.close()
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    worker = WorkerProcess(Started(starved, ours), Cores([cpu], []), Occupancy(), ended.set_result)
    try:
        assert all(worker.activity()[1] for _ in range(100))
        os.kill(worker.pid, signal.SIGSTOP)
        until(lambda: not worker.activity()[1], "stopped")
    finally:
        worker.kill()
        ours.close()
        for other in others:
            other.kill()
            other.wait()
    assert await ended == "killed by SIGKILL"
