"""Transfers as runs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.handoff.plan import runs


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), unique_by=(lambda p: p[0], lambda p: p[1])))
def test_runs_cover_every_block_exactly_once_in_order(pairs: list[tuple[int, int]]) -> None:
    """Unrolled, the runs are the pairs that went in; neighbours are merged."""
    source, target = [p[0] for p in pairs], [p[1] for p in pairs]
    planned = runs(source, target)
    unrolled = [(run.source + i, run.target + i) for run in planned for i in range(run.num_blocks)]
    assert unrolled == pairs
    for run, after in itertools.pairwise(planned):
        assert (run.source + run.num_blocks, run.target + run.num_blocks) != (after.source, after.target)


def test_lengths_must_agree() -> None:
    """A plan for more sources than targets is refused."""
    with pytest.raises(ValueError, match="zip"):
        runs([1, 2], [3])
