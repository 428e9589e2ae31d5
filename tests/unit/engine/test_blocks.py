"""The block pool's books, driven at random against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from disagg.engine.blocks import BlockPool, BlockState
from disagg.errors import IllegalTransitionError, OutOfBlocksError

NUM_BLOCKS = 12
AMPLE = 8


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders take and give back blocks in any order; the books must always be right."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, AMPLE)
        self.holders: list[tuple[BlockState, list[int]]] = []
        self.contents: dict[bytes, int] = {}
        self.touched: set[int] = set()

    @rule(count=st.integers(0, NUM_BLOCKS + 2), state=st.sampled_from(["reserved", "filling", "in_use"]))
    def allocate(self, count: int, state: str) -> None:
        """Either all the blocks asked for, or an error and none."""
        before = dict(self.pool.counts)
        if count > self.pool.num_available:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count, BlockState(state))
            assert self.pool.counts == before
            return
        num_new = self.num_new(count)
        blocks = self.pool.allocate(count, BlockState(state))
        assert len(set(blocks)) == count
        assert len(set(blocks) - self.touched) == num_new
        held = {block for _, holder in self.holders for block in holder}
        assert not held & set(blocks), "a block that somebody holds was given out again"
        self.touched |= set(blocks)
        self.holders.append((BlockState(state), blocks))

    def num_new(self, count: int) -> int:
        """Blocks never used before among the next ``count``: used ones go first, cached ones before new ones beyond AMPLE."""
        num_touched, cached = len(self.touched), self.pool.counts[BlockState.CACHED]
        lacking = max(0, count - (self.pool.counts[BlockState.FREE] - (NUM_BLOCKS - num_touched)))
        below = min(lacking, max(0, AMPLE - num_touched))
        return below + max(0, lacking - below - cached)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        """RESERVED and FILLING blocks become IN_USE; IN_USE ones cannot again."""
        index = data.draw(st.integers(0, len(self.holders) - 1))
        state, blocks = self.holders[index]
        if state is BlockState.IN_USE:
            if blocks:
                with pytest.raises(IllegalTransitionError):
                    self.pool.use(blocks[:1])
            return
        self.pool.use(blocks)
        self.holders[index] = (BlockState.IN_USE, blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), digest=st.integers(0, 5))
    def publish(self, data: st.DataObject, digest: int) -> None:
        """Only whole blocks can be published."""
        state, blocks = data.draw(st.sampled_from(self.holders))
        if not blocks:
            return
        if state is not BlockState.IN_USE:
            with pytest.raises(IllegalTransitionError):
                self.pool.publish(blocks[0], bytes([digest]))
        else:
            self.pool.publish(blocks[0], bytes([digest]))

    @rule(digests=st.lists(st.integers(0, 5), max_size=3))
    def match(self, digests: list[int]) -> None:
        """What is found is IN_USE and stays findable while it is held."""
        blocks = self.pool.match([bytes([d]) for d in digests])
        assert self.pool.match([bytes([d]) for d in digests]) == blocks
        self.pool.release(blocks)
        if blocks:
            self.holders.append((BlockState.IN_USE, blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        _, blocks = self.holders.pop(index)
        self.pool.release(blocks)

    @invariant()
    def every_block_is_in_exactly_one_state(self) -> None:
        assert sum(self.pool.counts.values()) == NUM_BLOCKS
        held = {block for _, blocks in self.holders for block in blocks}
        owned = NUM_BLOCKS - self.pool.counts[BlockState.FREE] - self.pool.counts[BlockState.CACHED]
        assert owned == len(held)
        assert self.pool.is_idle == (not held)

    @invariant()
    def memory_is_taken_from_the_beginning_on(self) -> None:
        assert self.touched == set(range(self.pool.num_touched))

    def teardown(self) -> None:
        for _, blocks in self.holders:
            self.pool.release(blocks)
        assert self.pool.is_idle


TestBlockPool = BlockPoolMachine.TestCase


def test_release_twice_is_our_bug_and_says_so() -> None:
    """A block can be given back only as often as it was taken."""
    pool = BlockPool(2)
    blocks = pool.allocate(1, BlockState.IN_USE)
    pool.release(blocks)
    with pytest.raises(IllegalTransitionError, match="released twice"):
        pool.release(blocks)


def test_eviction_takes_the_least_recently_used_tail_first() -> None:
    """The tail of an old prefix goes before its head, and a prefix hit since then goes last."""
    pool = BlockPool(4)
    blocks = pool.allocate(4, BlockState.IN_USE)
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]))
    pool.release(blocks[:2])
    pool.release(blocks[2:])
    pool.release(pool.match([bytes([0])]))
    assert pool.allocate(1, BlockState.IN_USE) == [blocks[1]]
    assert pool.allocate(1, BlockState.IN_USE) == [blocks[3]]
    assert pool.match([bytes([0])]) == [blocks[0]]


def test_repr_shows_the_books() -> None:
    """The pool's repr is good enough to assert on and to log."""
    pool = BlockPool(3)
    pool.allocate(1, BlockState.RESERVED)
    assert repr(pool) == "BlockPool(free 2, reserved 1, filling 0, in_use 0, cached 0)"
