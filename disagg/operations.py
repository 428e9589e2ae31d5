"""What an operator may do to the requests of a running server: see them, let them finish, admit again, end one.

Draining by command is not ending: the server stays, not ready, until it is told to resume or gets a signal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from disagg.errors import InvalidRequestError
from disagg.router import Router

_ENDED = "the operator has ended this request"


class Operations:
    def __init__(self, router: Router, clock: Callable[[], float], on_resumed: Callable[[], None]) -> None:
        """``clock`` is the router's; ``on_resumed`` is called when requests are admitted again."""
        self._router = router
        self._clock = clock
        self._on_resumed = on_resumed
        self._resumed = asyncio.Event()
        self.is_ending = False
        """The server ends: there is no resuming."""

    def requests(self) -> list[dict[str, Any]]:
        """Those that have not ended, choice by choice."""
        now = self._clock()
        return [
            {
                "id": stream.request.id,
                "state": stream.state,
                "priority": stream.request.priority,
                "prompt_tokens": len(stream.request.prompt),
                "tokens": len(stream.tokens),
                "age_s": round(now - stream.entered[0][1], 2),
            }
            for stream in self._router.streams()
        ]

    async def drain(self, wait_s: float) -> bool:
        """Admit nothing more. Whether every stream had ended after at most ``wait_s``, or when somebody resumed."""
        self._resumed.clear()
        drained = asyncio.ensure_future(self._router.drain())
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait({drained, resumed}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            return drained.done()
        finally:
            drained.cancel()
            resumed.cancel()

    def resume(self) -> None:
        """Raises InvalidRequestError when the server is about to end."""
        if self.is_ending:
            raise InvalidRequestError("the server is ending", code="ending", status=409)
        self._router.is_draining = False
        self._resumed.set()
        self._on_resumed()

    def abort(self, request_id: str) -> int:
        """End a request, or one of its choices, whose ids are its own and a number. How many choices that was."""
        streams = [s for s in self._router.streams() if request_id in (s.request.id, s.request.id.rpartition("-")[0])]
        for stream in streams:
            stream.abort(_ENDED)
        return len(streams)
