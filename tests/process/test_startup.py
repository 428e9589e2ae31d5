"""What a start costs: processes are there before it is known what for, and memory comes as it is used."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from disagg.config import Config, KVConfig, WorkersConfig
from disagg.cores import host_cpus
from disagg.deployment import plan
from disagg.launcher import ProcessLauncher
from disagg.messages import Configure, Message, Ready
from disagg.model import find_model, read_model_spec
from tests.process.harness import DEADLINE_S, alive, server, until

MIB = 1 << 20


@pytest.fixture
def launcher() -> Iterator[ProcessLauncher]:
    made = ProcessLauncher()
    yield made
    made.close()
    assert processes() == []


def processes() -> list[psutil.Process]:
    return [child for child in alive(psutil.Process().children()) if "disagg.worker_process" in child.cmdline()]


def started_ahead(launcher: ProcessLauncher, count: int) -> list[psutil.Process]:
    """Once each has its name: the kernel says that a program runs a moment before it shows which."""
    launcher.start_ahead(count)
    until(lambda: len(processes()) == count, "started")
    return processes()


def settings(epoch: int) -> Configure:
    files = find_model("null")
    config = Config(kv=KVConfig(memory="1MiB"), workers=WorkersConfig(prefill=1, decode=1))
    here: dict[str, Any] = {"cpus": host_cpus(), "free_nbytes": 1 << 30, "is_part": False}
    (first, *_) = plan(config, files, read_model_spec(files), vocab_size=259, run_id="test", **here).workers
    return msgspec.structs.replace(first, epoch=epoch)


class Watched:
    """A launched worker, and what was heard of it."""

    def __init__(self, launcher: ProcessLauncher, epoch: int) -> None:
        loop = asyncio.get_running_loop()
        self.ready, self.ended = loop.create_future(), loop.create_future()
        self.handle = launcher.launch(settings(epoch), self._heard, self.ended.set_result)

    def _heard(self, message: Message, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if isinstance(message, Ready):
            self.ready.set_result(message)


async def test_a_process_that_was_started_ahead_becomes_a_first_incarnation(launcher: ProcessLauncher) -> None:
    """Of any worker. What is started again, and what comes when none is left, is a new process; all of them serve."""
    (ahead,) = started_ahead(launcher, 1)
    async with asyncio.timeout(DEADLINE_S):
        again, first, other = (Watched(launcher, epoch) for epoch in (2, 1, 1))
        assert first.handle.pid == ahead.pid
        assert len({again.handle.pid, first.handle.pid, other.handle.pid}) == 3
        for worker in (again, first, other):
            assert (await worker.ready).num_blocks > 0
            worker.handle.kill()
            assert (await worker.ended).startswith("killed by SIGKILL")


async def test_a_process_that_died_before_its_time_is_a_worker_that_died(launcher: ProcessLauncher) -> None:
    """Its supervisor learns of it as of any other death."""
    (ahead,) = started_ahead(launcher, 1)
    ahead.kill()
    async with asyncio.timeout(DEADLINE_S):
        assert (await Watched(launcher, 1).ended).startswith("killed by SIGKILL")  # and perhaps what its socket said


def test_processes_that_nobody_needed_are_ended(launcher: ProcessLauncher) -> None:
    """A server that refuses its settings leaves nothing behind."""
    assert len(started_ahead(launcher, 3)) == 3
    launcher.close()
    assert processes() == []


def test_a_server_at_rest_holds_the_beginning_of_its_pools_only() -> None:
    """Of 512 MiB each, the 64 that are to be ahead of what is in use; a probe of a few blocks adds nothing that matters."""
    with server("--model", "null", "--kv-memory", "512MiB", "--mode", "disagg") as running:
        descriptors = Path(f"/proc/{running.process.pid}/fd").iterdir()
        pools = [os.stat(fd) for fd in descriptors if "memfd:disagg-" in os.readlink(fd)]
        assert [pool.st_size // MIB for pool in pools] == [512, 512]
        assert all(64 <= pool.st_blocks * 512 // MIB <= 72 for pool in pools)
