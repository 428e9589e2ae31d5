"""What the HTTP surface is given by the composition root; nothing in this package builds its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry

from disagg.api.structured import Forms
from disagg.config import ServerConfig
from disagg.credentials import ApiKeys
from disagg.router import Router
from disagg.stream import RequestStream
from disagg.text.chat_template import ChatTemplate
from disagg.text.tokenizer import Tokenizer
from disagg.text.tools import ToolSupport


class Metrics(Protocol):
    """What this package observes, in seconds as the client sees them. ``observe_itl`` is on the path of every token."""

    def observe_ttft(self, seconds: float) -> None:
        """One choice: the request's arrival to the first token."""
        ...

    def observe_itl(self, seconds: float) -> None:
        """One gap between two arrivals of tokens of one choice."""
        ...

    def observe_e2e(self, seconds: float) -> None:
        """One choice that ended well: the request's arrival to its last token."""
        ...

    def count_request(self, route: str, code: int) -> None:
        """One HTTP request. ``route`` is a route template or "unknown"; ``code`` 499 = the client left before the answer."""
        ...

    def count_finished(self, reason: str) -> None:
        """One choice: a FinishReason, or "abort" (the client left), or "error"."""
        ...


class Trace(Protocol):
    """One HTTP request's."""

    def follow(self, stream: RequestStream) -> None:
        """The stream of a choice has begun."""
        ...

    def end(self, code: int) -> None:
        """The answer has been given, with this HTTP status, and every stream has ended."""
        ...


class Tracing(Protocol):
    def begin(self, route: str, scheme: str, headers: Mapping[str, list[str]]) -> Trace:
        """A POST request has come. ``headers``: those that name the trace it belongs to."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    router: Router
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: a base model; the chat endpoint says so
    model_name: str
    max_model_len: int  # tokens of prompt + answer
    vocab_size: int  # ids that both the tokenizer and the model know: 0 … vocab_size - 1
    created: int  # Unix seconds, for /v1/models
    config: ServerConfig
    registry: CollectorRegistry
    status: Callable[[], dict[str, Any]]  # the body of /v1/disagg/status
    not_ready: Callable[[], list[str]]  # reasons; empty = ready
    metrics: Metrics
    forms: Forms | None = None  # None: no llguidance here, so answers have no form
    tools: ToolSupport | None = None  # None: the model calls none, or in no way that is known here
    tracing: Tracing | None = None  # None: no spans are wanted
    keys: ApiKeys = field(default_factory=lambda: ApiKeys("", {}))  # who may ask; without any, everybody


SERVICES = web.AppKey("services", Services)
REQUEST_ID = web.RequestKey("request_id", str)
"""The client's X-Request-Id or one minted here. For logs and answers only."""
ARRIVED = web.RequestKey("arrived", float)
"""The loop's time when the request came."""
TRACE = web.RequestKey("trace", Trace)
"""Not there where nothing is traced."""
KEY_NAME = web.RequestKey("key_name", str)
"""Whose API key the request came with; not there when no key was needed."""
