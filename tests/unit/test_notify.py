"""What a service manager is told, on a socket that the test listens on."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.notify import Condition, ServiceManager
from tests.unit.api.fakes import async_test

SERVING = Condition("Serving", is_progressing=True, is_passing=False)


class Manager:
    """The other end of $NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(address.replace("@", "\0", 1))

    def heard(self) -> list[list[str]]:
        """Every message so far, as its lines."""
        messages = []
        try:
            while True:
                messages.append(self.socket.recv(4096).decode().split("\n"))
        except BlockingIOError:
            return messages


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "path" else f"@disagg-test-{os.getpid()}"


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    listening = Manager(address)
    yield listening
    listening.socket.close()


def told(address: str, **environ: str) -> ServiceManager:
    return ServiceManager({"NOTIFY_SOCKET": address, **environ})


def test_ready_reloading_and_stopping_are_told(manager: Manager, address: str) -> None:
    """One message each, in systemd's words; the same status is not sent twice, and a line break cannot make a field."""
    service = told(address)
    service.ready("Serving\nREADY=0")
    service.reloading()
    service.ready("Serving\nREADY=0")
    service.stopping("Ending")
    service.close()
    first, reloading, again, stopping = manager.heard()
    assert first == ["READY=1", "STATUS=Serving READY=0"]
    assert reloading[0] == "RELOADING=1"
    assert reloading[1].startswith("MONOTONIC_USEC=")
    assert again == ["READY=1"]
    assert stopping == ["STOPPING=1", "STATUS=Ending"]


def test_the_watchdog_is_fed_only_while_there_is_progress(manager: Manager, address: str) -> None:
    """Serving: fed. Loading or ending: more time as well. Stuck: the status and nothing else."""
    service = told(address, WATCHDOG_USEC="1000000", WATCHDOG_PID=str(os.getpid()))
    service.tell(SERVING)
    service.tell(Condition("Loading", is_progressing=True, is_passing=True))
    service.tell(Condition("Stuck", is_progressing=False, is_passing=True))
    service.tell(Condition("Stuck", is_progressing=False, is_passing=True))
    service.close()
    assert manager.heard() == [
        ["STATUS=Serving", "WATCHDOG=1"],
        ["STATUS=Loading", "WATCHDOG=1", "EXTEND_TIMEOUT_USEC=15000000"],
        ["STATUS=Stuck"],
    ]


@async_test
async def test_it_is_fed_at_half_of_its_time(tmp_path: Path) -> None:
    """Again and again until cancelled."""
    address = str(tmp_path / "notify")
    manager = Manager(address)
    service = told(address, WATCHDOG_USEC="20000")
    telling = asyncio.create_task(service.keep_told(lambda: SERVING))
    loop = asyncio.get_running_loop()
    begun, fed = loop.time(), 0
    while fed < 3:
        await asyncio.sleep(0)
        fed += sum("WATCHDOG=1" in message for message in manager.heard())
    assert loop.time() - begun >= 0.02
    telling.cancel()
    service.close()
    manager.socket.close()


@async_test
async def test_without_a_manager_nothing_is_said_and_nothing_waits() -> None:
    """No socket, a watchdog that is another process's, a socket of a kind that is not spoken."""
    for environ in ({}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}, {"NOTIFY_SOCKET": "vsock:2:1"}):
        service = ServiceManager(environ)
        assert not service.is_there
        assert service.watchdog_s == 0
        service.ready("x")
        await service.keep_told(lambda: SERVING)


def test_its_variables_are_not_passed_on(tmp_path: Path) -> None:
    """A worker that inherits them could speak for the service."""
    environ = {"NOTIFY_SOCKET": str(tmp_path / "x"), "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/"}
    ServiceManager(environ).close()
    assert environ == {"HOME": "/"}


def test_a_manager_that_is_away_is_told_when_it_is_back(tmp_path: Path) -> None:
    """Nothing is raised, and a READY=1 that was lost would be a service that never starts: it goes with the next word."""
    address = str(tmp_path / "notify")
    service = told(address, WATCHDOG_USEC="1000000")
    service.ready("Serving")
    service.tell(Condition("Degraded", is_progressing=True, is_passing=False))
    manager = Manager(address)
    service.tell(Condition("Degraded", is_progressing=False, is_passing=False))
    service.tell(Condition("Degraded", is_progressing=True, is_passing=False))
    service.close()
    assert manager.heard() == [["READY=1", "STATUS=Degraded"], ["WATCHDOG=1"]]
    manager.socket.close()


def test_what_has_changed_meanwhile_is_told_as_it_is_now(tmp_path: Path) -> None:
    """A manager takes the first line of each name in a message, so a status that was owed must not stand before a newer one."""
    address = str(tmp_path / "notify")
    service = told(address, WATCHDOG_USEC="1000000")
    service.ready("Serving")
    manager = Manager(address)
    service.tell(Condition("Not ready: draining", is_progressing=True, is_passing=False))
    service.close()
    assert manager.heard() == [["READY=1", "STATUS=Not ready: draining", "WATCHDOG=1"]]
    manager.socket.close()
