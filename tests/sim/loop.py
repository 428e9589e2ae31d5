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


_BEHIND_S = 1e-9  # a jump ends behind the timer, not a rounding error before it: who looks at the clock then sees it due


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        # With nothing registered but the loop's own wake-up pipe, the kernel need not be asked.
        ready = super().select(0) if len(self.get_map()) > 1 else []
        if not ready:
            if timeout is None:
                raise DeadlockError("nothing is scheduled, but not all has ended")
            self.now += timeout + _BEHIND_S if timeout > 0 else 0.0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on a loop of its own. Raises DeadlockError for a hang, and what a callback raises."""
    errors: list[Exception] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        task: asyncio.Task[T] | None = None

        def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            errors.append(context.get("exception") or RuntimeError(context["message"]))
            if task is not None:
                task.cancel()

        async def run() -> T:
            nonlocal task
            task = asyncio.current_task()
            return await main

        runner.get_loop().set_exception_handler(failed)
        try:
            return runner.run(run())
        finally:
            if errors:
                raise errors[0]
