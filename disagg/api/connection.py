"""One client's connection: aiohttp's, but for its words when what comes is no HTTP. Those are OpenAI's envelope as well.

aiohttp would answer in plain text that quotes the request, and log a stack trace each time: whoever reaches the port could fill
the log. Such a request has met no middleware, so its name is given, and its answer counted, here.
"""

from __future__ import annotations

import asyncio
import uuid

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from disagg.api.errors import Failure, failure_of, http_failure
from disagg.api.services import REQUEST_ID, SERVICES, Metrics

log = structlog.get_logger(__name__)

_TOO_LARGE = "Too many headers"  # how aiohttp begins to say so


class Runner(web.AppRunner):
    """Runs ``app`` on such connections, and ends a handler whose client has left."""

    def __init__(self, app: web.Application, *, keepalive_timeout: float, shutdown_timeout: float) -> None:
        """In seconds: how long an idle connection is kept, and how long the running handlers get at the end."""
        # aiohttp's default is not to cancel, outside of its test tools. Here the cancelled handler aborts its request.
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
        self._keepalive_timeout = keepalive_timeout

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self.app[SERVICES].metrics, self._keepalive_timeout)


class _Server(web.Server):
    """Makes the connections."""

    def __init__(self, made: web.Server, metrics: Metrics, keepalive_timeout: float) -> None:
        super().__init__(
            made.request_handler, request_factory=made.request_factory, handler_cancellation=made.handler_cancellation
        )
        self._metrics = metrics
        self._keepalive_timeout = keepalive_timeout

    def __call__(self) -> RequestHandler:
        return _Connection(self, self._metrics, self._keepalive_timeout)


class _Connection(RequestHandler):
    def __init__(self, server: _Server, metrics: Metrics, keepalive_timeout: float) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, keepalive_timeout=keepalive_timeout, access_log=None)  # type: ignore[arg-type]
        self._metrics = metrics

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What cannot be read as HTTP, or (500) broke outside of the middlewares; the connection is closed after it.

        Raises ConnectionError when half an answer has left already.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        if status == 400:
            failure = _malformed(exc, message or "")
        else:
            log.error("connection broke", exc_info=exc)
            failure = failure_of(RuntimeError())
        response = self._named(request, failure)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """An Expect: header with an unknown wish is refused before any middleware, too."""
        if isinstance(resp, web.HTTPException):
            resp = self._named(request, http_failure(resp))
        return await super().finish_response(request, resp, start_time)

    def _named(self, request: web.BaseRequest, failure: Failure) -> web.Response:
        response = failure.response()
        response.headers["X-Request-Id"] = request_id = request.get(REQUEST_ID) or uuid.uuid4().hex
        self._metrics.count_request("unknown", failure.status)
        log.debug("request refused", request=request_id, peer=request.remote, code=failure.status, reason=failure.message)
        return response


def _malformed(error: BaseException | None, message: str) -> Failure:
    """In a sentence, without the bytes that aiohttp quotes below its first line."""
    if isinstance(error, LineTooLong) or message.startswith(_TOO_LARGE):
        text = "the request's first line or its headers are too large: put what is long into the body"
        return Failure(431, text, "invalid_request_error", code="headers_too_large")
    reason = " ".join(message.partition("\n\n")[0].split()).rstrip(":")
    return Failure(400, f"this is no valid HTTP request: {reason}", "invalid_request_error", code="malformed_request")
