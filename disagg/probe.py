"""Proof that bytes get from one worker's pool into another's: a known pattern is pushed, timed, and digested on both sides.

It runs for each pair before the pair serves, so that a broken or silently slow path shows at start, not in a user's text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from disagg.engine.blocks import BlockPool, BlockState
from disagg.handoff.shm import as_blocks
from disagg.handoff.transport import Completed, Transport
from disagg.kv import KVLayout
from disagg.messages import Message, Probe, Probed


def digest(pool: memoryview, layout: KVLayout, blocks: Sequence[int]) -> bytes:
    """16 bytes that identify the contents of ``blocks``, in order."""
    return hashlib.blake2b(as_blocks(pool, layout)[list(blocks)].tobytes(), digest_size=16).digest()


@dataclass(slots=True)
class _Running:
    message: Probe
    blocks: list[int]
    is_warm: bool = False


class Prober:
    """The writing side. Each probe pushes twice: the first copy touches both pools' pages, the second is timed."""

    def __init__(
        self, books: BlockPool, layout: KVLayout, pool: memoryview, transport: Transport, send: Callable[[Message], None]
    ) -> None:
        self._books = books
        self._layout = layout
        self._pool = pool
        self._transport = transport
        self._send = send
        self._running: dict[int, _Running] = {}

    def start(self, message: Probe) -> None:
        """Raises OutOfBlocksError when this worker has no blocks to spare for the pattern."""
        if message.dispatch in self._running:
            return  # told twice
        blocks = self._books.allocate(len(message.blocks), BlockState.FILLING)
        rng = np.random.default_rng(message.dispatch)
        as_blocks(self._pool, self._layout)[blocks] = rng.integers(
            0, 256, (len(blocks), self._layout.block_nbytes), dtype=np.uint8
        )
        self._running[message.dispatch] = _Running(message, blocks)
        self._push(message, blocks)

    def copied(self, completed: Completed) -> None:
        running = self._running[completed.dispatch]
        if completed.error is None and not running.is_warm:
            running.is_warm = True
            self._push(running.message, running.blocks)
            return
        del self._running[completed.dispatch]
        expected = digest(self._pool, self._layout, running.blocks)
        self._books.release(running.blocks)
        self._send(Probed(completed.dispatch, expected, completed.nbytes, completed.seconds, completed.error))

    def _push(self, message: Probe, blocks: list[int]) -> None:
        self._transport.push(message.dispatch, message.peer, message.epoch, blocks, message.blocks)
