"""Server-sent events: one ``data: {json}`` line and an empty line per event, where a dialect has it under an ``event:`` line.

The response begins with its first event, so that a failure before it is still a real HTTP status. What ends the stream leaves
in one write, because official clients close the socket when they have read it. A stream that is silent for ``keepalive_s``
says so, in a comment or an event of no meaning: proxies cut connections that look dead during a long prefill.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import orjson
from aiohttp import web

COMMENT = b": keepalive\n\n"

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the stream
}


def json_text(text: str) -> bytes:
    """``text`` as a JSON string that holds nothing that any client takes for the end of a line.

    JSON escapes the ASCII ones. Several HTTP clients also split at NEL, LINE SEPARATOR and PARAGRAPH SEPARATOR.
    """
    encoded = orjson.dumps(text)
    return encoded if text.isascii() else _escape_line_ends(encoded)


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + _escape_line_ends(orjson.dumps(body)) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """An event whose name is its ``type``."""
    return b"event: %s\n%s" % (body["type"].encode(), event(body))


def _escape_line_ends(encoded: bytes) -> bytes:
    return encoded.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


class EventStream:
    """One SSE answer. An async context manager: it owns the task that sends ``keepalive`` while nothing else is sent.

    ``send`` and ``finish`` raise ConnectionError when the client has gone, and wait when it reads slowly: at most aiohttp's
    64 KiB and the transport's own buffer are held for it.
    """

    def __init__(self, request: web.Request, *, keepalive_s: float, keepalive: bytes) -> None:
        self._request = request
        self._keepalive_s = keepalive_s
        self._keepalive = keepalive
        self._response = web.StreamResponse(headers=_HEADERS)
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()

    @property
    def has_begun(self) -> bool:
        """Whether status 200 is on its way, so that a failure can only be an event."""
        return self._response.prepared

    async def __aenter__(self) -> Self:
        self._keeper = self._loop.create_task(self._speak_when_silent())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._keeper.cancel()
        await asyncio.wait([self._keeper])

    async def send(self, events: bytes) -> None:
        self._last_sent = self._loop.time()
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(events)

    async def finish(self, events: bytes) -> web.StreamResponse:
        """Send ``events`` and the end of the body in one write."""
        self._keeper.cancel()  # anything after the end of the body would break the connection
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write_eof(events)
        return self._response

    async def _speak_when_silent(self) -> None:
        with suppress(ConnectionError):  # the client has gone: aiohttp cancels the one who serves it
            while True:
                silence_left = self._last_sent + self._keepalive_s - self._loop.time()
                if silence_left > 0:
                    await asyncio.sleep(silence_left)
                else:
                    await self.send(self._keepalive)
