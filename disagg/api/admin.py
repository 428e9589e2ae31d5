"""What only the operator may do, on a listener of its own: a Unix socket that only the server's user (and root) can open.

    GET  /v1/disagg/status, /readyz      as on the public listener
    GET  /requests                       every request that is queued or served
    POST /drain    {"wait_s": 0}         admit nothing more; waits so long for the last stream to end. The server goes on running
    POST /resume                         admit again
    POST /abort    {"id": "cmpl-…"}      end one request; its client gets an error
    POST /flip     {"worker": "decode-1", "role": "prefill", "wait_s": 30}
                                         change what a worker does, after so long at the latest; answers when it does it

File permissions are the whole of its access control. There is no token to leak, and no port for a browser to find.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from disagg.api import health
from disagg.api.answers import json_answer
from disagg.api.errors import Failure, failure_of, http_failure
from disagg.api.services import SERVICES, Services
from disagg.errors import DisaggError, InvalidRequestError, StartupError
from disagg.flip import Flipper
from disagg.operations import Operations

log = structlog.get_logger(__name__)

_MAX_BODY = 4096
_MAX_WAIT_S = 24 * 3600.0
_SHUTDOWN_S = 1.0
_PRIVATE = 0o177  # umask


class _DrainBody(msgspec.Struct):
    wait_s: float = 0.0


class _AbortBody(msgspec.Struct):
    id: str


class _FlipBody(msgspec.Struct):
    worker: str
    role: str
    wait_s: float = 30.0


Body = TypeVar("Body", bound=msgspec.Struct)

OPERATIONS = web.AppKey("operations", Operations)
FLIPPER = web.AppKey("flipper", Flipper)


class AdminListener:
    """The application on its socket. ``aclose`` takes the socket's name away."""

    def __init__(self, path: str, services: Services, operations: Operations, flipper: Flipper) -> None:
        self.path = path
        app = build_admin_app(services, operations, flipper)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        self._inode = -1

    async def listen(self) -> None:
        """Raises StartupError when the socket cannot be made, or another server answers there."""
        try:
            _remove_stale(self.path)
            await self._runner.setup()
            before = os.umask(_PRIVATE)  # from its first moment nobody else can open it
            try:
                await web.UnixSite(self._runner, self.path).start()
            finally:
                os.umask(before)
            self._inode = os.stat(self.path).st_ino
        except OSError as error:
            await self._runner.cleanup()
            raise StartupError(f"cannot listen on the admin socket {self.path}: {error.strerror or error}") from error

    async def aclose(self) -> None:
        await self._runner.cleanup()
        try:
            if os.stat(self.path).st_ino == self._inode:  # not one that a later server has put there
                os.unlink(self.path)
        except FileNotFoundError:
            pass


def build_admin_app(services: Services, operations: Operations, flipper: Flipper) -> web.Application:
    app = web.Application(client_max_size=_MAX_BODY, middlewares=[_in_json])
    app[SERVICES], app[OPERATIONS], app[FLIPPER] = services, operations, flipper
    app.add_routes(
        [
            web.get("/v1/disagg/status", health.status),
            web.get("/readyz", health.readyz),
            web.get("/requests", _requests),
            web.post("/drain", _drain),
            web.post("/resume", _resume),
            web.post("/abort", _abort),
            web.post("/flip", _flip),
        ]
    )
    return app


async def _requests(http: web.Request) -> web.Response:
    return json_answer({"requests": http.app[OPERATIONS].requests()})


async def _drain(http: web.Request) -> web.Response:
    wait_s = _wait(await _body(http, _DrainBody))
    log.info("draining", by="admin", wait_s=wait_s)
    drained = await http.app[OPERATIONS].drain(wait_s)
    status = http.app[SERVICES].status()
    return json_answer({"draining": status["draining"], "drained": drained, "requests": status["requests"]})


async def _resume(http: web.Request) -> web.Response:
    http.app[OPERATIONS].resume()
    log.info("resumed", by="admin")
    return json_answer({"draining": False})


async def _abort(http: web.Request) -> web.Response:
    request_id = (await _body(http, _AbortBody)).id
    num_aborted = http.app[OPERATIONS].abort(request_id)
    if not num_aborted:
        raise InvalidRequestError("no request of this id is queued or served", param="id", code="unknown_request", status=404)
    log.info("request aborted", by="admin", request=request_id, choices=num_aborted)
    return json_answer({"id": request_id, "aborted": num_aborted})


async def _flip(http: web.Request) -> web.Response:
    body = await _body(http, _FlipBody)
    wait_s = _wait(body)
    flipped = await http.app[FLIPPER].flip(body.worker, body.role, wait_s)
    return json_answer(msgspec.to_builtins(flipped))


def _wait(body: _DrainBody | _FlipBody) -> float:
    if not 0 <= body.wait_s <= _MAX_WAIT_S:
        raise InvalidRequestError(f"wait_s: seconds from 0 to {_MAX_WAIT_S:.0f}", param="wait_s")
    return body.wait_s


async def _body(http: web.Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await http.read() or b"{}", type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(str(error)) from error


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return http_failure(error).response()
    except web.RequestPayloadError:
        return Failure(400, "the body could not be read", "invalid_request_error", code="invalid_body").response()
    except DisaggError as error:
        return failure_of(error).response()


def _remove_stale(path: str) -> None:
    """A server that was killed leaves its socket's name behind. Raises StartupError when somebody still answers there."""
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise StartupError(f"cannot listen on the admin socket {path}: something else has that name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:  # its queue is full
            pass
    raise StartupError(f"cannot listen on the admin socket {path}: another server uses it")
