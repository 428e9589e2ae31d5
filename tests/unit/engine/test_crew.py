"""Cores that are lent to a crew: it computes there while their owner is idle, and the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disagg.kernels.crew import borrow
from disagg.kernels.native import TYPES, Crew, Matrix, best_library

from disagg.cores import Occupancy

pytestmark = pytest.mark.skipif(best_library() is None, reason="the kernels were not built: needs a C++ compiler")

CPU = max(os.sched_getaffinity(0))


@pytest.fixture
def occupancy() -> Iterator[Occupancy]:
    occupancy = Occupancy()
    borrow([CPU], *occupancy.addresses)
    yield occupancy
    borrow([], 0, 0)


class Borrower:
    """A crew with one thread of its own, and one on the core that is lent."""

    def __init__(self) -> None:
        lib, before = best_library(), set(os.listdir("/proc/self/task"))
        assert lib is not None
        self.crew = Crew(lib, 1)
        (self.thread,) = set(os.listdir("/proc/self/task")) - before
        weights = torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
        self._matrix = Matrix(self.crew, TYPES["F32"], weights.data_ptr(), (4096, 512))
        self._x = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))

    def product(self) -> torch.Tensor:
        return self._matrix.product(self._x)

    def num_runs(self) -> int:
        """How often its thread on the lent core was put on it."""
        return int(Path(f"/proc/self/task/{self.thread}/schedstat").read_text().split()[2])

    def helps_in(self, num_products: int) -> bool:
        before = self.num_runs()
        for _ in range(num_products):
            self.product()
        return self.num_runs() > before


def test_a_lent_core_is_used_while_its_owner_is_idle(occupancy: Occupancy) -> None:
    """And no longer once it is wanted; it comes back. The results are the same bits."""
    borrower = Borrower()
    alone = Crew(borrower.crew.lib, 1)
    assert os.sched_getaffinity(int(borrower.thread)) == {CPU}
    expected = borrower.product()
    assert borrower.helps_in(2000)
    occupancy.mark([CPU], True)
    borrower.product()  # it leaves
    while borrower.helps_in(1):  # it may have been about to
        pass
    assert not borrower.helps_in(200)
    assert torch.equal(borrower.product(), expected)
    occupancy.mark([CPU], False)
    assert borrower.helps_in(2000)
    del alone


def test_a_crew_ends_also_while_the_core_is_wanted(occupancy: Occupancy) -> None:
    """Its thread there sleeps, and is woken to end."""
    borrower = Borrower()
    occupancy.mark([CPU], True)
    borrower.product()
    thread = borrower.thread
    del borrower
    assert thread not in os.listdir("/proc/self/task")
