"""Digests of KV blocks: the proof, for each hand-over, that what decode reads is what prefill wrote.

Prefill digests a block when it gives it to the transport, decode when the commit arrives, before anything reads it. XXH3 finds
damage, not forgery: a worker that wanted to deceive its peer could as well compute wrong bytes in the first place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xxhash import xxh3_64_intdigest

from disagg.handoff.shm import as_blocks
from disagg.kv import KVLayout

BlockDigests = Callable[[Sequence[int]], list[int]]
"""The digests of these blocks of one pool, in their order: 64 bits each, over all bytes of the block."""


def block_digests(pool: memoryview, layout: KVLayout) -> BlockDigests:
    """Digests of blocks of ``pool``, which lies in host memory. Whole blocks, unused slots included: they are copied as well."""
    blocks = as_blocks(pool, layout)
    return lambda numbers: [xxh3_64_intdigest(blocks[number]) for number in numbers]
