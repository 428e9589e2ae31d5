"""Every core has one owner and at most one borrower, on the same memory node; what a worker wants stands where all see it."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.cores import Cores, Occupancy, Turns, host_cpus, share_out


@st.composite
def hosts(draw: st.DrawFn) -> list[list[int]]:
    """Cores by memory node, numbered across the nodes as hosts with hyper-threads do."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    numbers = draw(st.permutations(range(sum(sizes))))
    bounds = [0, *itertools.accumulate(sizes)]
    return [sorted(numbers[begin:end]) for begin, end in itertools.pairwise(bounds)]


roles = st.builds(lambda prefill, decode: ["prefill"] * prefill + ["decode"] * decode, st.integers(0, 4), st.integers(0, 4))


@given(hosts(), roles, st.booleans())
def test_every_core_has_one_owner_and_at_most_one_borrower(nodes: list[list[int]], roles: list[str], lend: bool) -> None:
    """To the last core, where there is one for each worker; else nobody has any. A borrower's role is not its owner's.

    A head whose nodes have all the workers has none itself.
    """
    shares = share_out(roles, nodes, lend=lend)
    num_cpus = sum(map(len, nodes))
    owner = {cpu: role for role, cores in zip(roles, shares, strict=True) for cpu in cores.own}
    assert sorted(itertools.chain(*(cores.own for cores in shares))) == list(range(num_cpus if 0 < len(roles) <= num_cpus else 0))
    lent = list(itertools.chain(*(cores.lent for cores in shares)))
    assert len(lent) == len(set(lent))
    assert all(owner[cpu] != role for role, cores in zip(roles, shares, strict=True) for cpu in cores.lent)
    assert lend or not lent


@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 8))
def test_what_a_worker_uses_is_on_one_memory_node(num_nodes: int, pairs_per_node: int, cores_per_pair: int) -> None:
    """With a pair of workers for each node, or several: there each role can use all the cores of the node."""
    size = pairs_per_node * cores_per_pair
    nodes = [list(range(node * size, (node + 1) * size)) for node in range(num_nodes)]
    roles = ["prefill"] * num_nodes * pairs_per_node + ["decode"] * num_nodes * pairs_per_node
    shares = share_out(roles, nodes, lend=True)
    assert all({cpu // size for cpu in cores.own + cores.lent} == {cores.own[0] // size} for cores in shares)
    for role in ("prefill", "decode"):
        used = [cpu for at, cores in zip(roles, shares, strict=True) if at == role for cpu in cores.own + cores.lent]
        assert sorted(used) == list(range(num_nodes * size))


def test_two_workers_on_two_cores_have_one_each_and_lend_it_to_each_other() -> None:
    """The smallest host."""
    assert share_out(["prefill", "decode"], [[0, 1]], lend=True) == [Cores([0], [1]), Cores([1], [0])]


def test_two_workers_on_two_memory_nodes_have_one_each_and_lend_nothing() -> None:
    """Memory of the other node is farther than idle cores are worth."""
    assert share_out(["prefill", "decode"], [[0, 2], [1, 3]], lend=True) == [Cores([0, 2], []), Cores([1, 3], [])]


def test_workers_of_one_kind_lend_nothing() -> None:
    """Colocated workers all do the same, so that they all have work at the same time."""
    assert share_out(["mixed", "mixed"], [[0, 1, 2, 3]], lend=True) == [Cores([0, 1], []), Cores([2, 3], [])]


@pytest.mark.parametrize(
    ("lists", "allowed", "expected"),
    [
        ({"node0": "0-1,4-5", "node1": "2-3,6-7"}, range(8), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"node0": "0-1,4-5", "node1": "2-3,6-7"}, [1, 2, 6], [[1], [2, 6]]),
        ({"node0": "0-1", "node1": "2-3", "node2": ""}, [0, 1], [[0, 1]]),
        ({"node2": "4", "node10": "0"}, [0, 4], [[4], [0]]),
        ({}, [0, 3], [[0, 3]]),
        ({"node0": "0-1"}, [0, 1, 2], [[0, 1, 2]]),
    ],
    ids=["two nodes", "a part of each", "only one", "in the order of their numbers", "no nodes", "nodes that are hidden"],
)
def test_the_hosts_cores_are_read_by_memory_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: dict[str, str], allowed: list[int], expected: list[list[int]]
) -> None:
    """Those that this process may use, all of them; without nodes to be seen they are one."""
    for node, text in lists.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    assert host_cpus(tmp_path) == expected


def test_what_one_process_marks_all_see() -> None:
    """Through the descriptor that a worker inherits."""
    parent = Occupancy()
    worker = Occupancy(os.dup(parent.fd))
    worker.mark([1, 3], True)
    assert repr(parent) == "Occupancy([1, 3])"
    parent.mark([3], False)
    assert repr(worker) == "Occupancy([1])"


def test_steps_keep_their_pace_only_while_others_want_their_cores() -> None:
    """Then the next one may begin that long after the last one began; without a pace, or with nobody else at work, at once."""
    occupancy = Occupancy()
    cores = Cores(own=[0, 1], lent=[2, 3])
    paced, unpaced = Turns(occupancy, cores, 0.5), Turns(occupancy, cores, 0.0)
    assert paced.next_at(7.0) == 0.0
    occupancy.mark([3], True)
    assert paced.next_at(7.0) == 7.5
    assert unpaced.next_at(7.0) == 0.0


def test_a_turn_begins_when_the_borrower_has_left_and_waits_for_none_for_long() -> None:
    """Who owns a core says that it is wanted, and does not compute beside a borrower that ends its unit of work."""
    owners = Turns(Occupancy(), Cores([5], []), 0.0)
    occupancy = owners._occupancy
    used = (ctypes.c_uint32 * 6).from_address(occupancy.addresses[1])
    used[5] = 1
    leaving = threading.Timer(0.001, used.__setitem__, (5, 0))
    leaving.start()
    owners.begin()
    assert occupancy.is_any_wanted([5])
    leaving.join()
    owners.end()
    used[5] = 1  # of a worker that died at work: nobody will take it back
    owners.begin()
    owners.end()
    assert not occupancy.is_any_wanted([5])
    occupancy.forget(Cores([], [5]))
    assert not occupancy.is_any_used([5])
