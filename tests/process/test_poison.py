"""What --kv-poison promises: no slot of a new pool can pass for a number."""

from __future__ import annotations

from pathlib import Path

from tests.process.harness import null_server

NBYTES = 64 << 20  # of each pool of a null server
PIECE = 1 << 20


def own_pool(process_id: int, worker_id: str) -> tuple[int, int]:
    """Where a process has mapped the pool that it made itself: begin and end."""
    for line in Path(f"/proc/{process_id}/maps").read_text().splitlines():
        if "memfd:disagg" in line and line.split("(")[0].rstrip().endswith(worker_id):
            begin, _, end = line.split()[0].partition("-")
            return int(begin, 16), int(end, 16)
    raise AssertionError(f"{worker_id} has no pool")


def test_a_new_pool_is_nan_wherever_nothing_has_been_written() -> None:
    """All bits set is NaN in every floating type: every byte of both pools is 0xFF, but for the blocks of the start-up probe."""
    with null_server("--kv-poison") as running:
        for worker in running.status()["workers"]:
            begin, end = own_pool(worker["pid"], worker["id"])
            with open(f"/proc/{worker['pid']}/mem", "rb") as memory:
                memory.seek(begin)
                num_whole = sum(memory.read(PIECE) == b"\xff" * PIECE for _ in range(begin, end, PIECE))
            assert end - begin == NBYTES
            assert num_whole >= NBYTES // PIECE - 2, "more than a probe has been written"
        assert len(running.complete("from poisoned pools", 20)) == 20
