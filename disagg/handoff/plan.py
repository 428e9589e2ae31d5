"""Which bytes go where: a transfer as a short list of contiguous runs. Pure.

Both pools have the same layout (peers compare fingerprints first), so a block is one contiguous piece on both sides and
neighbouring blocks that are neighbours on both sides are copied as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """``num_blocks`` blocks from ``source`` on in the writer's pool to ``target`` on in the peer's."""

    source: int
    target: int
    num_blocks: int


def runs(source: Sequence[int], target: Sequence[int]) -> list[Run]:
    """Block ``source[i]`` to block ``target[i]``, merged. Raises ValueError when the two differ in length."""
    merged: list[Run] = []
    for src, dst in zip(source, target, strict=True):
        if merged:
            last = merged[-1]
            if (src, dst) == (last.source + last.num_blocks, last.target + last.num_blocks):
                merged[-1] = last._replace(num_blocks=last.num_blocks + 1)
                continue
        merged.append(Run(src, dst, 1))
    return merged
