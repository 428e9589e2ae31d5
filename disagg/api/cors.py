"""Which web pages of other origins may use this server from a browser; none unless the operator says so.

The headers are added while an answer is prepared, so that streams and refusals have them as well: without them a page could
not even read why it was refused.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from disagg.errors import ConfigError

_PREFLIGHT_S = 600  # how long a browser may remember the answer


class Origins:
    """The allowed origins: ``https://a.example, http://localhost:3000``, or ``*`` for all, or none when empty."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError for what is no origin."""
        self._origins = {_origin(part.strip()) for part in text.split(",") if part.strip()}

    def __bool__(self) -> bool:
        return bool(self._origins)

    def allow(self, origin: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        if not self:
            return
        response.headers.add("Vary", "Origin")
        if (origin := request.headers.get("Origin")) and self.allow(origin):
            response.headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"


ORIGINS = web.AppKey("origins", Origins)


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A browser asks before it sends a key or JSON: with OPTIONS, which has neither."""
    is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not is_preflight or not request.app[ORIGINS].allow(request.headers.get("Origin", "")):
        return await handler(request)
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type"),
            "Access-Control-Max-Age": str(_PREFLIGHT_S),
        },
    )


def _origin(text: str) -> str:
    parts = urlsplit(text)
    if text != "*" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query or parts.fragment):
        raise ConfigError(f"server.cors_origins: {text!r} is no origin, such as https://chat.example, and not *")
    return text.lower()
