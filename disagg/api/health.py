"""What operators and their tools ask: is it alive, is it ready, how does it stand, which version is it.

``/livez`` answers as long as the event loop turns. ``/readyz`` and ``/health`` mean that a request would be served.
"""

from __future__ import annotations

from importlib.metadata import version

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from disagg.api.answers import json_answer
from disagg.api.services import SERVICES


async def livez(http: web.Request) -> web.Response:
    return json_answer({"status": "ok"})


async def readyz(http: web.Request) -> web.Response:
    reasons = http.app[SERVICES].not_ready()
    if reasons:
        return json_answer({"status": "unavailable", "reasons": reasons}, status=503)
    return json_answer({"status": "ok", "reasons": []})


async def metrics(http: web.Request) -> web.Response:
    return web.Response(body=generate_latest(http.app[SERVICES].registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def get_version(http: web.Request) -> web.Response:
    return json_answer({"version": version("disagg")})


async def status(http: web.Request) -> web.Response:
    return json_answer(http.app[SERVICES].status())
