"""A request's body, turned into what an endpoint works on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from disagg.api.services import SERVICES, Services

LARGE_BODY = 8 * 1024
"""Bytes. A larger body is parsed and tokenised in a thread: at about 0.2 ms per KB, running streams would feel it."""

Plan = TypeVar("Plan")


async def read(http: web.Request, plan: Callable[[bytes, Services], Plan]) -> Plan:
    """What ``plan`` makes of the body. Raises what ``plan`` raises, and aiohttp's refusals of a body it cannot read."""
    raw = await http.read()
    services = http.app[SERVICES]
    return plan(raw, services) if len(raw) < LARGE_BODY else await asyncio.to_thread(plan, raw, services)
