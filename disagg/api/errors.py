"""Every failure as OpenAI's envelope: ``{"error": {"message", "type", "param", "code"}}``, a status and its headers.

Official SDKs retry 408, 409, 429 and 5xx twice; ``Retry-After`` says when, ``x-should-retry: false`` that it would fail again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from disagg.api.answers import json_answer
from disagg.errors import InvalidRequestError, OverloadedError, RequestFailedError, UnavailableError
from disagg.request import FailReason

MAX_MESSAGE = 300
"""Characters of a message. A template's own error may quote the conversation; nobody wants that back."""

_WORTH_RETRYING = {FailReason.WORKER_DIED, FailReason.NO_BLOCKS, FailReason.TIMEOUT, FailReason.SHUTDOWN}


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request as the client is told about it."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[: MAX_MESSAGE - 1] + "…"
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        return json_answer(self.body(), status=self.status, headers=self.headers)


def failure_of(error: Exception) -> Failure:
    """What the client is told about ``error``: nothing of the inside when it is one that nobody foresaw."""
    match error:
        case InvalidRequestError():
            return Failure(error.status, str(error), "invalid_request_error", error.param, error.code)
        case OverloadedError():
            retry = {"Retry-After": _whole_seconds(error.retry_after_s)}
            return Failure(429, str(error), "rate_limit_error", code="overloaded", headers=retry)
        case UnavailableError():
            retry = {"Retry-After": _whole_seconds(error.retry_after_s)}
            return Failure(503, str(error), "server_error", code="unavailable", headers=retry)
        case RequestFailedError() if error.reason in _WORTH_RETRYING:
            return Failure(503, str(error), "server_error", code=error.reason, headers={"Retry-After": "1"})
        case RequestFailedError():
            return Failure(500, str(error), "server_error", code=error.reason, headers={"x-should-retry": "false"})
        case _:
            return Failure(500, "internal error", "server_error", code="internal_error", headers={"x-should-retry": "false"})


def http_failure(error: web.HTTPException) -> Failure:
    """aiohttp's own refusals: unknown route, wrong method, too large a body."""
    match error:
        case web.HTTPNotFound():
            return Failure(404, "there is no such route", "invalid_request_error", code="unknown_url")
        case web.HTTPMethodNotAllowed():
            allow = ", ".join(sorted(error.allowed_methods))
            return Failure(
                405,
                f"this route answers {allow} only",
                "invalid_request_error",
                code="method_not_allowed",
                headers={"Allow": allow},
            )
        case web.HTTPRequestEntityTooLarge():
            return Failure(413, "the request body is too large", "invalid_request_error", code="body_too_large")
        case _:
            return Failure(error.status, error.reason, "invalid_request_error" if error.status < 500 else "server_error")


def _whole_seconds(seconds: float) -> str:
    return str(max(1, math.ceil(seconds)))
