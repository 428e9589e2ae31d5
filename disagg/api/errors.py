"""Every failure as OpenAI's envelope: ``{"error": {"message", "type", "param", "code"}}``, a status and its headers.

Below ``/v1/messages`` it is Anthropic's: ``{"type": "error", "error": {"type", "message"}, "request_id"}``, with its own types.
Official SDKs retry 408, 409, 429 and 5xx twice; ``Retry-After`` says when, ``x-should-retry: false`` that it would fail again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from disagg.api.answers import json_answer
from disagg.api.services import REQUEST_ID
from disagg.errors import InvalidRequestError, OverloadedError, RequestFailedError, UnavailableError
from disagg.request import FailReason

MAX_MESSAGE = 300
"""Characters of a message. A template's own error may quote the conversation; nobody wants that back."""

_MESSAGES = "/v1/messages"
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_MESSAGES_OVERLOADED = 529

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
        return {"error": {"message": self._cut_message(), "type": self.kind, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """In Anthropic's envelope. The field is named by the message alone."""
        kind = _MESSAGES_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self._cut_message()}, "request_id": request_id}

    def response(self) -> web.Response:
        return json_answer(self.body(), status=self.status, headers=self.headers)

    def response_to(self, http: web.Request) -> web.Response:
        """In the envelope of the API that was asked."""
        if not is_of_messages(http.path):
            return self.response()
        status = _MESSAGES_OVERLOADED if self.status == 503 else self.status
        return json_answer(self.messages_body(http[REQUEST_ID]), status=status, headers=self.headers)

    def _cut_message(self) -> str:
        return self.message if len(self.message) <= MAX_MESSAGE else self.message[: MAX_MESSAGE - 1] + "…"


def is_of_messages(path: str) -> bool:
    """Whether the path belongs to Anthropic's API, also where there is no such route."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


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
