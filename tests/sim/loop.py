"""An event loop on a virtual clock: when nothing is ready it jumps to the next timer, so minutes pass in milliseconds.

Callbacks run in a fixed order, so a run repeats exactly. A loop that has nothing left to do while something is still
awaited has found a hang, and says so instead of sleeping for ever.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(Exception):
    """Something is awaited that nothing can bring about any more."""


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise DeadlockError("nothing is scheduled, but not all has ended")
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on a loop of its own. Raises DeadlockError for a hang."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
