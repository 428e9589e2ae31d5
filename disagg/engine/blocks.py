"""The books of a worker's KV pool: who owns each block, and which finished blocks can be found again by their content.

    FREE ─▶ RESERVED ─▶ IN_USE        set aside for a peer to write, then read by a decoding sequence
    FREE ─▶ FILLING  ─▶ IN_USE        being computed here, then whole
    FREE ─▶ IN_USE                    growth of a decoding sequence
    IN_USE ─▶ CACHED ─▶ IN_USE | FREE   finished and findable: hit again, or evicted (least recently used first)

A block is in exactly one state; ``free + reserved + filling + in_use + cached == num_blocks`` always holds. Whole blocks are
published under a chained digest (disagg.kv.block_hashes) and may then be shared: each holder has a reference.
A RESERVED block belongs to its dispatch until the writer has quiesced, however the dispatch ends: that is the caller's
duty, since only the hand-over knows the writer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum

from disagg.errors import IllegalTransitionError, OutOfBlocksError


class BlockState(StrEnum):
    FREE = "free"
    RESERVED = "reserved"
    FILLING = "filling"
    IN_USE = "in_use"
    CACHED = "cached"


_MOVES = {
    BlockState.FREE: {BlockState.RESERVED, BlockState.FILLING, BlockState.IN_USE},
    BlockState.RESERVED: {BlockState.IN_USE, BlockState.FREE},
    BlockState.FILLING: {BlockState.IN_USE, BlockState.FREE},
    BlockState.IN_USE: {BlockState.CACHED, BlockState.FREE},
    BlockState.CACHED: {BlockState.IN_USE, BlockState.FREE},
}


class BlockPool:
    """Ownership of ``num_blocks`` blocks. Pure book-keeping: it never touches the memory.

    Memory is taken from the lowest block on, as it is first used. Once ``ample`` blocks have been (0 = all), cached ones are
    evicted before more is taken, so that only sequences that really run at once can make the pool larger.
    """

    def __init__(self, num_blocks: int, ample: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_touched = 0  # no block from this number on has ever been given out
        self._ample = ample or num_blocks
        self.counts = dict.fromkeys(BlockState, 0)
        self.counts[BlockState.FREE] = num_blocks
        self._state = [BlockState.FREE] * num_blocks
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # given out from the end: those used before first, then the lowest
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return "BlockPool(" + ", ".join(f"{state} {count}" for state, count in self.counts.items()) + ")"

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could give now: free, or cached and therefore evictable."""
        return len(self._free) + len(self._cached)

    @property
    def is_idle(self) -> bool:
        return self.num_available == self.num_blocks

    def allocate(self, count: int, state: BlockState) -> list[int]:
        """Take ``count`` blocks into ``state``, evicting cached ones as needed. Raises OutOfBlocksError, taking none."""
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} KV blocks asked for, {self.num_available} of {self.num_blocks} available")
        while self._cached and self._num_untouched(count) > max(0, self._ample - self.num_touched):
            self._evict_oldest()
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._move(block, state)
            self._refs[block] = 1
        self.num_touched = max(self.num_touched, max(blocks, default=-1) + 1)
        return blocks

    def use(self, blocks: Iterable[int]) -> None:
        """RESERVED or FILLING blocks are whole now and are read by a sequence."""
        for block in blocks:
            self._move(block, BlockState.IN_USE)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest published prefix of ``digests``, each with a reference taken for the caller."""
        blocks = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            if self._state[block] is BlockState.CACHED:
                del self._cached[block]
                self._move(block, BlockState.IN_USE)
            self._refs[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, block: int, digest: bytes) -> None:
        """Make a whole IN_USE block findable. A digest that another block already has stays with that one."""
        if self._state[block] is not BlockState.IN_USE:
            raise IllegalTransitionError(f"block {block} is {self._state[block]}, only a whole block in use can be published")
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block. The last one makes it CACHED if it was published, else FREE.

        Later blocks are given back first, so that eviction takes the tail of a prefix before its head.
        """
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise IllegalTransitionError(f"block {block} released twice (it is {self._state[block]})")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._digest_of:
                self._move(block, BlockState.CACHED)
                self._cached[block] = None
            else:
                self._move(block, BlockState.FREE)
                self._free.append(block)

    def _num_untouched(self, count: int) -> int:
        """How many of the next ``count`` blocks would be ones that were never used; not above 0: none."""
        return count - (len(self._free) - (self.num_blocks - self.num_touched))

    def _evict_oldest(self) -> None:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        self._move(block, BlockState.FREE)
        self._free.append(block)

    def _move(self, block: int, to: BlockState) -> None:
        state = self._state[block]
        if to not in _MOVES[state]:
            raise IllegalTransitionError(f"block {block} cannot go from {state} to {to}")
        self._state[block] = to
        self.counts[state] -= 1
        self.counts[to] += 1
