"""What operators and their tools ask: is it alive, is it ready, how does it stand, which version is it.

``/livez`` answers as long as the event loop turns. ``/readyz`` and ``/health`` mean that a request would be served.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import orjson
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from disagg.api.services import SERVICES


async def livez(http: web.Request) -> web.Response:
    return _answer({"status": "ok"})


async def readyz(http: web.Request) -> web.Response:
    reasons = http.app[SERVICES].not_ready()
    if reasons:
        return _answer({"status": "unavailable", "reasons": reasons}, status=503)
    return _answer({"status": "ok", "reasons": []})


async def metrics(http: web.Request) -> web.Response:
    return web.Response(body=generate_latest(http.app[SERVICES].registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def get_version(http: web.Request) -> web.Response:
    return _answer({"version": version("disagg")})


async def status(http: web.Request) -> web.Response:
    return _answer(http.app[SERVICES].status())


def _answer(body: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
