"""Two hosts on one machine, for tests: two network namespaces, and a wire between them that can be slow, lossy or cut.

The wire is a thread that carries IP packets between two TUN devices, so nothing of the kernel's traffic control is needed. Names
have the process id, addresses are private ones that exist in the two namespaces only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_CLONE_NEWNET = 0x40000000
_COMMAND_S = 20.0


class Host:
    """One namespace, with one address on its device."""

    def __init__(self, name: str, address: str) -> None:
        self.name = f"disagg{os.getpid()}{name}"
        self.address = address
        self.device = f"tun{name}{os.getpid()}"[:15]
        _ip("netns", "add", self.name)
        with self.entered():
            self.wire = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(self.wire, _TUNSETIFF, struct.pack("16sH", self.device.encode(), _IFF_TUN_NO_PI))
        _ip("-n", self.name, "address", "add", f"{address}/30", "dev", self.device)
        for device in ("lo", self.device):
            _ip("-n", self.name, "link", "set", device, "up")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets and devices that this thread makes meanwhile are the host's."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.name}") as there:
            for namespace in (there, home):
                if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace.name}")
                if namespace is there:
                    try:
                        yield
                    except BaseException:
                        libc.setns(home.fileno(), _CLONE_NEWNET)
                        raise

    def command(self, *words: str) -> list[str]:
        """The command, to be run there; its process is the command's own."""
        return ["ip", "netns", "exec", self.name, *words]

    def close(self) -> None:
        os.close(self.wire)
        _ip("netns", "delete", self.name)


class Network:
    """``head`` and ``node``, and the wire: what it does to packets can be changed at any time."""

    def __init__(self) -> None:
        third = os.getpid() % 256
        self._hosts: list[Host] = []
        for name, last in (("h", 1), ("n", 2)):
            try:
                self._hosts.append(Host(name, f"10.200.{third}.{last}"))
            except BaseException:
                self._close_hosts()
                raise
        self.head, self.node = self._hosts
        self.is_cut = False
        self.delay_s = 0.0  # each way
        self.loss = 0.0  # share of packets, each way
        self.num_carried = self.num_lost = 0
        self._chance = random.Random(0)
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="wire")
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop_writer)
        self._thread.join()
        os.close(self._stop_reader)
        self._close_hosts()

    def _close_hosts(self) -> None:
        for host in self._hosts:
            host.close()

    def _carry(self) -> None:
        other = {self.head.wire: self.node.wire, self.node.wire: self.head.wire}
        waiting: list[tuple[float, int, int, bytes]] = []
        poll = select.poll()
        for fd in (*other, self._stop_reader):
            poll.register(fd, select.POLLIN)
        while True:
            timeout_ms = max(0.0, waiting[0][0] - time.monotonic()) * 1e3 if waiting else None
            for fd, _ in poll.poll(timeout_ms):
                if fd == self._stop_reader:
                    return
                packet = os.read(fd, 1 << 16)
                if self.is_cut or self._chance.random() < self.loss:
                    self.num_lost += 1
                else:
                    self.num_carried += 1
                    heapq.heappush(waiting, (time.monotonic() + self.delay_s, self.num_carried, other[fd], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, fd, packet = heapq.heappop(waiting)
                with contextlib.suppress(BlockingIOError):  # a full device drops a packet, as any does
                    os.write(fd, packet)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Skips the test where the machine does not allow it."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not os.access(_TUN, os.R_OK | os.W_OK):
        pytest.skip("needs root, the ip command and /dev/net/tun to make two hosts of one")
    made = Network()
    try:
        yield made
    finally:
        made.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_COMMAND_S)
