"""What a server takes of its machine: memory and CPU time of a process and all its descendants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Footprint:
    num_processes: int
    pss_mib: float  # resident; a page that n processes share counts 1/n in each, so that the sum is what the machine gives
    cpu_s: float  # of user and system so far, of those that live


def footprint(pid: int) -> Footprint:
    """Of the tree below ``pid``, itself included. A process that ends meanwhile is left out."""
    pss, cpu, count = 0, 0.0, 0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            memory, times = process.memory_full_info(), process.cpu_times()
            pss, cpu, count = pss + memory.pss, cpu + times.user + times.system, count + 1
    return Footprint(count, round(pss / 2**20, 1), round(cpu, 2))


def tree(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        yield root
        yield from root.children(recursive=True)
