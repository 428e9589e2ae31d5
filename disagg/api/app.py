"""The aiohttp application: routes, and what every request passes: a name, CORS, its key, the key's limits.

Run it with ``handler_cancellation=True`` (aiohttp's default is False outside its test tools), so that a client that leaves
cancels its handler, and with a keep-alive longer than client pools hold an idle connection (90 s).
"""

from __future__ import annotations

import asyncio
import re
import uuid

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from disagg.api import auth, cors, docs, health, limits, models, openapi, page, tokenize
from disagg.api.anthropic.endpoint import count_tokens, messages
from disagg.api.chat import chat_completions
from disagg.api.completions import completions
from disagg.api.errors import Failure, failure_of, http_failure, is_of_messages
from disagg.api.responses.endpoint import responses
from disagg.api.services import ARRIVED, REQUEST_ID, SERVICES, TRACE, Metrics, Services, Trace
from disagg.errors import DisaggError

__all__ = ["Metrics", "Services", "build_app"]

log = structlog.get_logger(__name__)

_CLIENT_LEFT = 499  # nginx's code, for metrics only: nobody is there to read it
_TRACE_HEADERS = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context/
_PLAIN_ID = re.compile(r"[\x21-\x7e]{1,128}")


def build_app(services: Services) -> web.Application:
    """Raises ConfigError for ``cors_origins`` that are none."""
    config = services.config
    app = web.Application(
        client_max_size=config.max_body_bytes,
        middlewares=[_surface, cors.answer_preflight, auth.authenticate, limits.limit],
    )
    app[SERVICES] = services
    app[cors.ORIGINS] = origins = cors.Origins(config.cors_origins)
    app[auth.KEY_REQUESTS] = auth.key_requests(services.registry)
    app[limits.LIMITS] = limits.Limits(max_streams=config.max_streams_per_key, requests_per_minute=config.requests_per_minute)
    app.on_response_prepare.append(_add_request_id)
    app.on_response_prepare.append(origins.add_headers)
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/responses", responses),
            web.post("/v1/messages", messages),
            web.post("/v1/messages/count_tokens", count_tokens),
            web.post("/tokenize", tokenize.tokenize),
            web.post("/detokenize", tokenize.detokenize),
            web.get("/tokenizer_info", tokenize.tokenizer_info),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{id:.+}", models.get_model),
            web.get("/v1/disagg/status", health.status),
            web.get("/livez", health.livez),
            web.get("/readyz", health.readyz),
            web.get("/health", health.readyz),
            web.get("/metrics", health.metrics),
            web.get("/version", health.get_version),
            web.get("/openapi.json", openapi.openapi),
            web.get("/docs", docs.docs),
            web.get("/", page.page),
        ]
    )
    return app


@web.middleware
async def _surface(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the request, turn every failure into its API's envelope, count the answer."""
    request[ARRIVED] = asyncio.get_running_loop().time()
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if _PLAIN_ID.fullmatch(given) else uuid.uuid4().hex
    resource = request.match_info.route.resource
    route = "unknown" if resource is None else resource.canonical
    code, trace = _CLIENT_LEFT, _begin_trace(request, route)
    try:
        response = await _answer(request, handler)
        code = response.status
        return response
    finally:
        request.app[SERVICES].metrics.count_request(route, code)
        if trace is not None:
            trace.end(code)


def _begin_trace(request: web.Request, route: str) -> Trace | None:
    """Health, metrics and pages are GETs, and nobody follows those."""
    tracing = request.app[SERVICES].tracing
    if tracing is None or request.method != "POST":
        return None
    headers = {name: request.headers.getall(name) for name in _TRACE_HEADERS if name in request.headers}
    request[TRACE] = trace = tracing.begin(route, request.scheme, headers)
    return trace


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionError:  # the client has gone; aiohttp ends the connection quietly
        raise
    except web.RequestPayloadError:
        return Failure(400, "the body could not be read", "invalid_request_error", code="invalid_body").response_to(request)
    except web.HTTPException as error:
        return http_failure(error).response_to(request)
    except DisaggError as error:
        return failure_of(error).response_to(request)
    except Exception as error:  # the last place where a bug can still be answered in JSON
        log.exception("request broke", request=request[REQUEST_ID], path=request.path)
        return failure_of(error).response_to(request)


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if request_id := request.get(REQUEST_ID):  # not there if aiohttp refused the request before any middleware
        response.headers["X-Request-Id"] = request_id
        if is_of_messages(request.path):
            response.headers["Request-Id"] = request_id  # where Anthropic's clients look for it
