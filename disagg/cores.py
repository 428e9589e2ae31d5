"""Which cores of this host a worker computes on: cores of its own, and those that are lent to it while their owner is idle.

Every core has one owner, and at most one other worker that may use it. While both have work each has its own cores, so that
neither can hold up the other; while one has none the other has the cores of both. Who works stands in memory that all processes
share: the kernels look at it before each unit of work, so a core is back within a millisecond of being wanted.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

_Item = TypeVar("_Item")
_libc = ctypes.CDLL(None)
_NODES = Path("/sys/devices/system/node")
_MOST_CPUS = 8192  # of the kernel, on any machine
_NBYTES = 2 * _MOST_CPUS * ctypes.sizeof(ctypes.c_uint32)
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # elsewhere a borrower looks for itself, after 0.1 s
_FUTEX_WAKE = 1
_LEAVE_S, _LOOK_S = 0.005, 0.00005  # a unit of work takes some tenths of a millisecond


class Cores(NamedTuple):
    """Of one worker. Nothing of its own: it runs wherever this process may."""

    own: list[int]
    lent: list[int]


class Occupancy:
    """For each core a word that says whether its owner wants it, and one that its borrower is at work there.

    One piece of memory in the parent, and through its ``fd`` in every worker.
    """

    def __init__(self, fd: int | None = None) -> None:
        """``fd`` None: a new one, with every core free. Raises OSError."""
        self.fd = os.memfd_create("cpu-owners") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _NBYTES)
        self._words = (ctypes.c_uint32 * (2 * _MOST_CPUS)).from_buffer(mmap.mmap(self.fd, _NBYTES))

    def __repr__(self) -> str:
        return f"Occupancy({[cpu for cpu in range(_MOST_CPUS) if self._words[cpu]]})"

    def __del__(self) -> None:
        os.close(self.fd)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the words of owners and of those of borrowers. Valid as long as this object is."""
        return self._address(0), self._address(_MOST_CPUS)

    def mark(self, cpus: Iterable[int], is_wanted: bool) -> None:
        """A borrower that waits for one that is no longer wanted is woken."""
        for cpu in cpus:
            was_wanted, self._words[cpu] = self._words[cpu], is_wanted
            if was_wanted and not is_wanted and _SYS_FUTEX is not None:
                _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(self._address(cpu)), _FUTEX_WAKE, 1)

    def is_any_wanted(self, cpus: Iterable[int]) -> bool:
        return any(self._words[cpu] for cpu in cpus)

    def is_any_used(self, cpus: Iterable[int]) -> bool:
        """By its borrower."""
        return any(self._words[_MOST_CPUS + cpu] for cpu in cpus)

    def forget(self, cores: Cores) -> None:
        """Whose worker is gone."""
        self.mark(cores.own, False)
        for cpu in cores.lent:
            self._words[_MOST_CPUS + cpu] = 0

    def _address(self, index: int) -> int:
        return ctypes.addressof(self._words) + index * ctypes.sizeof(ctypes.c_uint32)


class Turns:
    """When a worker computes, and when the others may on its cores."""

    def __init__(self, occupancy: Occupancy, cores: Cores, pace_s: float) -> None:
        """While any core that is lent to it is wanted, its steps begin no closer than ``pace_s``; in between it lends its own."""
        self._occupancy, self._cores, self._pace_s = occupancy, cores, pace_s
        self._has_begun = False

    def begin(self) -> None:
        """The cores are its own again. A borrower has ended the unit of work that it was at: held back on a core that it shares,
        it would hold back all that its worker does, for the whole of a step."""
        if self._has_begun:
            return
        self._has_begun = True
        self._occupancy.mark(self._cores.own, True)
        latest = time.monotonic() + _LEAVE_S
        while self._occupancy.is_any_used(self._cores.own) and time.monotonic() < latest:
            time.sleep(_LOOK_S)

    def end(self) -> None:
        if self._has_begun:
            self._has_begun = False
            self._occupancy.mark(self._cores.own, False)

    def next_at(self, began_at: float) -> float:
        """When the step may begin that follows one which began at ``began_at``; 0: at once."""
        rests = self._pace_s > 0 and self._occupancy.is_any_wanted(self._cores.lent)
        return began_at + self._pace_s if rests else 0.0


def host_cpus(nodes: Path = _NODES) -> list[list[int]]:
    """The cores that this process may use, by memory node, those with none left out."""
    allowed = os.sched_getaffinity(0)
    lists = sorted(nodes.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    by_node = [sorted(allowed & _parsed(path.read_text())) for path in lists]
    if set(itertools.chain(*by_node)) != allowed:  # a kernel without nodes, or a container that hides them
        by_node = [sorted(allowed)]
    return [cpus for cpus in by_node if cpus]


def share_out(roles: Sequence[str], cpus: Sequence[Sequence[int]], *, lend: bool) -> list[Cores]:
    """Cores for the worker of each role, from those of each memory node.

    Nobody's cores are of two nodes, unless there are fewer workers than nodes. The workers of a node get even shares, and are
    lent, with ``lend``, those of the other roles in even shares. With fewer cores than workers nobody has any of their own.
    """
    nodes = [list(itertools.chain(*some)) for some in _parts(cpus, min(len(cpus), len(roles)))]
    on_node = [range(index, len(roles), len(nodes)) for index in range(len(nodes))]  # in turn, so that roles meet on each node
    if any(len(node) < len(workers) for node, workers in zip(nodes, on_node)):
        nodes, on_node = [list(itertools.chain(*cpus))], [range(len(roles))]
    if not nodes or len(nodes[0]) < len(on_node[0]):
        return [Cores([], []) for _ in roles]
    cores = [Cores([], []) for _ in roles]
    for node, workers in zip(nodes, on_node):
        for worker, own in zip(workers, _parts(node, len(workers))):
            cores[worker].own.extend(own)
        for role in {roles[worker] for worker in workers} if lend else ():
            same = [worker for worker in workers if roles[worker] == role]
            others = sorted(itertools.chain(*(cores[worker].own for worker in workers if worker not in same)))
            for worker, lent in zip(same, _parts(others, len(same))):
                cores[worker].lent.extend(lent)
    return cores


def _parts(items: Sequence[_Item], num_parts: int) -> list[Sequence[_Item]]:
    """``items`` in order, cut into parts as even as can be; of no parts nobody gets any."""
    bounds = [index * len(items) // num_parts for index in range(num_parts)] + [len(items)]
    return [items[begin:end] for begin, end in itertools.pairwise(bounds)]


def _parsed(text: str) -> set[int]:
    """Core numbers of ``0-3,8,10-11``."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}
