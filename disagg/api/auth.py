"""Who may ask: with API keys, everything needs one but the health checks, the page, and a browser's preflight.

``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``. From here on a request carries the key's name, never the key.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, Counter

from disagg.api.errors import Failure
from disagg.api.services import KEY_NAME, SERVICES

OPEN = {"/livez", "/readyz", "/health", "/"}
"""What load balancers and service managers ask, who have no key, and the page on which a reader types in one."""

KEY_REQUESTS = web.AppKey("key_requests", Counter)

_NO_KEY = "this server needs an API key: Authorization: Bearer KEY"
_WRONG_KEY = "the API key is not one of this server's"


def key_requests(registry: CollectorRegistry) -> Counter:
    """Counts by name: names are the operator's, so there are only so many."""
    return Counter("disagg_key_requests", "HTTP requests by the name of their API key", ["key"], registry=registry)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    keys = request.app[SERVICES].keys
    if not keys or request.method == "OPTIONS" or _is_open(request):
        return await handler(request)
    given = _given_key(request)
    name = keys.name_of(given) if given else None
    if name is None:
        message = _WRONG_KEY if given else _NO_KEY
        headers = {"WWW-Authenticate": 'Bearer realm="disagg"'}
        return Failure(401, message, "invalid_request_error", code="invalid_api_key", headers=headers).response_to(request)
    request[KEY_NAME] = name
    request.app[KEY_REQUESTS].labels(name).inc()
    return await handler(request)


def _is_open(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical in OPEN


def _given_key(request: web.Request) -> str:
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return request.headers.get("X-Api-Key", "").strip()
