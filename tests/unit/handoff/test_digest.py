"""Digests of KV blocks: equal for equal bytes, different for any byte that differs."""

from __future__ import annotations

import random

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from disagg.handoff.digest import block_digests
from disagg.kv import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, block_size=4, head_dim=8, dtype="float32", model="x")
NUM_BLOCKS = 6
NBYTES = NUM_BLOCKS * LAYOUT.block_nbytes
BYTES = random.Random(1).randbytes(NBYTES)


def test_a_digest_is_xxh3_over_the_whole_block_in_the_order_asked_for() -> None:
    """Any other reader of the same bytes gets the same 64 bits."""
    found = block_digests(memoryview(BYTES), LAYOUT)([4, 0, 4])
    whole = [BYTES[begin : begin + LAYOUT.block_nbytes] for begin in range(0, NBYTES, LAYOUT.block_nbytes)]
    assert found == [xxhash.xxh3_64(whole[number]).intdigest() for number in (4, 0, 4)]
    assert len(set(found)) == 2


def test_digests_are_of_the_bytes_as_they_are_now() -> None:
    """The pool is written all the time: a digest is taken when it is asked for."""
    pool = memoryview(bytearray(BYTES))
    digests = block_digests(pool, LAYOUT)
    before = digests([1])
    pool[LAYOUT.block_nbytes] ^= 1
    assert digests([1]) != before


@given(st.integers(0, NBYTES - 1), st.integers(1, 255))
def test_any_changed_byte_shows_in_its_block_and_in_no_other(place: int, difference: int) -> None:
    """Single bits and whole bytes, at the borders of blocks too."""
    pool = bytearray(BYTES)
    pool[place] ^= difference
    numbers = list(range(NUM_BLOCKS))
    before, after = (block_digests(memoryview(memory), LAYOUT)(numbers) for memory in (BYTES, pool))
    assert [number for number in numbers if before[number] != after[number]] == [place // LAYOUT.block_nbytes]


def test_no_blocks_have_no_digests() -> None:
    """Everything in decode's prefix cache: nothing is pushed and nothing is compared."""
    assert block_digests(memoryview(BYTES), LAYOUT)([]) == []
