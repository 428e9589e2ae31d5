"""A collector of spans that speaks OTLP over HTTP, in a thread of the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE_S = 20.0


class Collector:
    """Keeps what it is sent, as it came and parsed."""

    def __init__(self, port: int = 0) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                """Nothing on stderr."""

        self._changed = threading.Condition()
        self._spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.resources: list[dict[str, Any]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, condition: Callable[[list[Span]], bool], what: str) -> list[Span]:
        """Every span so far, as soon as the condition holds for them."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self._spans), DEADLINE_S), f"never came: {what}; {self._spans}"
            return list(self._spans)

    def trace(self, trace_id: str) -> list[Span]:
        """Every span of one trace, whose HTTP request's comes last."""
        found = bytes.fromhex(trace_id)
        spans = self.wait_for(
            lambda spans: any(span.trace_id == found and span.kind == Span.SPAN_KIND_SERVER for span in spans), trace_id
        )
        return [span for span in spans if span.trace_id == found]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(DEADLINE_S)

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.bodies.append(body)
            for resource_spans in request.resource_spans:
                self.resources.append(attributes(resource_spans.resource))
                self._spans += [span for scope in resource_spans.scope_spans for span in scope.spans]
            self._changed.notify_all()


def attributes(holder: Any) -> dict[str, Any]:
    """Those of a span or a resource, as plain values."""
    values: dict[str, Any] = {}
    for pair in holder.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


@contextlib.contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    running = Collector(port)
    try:
        yield running
    finally:
        running.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """For what happens in a thread of a library, which has no event."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)
