"""The spans of real requests, as a collector gets them over OTLP."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from disagg.drain import ask
from tests.collector import Collector, attributes, collector
from tests.process.harness import Server, null_server, terminate, until

LONG = 100_000  # tokens: a stream that a test ends itself
PARENT_ID = "b7ad6b7169203331"
STAGES = ["queue", "reserve", "prefill", "transfer", "decode"]
ids = (f"{number:032x}" for number in itertools.count(1))


class Traced(NamedTuple):
    server: Server
    collector: Collector
    socket: str  # the operator's

    def ask_as(self, trace_id: str, flags: str = "01") -> None:
        self.server.headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-{flags}", "tracestate": "vendor=1"}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """One server for this whole file; each test leaves it ready and empty."""
    socket = str(tmp_path_factory.mktemp("traced") / "admin.sock")
    with collector() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        options = ("--otlp-endpoint", running.url, "--admin-socket", socket, "--mode", "disagg", "--decode", "2")
        with null_server(*options) as server:
            yield Traced(server, running, socket)


def busy_decode(server: Server) -> list[dict[str, Any]]:
    return [worker for worker in server.status()["workers"] if worker["role"] == "decode" and worker["requests"]["running"]]


def split(spans: list[Span]) -> tuple[Span, dict[str, list[Span]]]:
    """The HTTP request's span, and the others by name, in order of time."""
    (http,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    others: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        if span is not http:
            others.setdefault(span.name, []).append(span)
    return http, others


def test_a_request_is_one_tree_below_its_clients_span(traced: Traced) -> None:
    """HTTP, choice, stages: each begins where the one before it ended, in wall time; nothing of prompt and text is there."""
    trace_id, before_ns = next(ids), time.time_ns()
    traced.ask_as(trace_id)
    text = traced.server.complete("a secret that no span may show " * 4, 9, seed=3)
    http, others = split(traced.collector.trace(trace_id))
    assert set(others) == {"text_completion null", *STAGES}
    (choice,) = others["text_completion null"]
    stages = [others[stage][0] for stage in STAGES]
    assert (http.parent_span_id.hex(), http.trace_state) == (PARENT_ID, "vendor=1")
    assert choice.parent_span_id == http.span_id
    assert {span.parent_span_id for span in stages} == {choice.span_id}
    assert before_ns <= http.start_time_unix_nano <= choice.start_time_unix_nano == stages[0].start_time_unix_nano
    assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in itertools.pairwise(stages))
    assert stages[-1].end_time_unix_nano == choice.end_time_unix_nano <= http.end_time_unix_nano <= time.time_ns()
    assert attributes(http) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
    }
    shown = attributes(choice)
    assert (shown["gen_ai.operation.name"], shown["gen_ai.request.model"], shown["gen_ai.request.seed"]) == (
        "text_completion",
        "null",
        3,
    )
    assert (shown["gen_ai.usage.input_tokens"], shown["gen_ai.usage.output_tokens"]) == (124, 9)
    assert shown["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < shown["gen_ai.response.time_to_first_chunk"] * 1e9 <= choice.end_time_unix_nano - choice.start_time_unix_nano
    assert shown["disagg.attempts"] == 1
    assert shown["disagg.request"] == shown["gen_ai.response.id"] + "-0"
    assert attributes(stages[2])["disagg.prefill_worker"] == "prefill-0"
    assert {span.status.code for span in (http, choice, *stages)} == {Status.STATUS_CODE_UNSET}
    assert traced.collector.resources[0]["deployment.environment.name"] == "test"
    for body in traced.collector.bodies:
        assert b"secret" not in body
        assert text.encode() not in body


def test_a_choice_is_a_span_and_a_request_that_is_refused_is_only_one(traced: Traced) -> None:
    """Two choices of a chat below one request; a body that is none; a route that nobody has."""
    trace_id, refused_id = next(ids), next(ids)
    traced.ask_as(trace_id)
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 4}
    assert traced.server.request("POST", "/v1/chat/completions", body)[0] == 200
    http, others = split(traced.collector.trace(trace_id))
    assert {span.parent_span_id for span in others["chat null"]} == {http.span_id}
    assert len(others["chat null"]) == 2
    traced.ask_as(refused_id)
    assert traced.server.request("POST", "/v1/completions", {"prompt": 1})[0] == 400
    (http,) = traced.collector.trace(refused_id)
    assert attributes(http)["http.response.status_code"] == 400
    assert http.status.code == Status.STATUS_CODE_UNSET, "it is the client's fault"


def test_what_the_client_does_not_sample_is_not_exported(traced: Traced) -> None:
    """Its flag is obeyed. Without a header that names a trace, the request begins one, which is sampled."""
    unsampled, sampled = next(ids), next(ids)
    traced.ask_as(unsampled, flags="00")
    traced.server.complete("quiet", 3)
    traced.server.headers = {"traceparent": "nonsense"}
    traced.server.complete("aloud", 3)
    traced.ask_as(sampled)
    traced.server.complete("aloud", 3)
    traced.collector.trace(sampled)
    spans = traced.collector.wait_for(lambda spans: True, "")
    assert bytes.fromhex(unsampled) not in {span.trace_id for span in spans}
    own = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER and not span.parent_span_id]
    assert len(own) == 1


def test_health_is_not_traced(traced: Traced) -> None:
    """What a load balancer asks every second is in no trace."""
    quiet, aloud = next(ids), next(ids)
    traced.ask_as(quiet)
    assert traced.server.request("GET", "/readyz")[0] == 200
    traced.ask_as(aloud)
    traced.server.complete("x", 1)
    traced.collector.trace(aloud)
    assert bytes.fromhex(quiet) not in {span.trace_id for span in traced.collector.wait_for(lambda spans: True, "")}


def test_a_failover_shows_both_attempts_and_why_the_first_was_lost(traced: Traced) -> None:
    """The lost stage has an error, with the worker's name; the request has none: its client noticed nothing."""
    trace_id = next(ids)
    traced.ask_as(trace_id)
    stream = traced.server.stream("it lives on", 20_000)
    assert stream.next_event()
    until(lambda: bool(busy_decode(traced.server)), "a decode worker tells that it runs the stream")
    (victim,) = busy_decode(traced.server)
    os.kill(victim["pid"], signal.SIGKILL)
    assert stream.read_to_end()[-1] == "[DONE]"
    stream.close()
    http, others = split(traced.collector.trace(trace_id))
    (choice,) = others["text_completion null"]
    assert attributes(choice)["disagg.attempts"] == 2
    assert {http.status.code, choice.status.code} == {Status.STATUS_CODE_UNSET}
    assert [attributes(span)["disagg.attempt"] for span in others["queue"]] == [1, 2]
    lost, last = others["decode"]
    assert (lost.status.code, attributes(lost)["error.type"]) == (Status.STATUS_CODE_ERROR, "worker_died")
    assert attributes(lost)["disagg.decode_worker"] == victim["id"] != attributes(last)["disagg.decode_worker"]
    assert last.status.code == Status.STATUS_CODE_UNSET
    traced.server.wait_until_ready()


def test_a_request_that_fails_has_an_error_and_its_reason(traced: Traced) -> None:
    """Ended by the operator, in the middle of its stream: the choice and the HTTP request say so."""
    trace_id = next(ids)
    traced.ask_as(trace_id)
    stream = traced.server.stream("never ends", LONG)
    request_id = json.loads(stream.next_event() or "")["id"]
    ask(traced.socket, "POST", "/abort", json.dumps({"id": request_id}).encode())
    stream.read_to_end()
    stream.close()
    http, others = split(traced.collector.trace(trace_id))
    (choice,) = others["text_completion null"]
    assert {http.status.code, choice.status.code} == {Status.STATUS_CODE_ERROR}
    assert attributes(choice)["error.type"] == "aborted"
    assert attributes(choice)["gen_ai.response.id"] == request_id


@pytest.mark.slow
def test_without_its_collector_a_server_serves_and_ends_as_ever() -> None:
    """Nobody listens at the endpoint: answers come, and SIGTERM ends it with exit code 0."""
    with collector() as reserved:
        url = reserved.url
    with null_server("--otlp-endpoint", url) as server:
        answers: list[Any] = [server.complete("x", 5) for _ in range(3)]
        assert [len(answer) for answer in answers] == [5, 5, 5]
        assert terminate(server) == 0


def test_what_is_left_at_the_end_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that would be sent in an hour is sent when the server ends."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with collector() as running, null_server("--otlp-endpoint", running.url + "/v1/traces") as server:
        server.complete("x", 5)
        assert terminate(server) == 0
        assert running.wait_for(bool, "the last spans")
