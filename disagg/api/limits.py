"""How much one API key may ask for: requests served at once, and requests per minute.

A key begins with a full minute's requests and earns them back evenly (a token bucket). Without keys all clients share one
allowance. What is over it is a 429 that says when to come back, before the body is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from disagg.api.services import KEY_NAME
from disagg.errors import OverloadedError

_RETRY_STREAM_S = 1.0  # nobody knows when one of the running streams ends


@dataclass(slots=True)
class _Allowance:
    requests: float
    counted_at: float
    num_running: int = 0


class Limits:
    """What each key has left. A limit of 0 is none."""

    def __init__(self, *, max_streams: int, requests_per_minute: int) -> None:
        self._max_streams = max_streams
        self._per_minute = requests_per_minute
        self._allowances: dict[str, _Allowance] = {}

    @contextmanager
    def admitted(self, key: str, now: float) -> Iterator[None]:
        """Within, the request counts as running. ``now`` in seconds. Raises OverloadedError."""
        allowance = self._allowances.setdefault(key, _Allowance(self._per_minute, now))
        if self._max_streams and allowance.num_running >= self._max_streams:
            raise OverloadedError(f"{self._max_streams} requests at once are allowed for a key", retry_after_s=_RETRY_STREAM_S)
        if self._per_minute:
            earned = (now - allowance.counted_at) * self._per_minute / 60
            allowance.requests = min(self._per_minute, allowance.requests + earned)
            allowance.counted_at = now
            if allowance.requests < 1:
                left_s = (1 - allowance.requests) * 60 / self._per_minute
                raise OverloadedError(f"{self._per_minute} requests per minute are allowed for a key", retry_after_s=left_s)
            allowance.requests -= 1
        allowance.num_running += 1
        try:
            yield
        finally:
            allowance.num_running -= 1


LIMITS = web.AppKey("limits", Limits)


@web.middleware
async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """POST is what costs something: all generation, and tokenising."""
    if request.method != "POST":
        return await handler(request)
    with request.app[LIMITS].admitted(request.get(KEY_NAME, ""), asyncio.get_running_loop().time()):
        return await handler(request)
