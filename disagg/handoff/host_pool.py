"""A worker's KV pool in host memory that another process can be given: an anonymous memory file (memfd).

It has no name, so nothing is left behind whichever way the processes die: the memory goes with its last descriptor.

Its pages come as the pool fills, a stretch ahead of its use (``Backing``). All of them at the start would take seconds for a GiB,
hold memory that an idle server does not need, and take long to give back when the process is killed, which is when its streams
could go on. They are huge pages wherever the kernel has them: attention reads a few KiB here and there, which takes a third less
time when the addresses of the whole pool are at hand, and a peer's first write to 64 MiB takes 19 ms instead of 61.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref

from disagg.errors import HandoffError

_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # Linux 5.14 and 6.1; mmap has no names for them yet
_HUGE_PAGE = 2 << 20
_AHEAD = 64 << 20  # 1,400 tokens of the built-in model, 500 of an 8B model in bfloat16: a chunk of a prompt
_PIECE = _HUGE_PAGE  # 2 to 4 ms


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000


def create_pool(nbytes: int, name: str) -> tuple[int, memoryview]:
    """A descriptor and a writable mapping of ``nbytes`` zero bytes, not yet backed by pages. ``name`` shows in /proc/PID/maps.

    Sealed against resizing, so that no holder can make another's mapping fault. Raises HandoffError.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return fd, _mapped(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError) as error:
        raise HandoffError(f"cannot create a KV pool of {nbytes} bytes: {error}") from error


def open_pool(fd: int, nbytes: int) -> mmap.mmap:
    """A writable mapping of a pool made by another process; takes over ``fd``. Raises HandoffError."""
    with contextlib.closing(os.fdopen(fd, "r+b", buffering=0)):
        try:
            size = os.fstat(fd).st_size
            if size < nbytes:
                raise HandoffError(f"the peer's pool has {size} bytes, its layout needs {nbytes}")
            return mmap.mmap(fd, nbytes)
        except (OSError, ValueError) as error:
            raise HandoffError(f"cannot map the peer's pool of {nbytes} bytes: {error}") from error


def _mapped(fd: int, nbytes: int) -> memoryview:
    """The file, at an address where huge pages can be; mapped as long as anybody uses it. Raises OSError, ValueError."""
    if nbytes < 1:
        raise ValueError("nothing to map")
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    room = _libc.mmap(None, nbytes + _HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    address = room if room == _FAILED else -(-room // _HUGE_PAGE) * _HUGE_PAGE
    if room == _FAILED or _libc.mmap(address, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    array = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(array, _libc.munmap, room, nbytes + _HUGE_PAGE).atexit = False
    return memoryview(array).cast("B")


def populate(mapping: memoryview) -> None:
    """Back a whole pool with pages now. Raises HandoffError."""
    for start in range(0, len(mapping), _PIECE):
        _populate(mapping, start, min(_PIECE, len(mapping) - start))


class Backing:
    """Sees to it that the first bytes of a pool have their pages before they are used, on a thread of its own.

    A page touched for the first time costs its toucher 2 µs: 0.4 ms for a new block of the built-in model, inside a decode step.
    And memory that is not to be had shows here, while what is in use has its pages, and not as a signal that ends the process
    without a word. ``reach`` is cheap and is told how far the pool is in use; it never waits.
    """

    def __init__(self, mapping: memoryview) -> None:
        """Backs the first stretch at once. Raises HandoffError."""
        self._mapping = mapping
        self._backed = 0
        self._target = min(_AHEAD, len(mapping))
        self._failure: HandoffError | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        while self._backed < self._target:
            self._back()
        self._thread = threading.Thread(target=self._run, name="kv-backing", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Backing({self._backed} of {len(self._mapping)} bytes)"

    @property
    def nbytes(self) -> int:
        """From the pool's first byte on, how many have their pages."""
        return self._backed

    def reach(self, nbytes: int) -> None:
        """The first ``nbytes`` are in use: back the stretch after them. Raises HandoffError when there was no memory for some."""
        if self._failure is not None:
            raise self._failure
        target = min(-(-nbytes // _PIECE) * _PIECE + _AHEAD, len(self._mapping))
        if target > self._target:
            with self._changed:
                self._target = target
                self._changed.notify()

    def close(self) -> None:
        """End the thread. The pages stay."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        # Steps come first: what a peer writes into new blocks it can as well back itself.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._backed < self._target)
                if self._is_closed:
                    return
            try:
                self._back()
            except HandoffError as failure:
                self._failure = failure
                return

    def _back(self) -> None:
        nbytes = min(_PIECE, self._target - self._backed)
        _populate(self._mapping, self._backed, nbytes)
        self._backed += nbytes


def _populate(mapping: memoryview, start: int, nbytes: int) -> None:
    """Back ``nbytes`` from ``start``, at most a piece. An older kernel cannot; then pages come as they are touched."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + start
    if nbytes == _HUGE_PAGE:  # where there is one small page the kernel makes a huge one on demand, whatever its settings
        _advise(address, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
        if _libc.madvise(address, nbytes, _MADV_COLLAPSE) == 0:
            return
    _advise(address, nbytes, _MADV_POPULATE_WRITE)


def _advise(address: int, nbytes: int, advice: int) -> None:
    if _libc.madvise(address, nbytes, advice) != 0 and (number := ctypes.get_errno()) != errno.EINVAL:
        raise HandoffError(f"the host has no memory for more of the KV pool ({os.strerror(number)})")
