"""How blocks get from this worker's pool into a peer's: the seam that memory, shm, CUDA IPC and UCX implement.

The writer pushes into blocks that the peer has reserved; nobody ever reads a peer's memory. One-sided transports (shm) write
them directly. Two-sided ones (UCX) need the peer to ``expect`` the bytes first, and a writer that comes too late finds nobody
who does: it cannot reach memory that has another owner by then.

``tests/conformance`` is the contract's other half: every transport passes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.kv import KVLayout


@dataclass(frozen=True, slots=True)
class Completed:
    """One push has ended, or ``error`` says why not. Its source blocks are not read any more.

    One-sided: its bytes have all arrived. Two-sided: they have left; the peer's Arrived says that they are there.
    """

    dispatch: int
    nbytes: int
    seconds: float  # spent copying
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """Nothing writes the blocks that were expected for ``dispatch`` any more: all are there, or ``error`` says why not."""

    dispatch: int
    error: str | None = None


class Transport(Protocol):
    """One worker's end. Not thread-safe: one caller, which polls ``completed`` when ``fileno`` turns readable."""

    name: str
    is_two_sided: bool
    address: bytes  # what a peer in another process needs to ``connect``, beside the pool's descriptor

    def connect(self, peer: str, epoch: int, layout: KVLayout, num_blocks: int, fd: int, address: bytes) -> None:
        """Open the way to ``peer``'s incarnation ``epoch``; takes over ``fd`` (-1 = none). An earlier epoch's is closed.

        Raises HandoffError, naming both sides, when the layouts differ or the peer cannot be reached.
        """
        ...

    def disconnect(self, peer: str, epoch: int) -> None:
        """Close the way to the peer; pushes still queued for it complete with an error. Unknown peers are ignored."""
        ...

    def push(self, dispatch: int, peer: str, epoch: int, source: Sequence[int], target: Sequence[int], key: int) -> None:
        """Queue the copy of own block ``source[i]`` to the peer's block ``target[i]``. Ends in one Completed, always.

        ``key`` is what the peer's ``expect`` returned. Pushes to one peer complete in the order in which they were queued.
        The source blocks must not change before that.
        """
        ...

    def cancel(self, dispatch: int) -> None:
        """Drop what has not begun. What has begun still completes; what was dropped completes with 0 bytes and no error."""
        ...

    def expect(self, dispatch: int, blocks: Sequence[int]) -> int:
        """Let one writer, who shows the key returned, fill own ``blocks`` once each. Ends in one Arrived, always.

        One-sided: 0, and no Arrived follows, since writers need no permission.
        """
        ...

    def forget(self, dispatch: int) -> None:
        """Expect nothing more for ``dispatch``: its Arrived comes, if it has not yet, as soon as nothing can write its blocks."""
        ...

    def completed(self) -> list[Completed | Arrived]:
        """What has ended since the last call; never blocks. Raises RuntimeError when a bug has ended it all: end the process."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while ``completed`` has something to say; -1 if completions need no waiting."""
        ...

    def close(self) -> None:
        """Finish the copy in progress, drop the rest, close the ways to all peers. Closing twice is safe."""
        ...
