"""A pool has its pages before it is used, and no more of them than that takes."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disagg.errors import HandoffError
from disagg.handoff.host_pool import Backing, create_pool, open_pool

MIB = 1 << 20
AHEAD = 64 * MIB
DEADLINE_S = 30.0


@contextlib.contextmanager
def backed(nbytes: int) -> Iterator[tuple[Backing, int]]:
    """With its pool's descriptor, whose size in blocks is what has pages."""
    fd, mapping = create_pool(nbytes, "test")
    backing = Backing(mapping)
    try:
        yield backing, fd
    finally:
        backing.close()
        os.close(fd)
        assert "kv-backing" not in [thread.name for thread in threading.enumerate()]


def num_resident(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_new_pool_has_the_pages_of_its_first_stretch_only() -> None:
    """What an idle server holds does not grow with its pool."""
    with backed(512 * MIB) as (backing, fd):
        assert num_resident(fd) == backing.nbytes == AHEAD


@pytest.mark.parametrize("nbytes", [4096, 10_000, MIB, AHEAD - 1])
def test_a_pool_below_a_stretch_is_backed_whole(nbytes: int) -> None:
    """Also where it does not end with a page."""
    with backed(nbytes) as (backing, fd):
        backing.reach(nbytes)
        assert backing.nbytes == nbytes
        assert num_resident(fd) == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def test_pages_stay_a_stretch_ahead_of_what_is_in_use() -> None:
    """Wherever in a page the use ends; at the pool's end there are no more to come."""
    nbytes = 200 * MIB + 5000
    with backed(nbytes) as (backing, fd):
        for used in (1, 30 * MIB + 1, 100 * MIB - 7, nbytes):
            backing.reach(used)
            until(lambda used=used: backing.nbytes >= min(used + AHEAD, nbytes))  # type: ignore[misc]
            assert num_resident(fd) >= min(used + AHEAD, nbytes)
            assert backing.nbytes <= min(used + AHEAD + 2 * MIB, nbytes)
        assert backing.nbytes == nbytes


def test_less_use_takes_nothing_back() -> None:
    """Blocks that have been used are used again first, so their pages stay."""
    with backed(200 * MIB) as (backing, _):
        backing.reach(50 * MIB)
        until(lambda: backing.nbytes == 50 * MIB + AHEAD)
        backing.reach(10 * MIB)
        assert backing.nbytes == 50 * MIB + AHEAD


def test_memory_that_is_not_there_is_an_error_with_a_name() -> None:
    """Told at the next ``reach``, while all that is in use has its pages. Here the file has lost its end."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * AHEAD)
    backing = Backing(memoryview(mmap.mmap(fd, 2 * AHEAD)))
    os.ftruncate(fd, AHEAD + 8 * MIB)
    try:
        with pytest.raises(HandoffError, match="no memory for more of the KV pool"):
            until(lambda: backing.reach(32 * MIB) is not None)
        assert backing.nbytes == AHEAD + 8 * MIB
    finally:
        backing.close()
        os.close(fd)


def test_a_pool_whose_first_stretch_is_not_there_is_refused() -> None:
    """At the start of a worker, which then says why it cannot."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, AHEAD)
    mapping = memoryview(mmap.mmap(fd, AHEAD))
    os.ftruncate(fd, MIB)
    with pytest.raises(HandoffError, match="no memory"):
        Backing(mapping)
    os.close(fd)


def test_a_pool_lies_in_huge_pages() -> None:
    """Where the kernel has them: its own mapping and that of whoever opens it later."""
    fd, pool = create_pool(8 * MIB, "huge-test")
    backing = Backing(pool)
    pool[:5] = b"bytes"
    try:
        huge = [int(line.split()[1]) for line in _mapping_of("huge-test") if line.startswith("ShmemPmdMapped")]
        if not any(huge) and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
            pytest.skip("this kernel makes no huge pages on demand")
        assert huge == [8192]
        assert bytes(open_pool(fd, 8 * MIB)[:5]) == b"bytes"
    finally:
        backing.close()


def test_a_pool_is_unmapped_with_its_last_user() -> None:
    """A view of it keeps it, and nothing else does."""
    fd, pool = create_pool(4 * MIB, "gone-test")
    os.close(fd)
    part = pool[:10]
    del pool
    assert _mapping_of("gone-test")
    assert bytes(part) == bytes(10)
    del part
    assert not _mapping_of("gone-test")


def _mapping_of(name: str) -> list[str]:
    """The lines of /proc/self/smaps about the mappings of memfd ``name``."""
    lines, is_it = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_it = f"memfd:{name}" in line
        if is_it:
            lines.append(line)
    return lines
