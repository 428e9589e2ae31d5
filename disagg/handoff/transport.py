"""How blocks get from this worker's pool into a peer's: the seam that memory, shm, CUDA IPC and UCX implement.

The writer pushes into blocks that the peer has reserved; nobody ever reads a peer's memory. ``tests/conformance`` is the
contract's other half: every transport passes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.kv import KVLayout


@dataclass(frozen=True, slots=True)
class Completed:
    """One push has ended: its bytes have all arrived, or ``error`` says why not. Its blocks are not written any more."""

    dispatch: int
    nbytes: int
    seconds: float  # spent copying
    error: str | None = None


class Transport(Protocol):
    """The writing side. Not thread-safe: one caller, which polls ``completed`` when ``fileno`` turns readable."""

    name: str

    def connect(self, peer: str, epoch: int, layout: KVLayout, num_blocks: int, fd: int) -> None:
        """Open the pool of ``peer``'s incarnation ``epoch``; takes over ``fd``. An earlier epoch's pool is closed.

        Raises HandoffError, naming both sides, when the layouts differ or the pool cannot be opened.
        """
        ...

    def disconnect(self, peer: str, epoch: int) -> None:
        """Close the peer's pool; pushes still queued for it complete with an error. Unknown peers are ignored."""
        ...

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Queue the copy of own block ``source[i]`` to the peer's block ``target[i]``. Ends in one Completed, always.

        Pushes complete in the order in which they were queued. The source blocks must not change before that.
        """
        ...

    def cancel(self, dispatch: int) -> None:
        """Drop what has not begun. What has begun still completes; what was dropped completes with 0 bytes and no error."""
        ...

    def completed(self) -> list[Completed]:
        """What has ended since the last call; never blocks."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while ``completed`` has something to say; -1 if completions need no waiting."""
        ...

    def close(self) -> None:
        """Finish the copy in progress, drop the rest, close every pool. Closing twice is safe."""
        ...
