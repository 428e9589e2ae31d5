"""Spans of requests for an OpenTelemetry collector: the HTTP request, below it each choice, below that the stages it passed.

    POST /v1/completions ─▶ text_completion llama ─▶ queue, reserve, prefill, transfer, decode; all again after a lost worker

Those of choices and stages are made when the answer has been given, from the times that its streams have kept, so that no token
costs more. The client's ``traceparent`` is continued and its sampled flag obeyed. A thread of the library exports from a bounded
queue: what a collector that is away does not take is dropped. Attributes are those of
https://opentelemetry.io/docs/specs/semconv/gen-ai/ and, for what is ours, ``disagg.…``. No prompt and no text is in them.

Needs the extra ``otel``. The library reads its own variables too, such as OTEL_EXPORTER_OTLP_HEADERS and OTEL_TRACES_SAMPLER.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from disagg import __version__
from disagg.lifetime import STAGES, Stay, stays, ttft_s
from disagg.request import RequestState
from disagg.stream import RequestStream

log = structlog.get_logger(__name__)

_PATH = "/v1/traces"
_EXPORT_S = 5.0  # for one batch, attempts and pauses together
_FLUSH_S = 3.0
_TEXT_ROUTE = "/v1/completions"


class Tracing:
    """``aclose`` exports what is left, within a deadline."""

    def __init__(self, endpoint: str, model_name: str, run_id: str, clock: Callable[[], float]) -> None:
        """``endpoint``: the collector's base URL. ``clock`` is that of the streams."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each batch that fails; ours is one
        self._exporter = _Exporter(endpoint=endpoint.removesuffix("/").removesuffix(_PATH) + _PATH, timeout=_EXPORT_S)
        resource = Resource.create({"service.name": "disagg", "service.version": __version__, "service.instance.id": run_id})
        resource = resource.merge(OTELResourceDetector().detect())  # what the operator says in OTEL_RESOURCE_ATTRIBUTES
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("disagg")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._clock = clock

    def begin(self, route: str, scheme: str, headers: Mapping[str, list[str]]) -> Trace:
        """A POST request has come. ``headers``: its ``traceparent`` and ``tracestate``, as far as it has them."""
        span = self._tracer.start_span(
            f"POST {route}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": route, "url.path": route, "url.scheme": scheme},
        )
        operation = "text_completion" if route == _TEXT_ROUTE else "chat"
        return Trace(self._tracer, span, operation, self._model_name, self._clock)

    async def aclose(self) -> None:
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)  # it may take 30 s, which nobody waits for
        ending.start()
        if not self._exporter.is_away:
            await asyncio.to_thread(ending.join, _FLUSH_S)


class Trace:
    """One HTTP request."""

    def __init__(self, tracer: Tracer, span: Span, operation: str, model_name: str, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._span = span
        self._id = format_trace_id(span.get_span_context().trace_id)
        self._operation = operation
        self._model_name = model_name
        self._streams: list[RequestStream] = []
        self._clock = clock
        self._epoch_ns = time.time_ns() - int(clock() * 1e9)  # of the clock; the same for all spans of the trace

    def follow(self, stream: RequestStream) -> None:
        """The stream of a choice has begun."""
        stream.trace_id = self._id
        self._streams.append(stream)

    def end(self, code: int) -> None:
        """The answer has been given, with this HTTP status, and every stream has ended."""
        if self._span.is_recording():
            for stream in self._streams:
                self._choice(stream)
            self._span.set_attribute("http.response.status_code", code)
            if code >= 500 or any(stream.error is not None for stream in self._streams):
                self._span.set_status(StatusCode.ERROR)
                self._span.set_attribute("error.type", str(code))
        self._span.end(self._wall_ns(self._clock()))

    def _choice(self, stream: RequestStream) -> None:
        name = f"{self._operation} {self._model_name}"
        (_, begun), (_, ended) = stream.entered[0], stream.entered[-1]
        span = self._begin(name, self._span, begun, self._attributes(stream))
        if stream.error is not None:
            span.set_status(StatusCode.ERROR, str(stream.error))
            span.set_attribute("error.type", stream.error.reason)
        for stay in stays(stream):
            self._stage(stream, stay, span)
        span.end(self._wall_ns(ended))

    def _attributes(self, stream: RequestStream) -> dict[str, AttributeValue]:
        request, params = stream.request, stream.request.params
        attributes: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "disagg",
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.seed": params.seed,
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.id": request.id.rpartition("-")[0],
            "gen_ai.response.finish_reasons": [stream.finish_reason] if stream.finish_reason else None,
            "gen_ai.response.time_to_first_chunk": ttft_s(stream),
            "gen_ai.usage.input_tokens": len(request.prompt),
            "gen_ai.usage.output_tokens": len(stream.tokens),
            "gen_ai.usage.cache_read.input_tokens": stream.num_cached_tokens,
            "disagg.request": request.id,
            "disagg.priority": request.priority,
            "disagg.state": stream.state.value,
            "disagg.attempts": stream.num_attempts,
        }
        return {name: value for name, value in attributes.items() if value is not None}

    def _stage(self, stream: RequestStream, stay: Stay, parent: Span) -> None:
        attributes: dict[str, AttributeValue] = {"disagg.attempt": stay.attempt}
        if stay.state is RequestState.QUEUED:
            span = self._begin(STAGES[stay.state], parent, stay.since, attributes)
        else:
            attempt = stream.attempts[stay.attempt - 1]
            attributes |= {"disagg.prefill_worker": attempt.prefill, "disagg.decode_worker": attempt.decode}
            span = self._begin(STAGES[stay.state], parent, stay.since, attributes)
            if stay.is_lost and attempt.lost_for is not None:
                span.set_status(StatusCode.ERROR, "this attempt was lost, and another began")
                span.set_attribute("error.type", attempt.lost_for)
        span.end(self._wall_ns(stay.until))

    def _begin(self, name: str, parent: Span, since: float, attributes: Mapping[str, AttributeValue]) -> Span:
        context, start_ns = set_span_in_context(parent), self._wall_ns(since)
        return self._tracer.start_span(name, context=context, attributes=attributes, start_time=start_ns)

    def _wall_ns(self, at: float) -> int:
        return self._epoch_ns + int(at * 1e9)


class _Exporter(OTLPSpanExporter):
    """Says once that the collector takes no spans, and once that it does again."""

    is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        was_away, self.is_away = self.is_away, result is not SpanExportResult.SUCCESS
        if self.is_away and not was_away:
            log.warning("spans are lost: the collector does not take them", endpoint=self._endpoint)
        elif was_away and not self.is_away:
            log.info("the collector takes spans again", endpoint=self._endpoint)
        return result
