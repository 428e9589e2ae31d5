"""A request's body, turned into what an endpoint works on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from disagg.api.services import SERVICES, Services
from disagg.errors import InvalidRequestError

LARGE_BODY = 8 * 1024
"""Bytes. A larger body is parsed and tokenised in a thread: at about 0.2 ms per KB, running streams would feel it."""

BODY_S = 60.0
"""Seconds until it must have come. A client that vanishes in the middle would count as a running request of its key for ever."""

Plan = TypeVar("Plan")


async def read(http: web.Request, plan: Callable[[bytes, Services], Plan]) -> Plan:
    """What ``plan`` makes of the body. Raises what ``plan`` raises, and refuses a body that it cannot read."""
    try:
        async with asyncio.timeout(BODY_S):
            raw = await http.read()
    except TimeoutError:
        raise InvalidRequestError(f"the body has not come within {BODY_S:g} s", code="body_timeout", status=408) from None
    services = http.app[SERVICES]
    return plan(raw, services) if len(raw) < LARGE_BODY else await asyncio.to_thread(plan, raw, services)
