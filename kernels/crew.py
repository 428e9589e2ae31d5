"""The cores that are lent to this process, for the threads of the compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_void_p

from disagg.kernels.native import best_library


def borrow(cpus: Sequence[int], wanted: int, used: int) -> None:
    """Give every ``Crew`` that is made from now on a thread on each of ``cpus`` besides its own.

    ``wanted``, ``used``: addresses of a uint32 for each core of the host, which must stay valid: not 0 while its owner wants it,
    and while such a thread is at work on it.
    """
    if (lib := best_library()) is not None:
        lib.disagg_borrow((c_int * len(cpus))(*cpus), c_int(len(cpus)), c_void_p(wanted), c_void_p(used))
