"""Proof that bytes get from one worker's pool into another's: a known pattern is pushed, timed, and digested on both sides.

It runs for each pair before the pair serves, so that a broken or silently slow path shows at start, not in a user's text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from disagg.engine.blocks import BlockPool, BlockState
from disagg.handoff.shm import as_blocks
from disagg.handoff.transport import Completed
from disagg.handoff.transports import Transports
from disagg.kv import KVLayout
from disagg.messages import Message, Probe, Probed


def digest(pool: memoryview, layout: KVLayout, blocks: Sequence[int]) -> bytes:
    """16 bytes that identify the contents of ``blocks``, in order."""
    return hashlib.blake2b(as_blocks(pool, layout)[list(blocks)].tobytes(), digest_size=16).digest()


class Prober:
    """The writing side."""

    def __init__(
        self, books: BlockPool, layout: KVLayout, pool: memoryview, transports: Transports, send: Callable[[Message], None]
    ) -> None:
        self._books = books
        self._layout = layout
        self._pool = pool
        self._transports = transports
        self._send = send
        self._running: dict[int, list[int]] = {}  # dispatch → own blocks

    def start(self, message: Probe) -> None:
        """Raises OutOfBlocksError when this worker has no blocks to spare for the pattern."""
        if message.dispatch in self._running:
            return  # told twice
        blocks = self._books.allocate(len(message.blocks), BlockState.FILLING)
        rng = np.random.default_rng(message.dispatch)
        as_blocks(self._pool, self._layout)[blocks] = rng.integers(
            0, 256, (len(blocks), self._layout.block_nbytes), dtype=np.uint8
        )
        self._running[message.dispatch] = blocks
        self._transports.push(message.dispatch, message.peer, message.epoch, blocks, message.blocks, message.key)

    def copied(self, completed: Completed) -> None:
        blocks = self._running.pop(completed.dispatch)
        expected = digest(self._pool, self._layout, blocks)
        self._books.release(blocks)
        self._send(Probed(completed.dispatch, expected, completed.nbytes, completed.seconds, completed.error))
