"""Spans alone: whatever a client names as its trace, a collector that comes and goes, and what is missing without the extra."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg import tracing
from disagg.errors import ConfigError
from disagg.launcher import ProcessLauncher
from disagg.serve import Server
from disagg.settings import load_config
from disagg.tracing import Tracing
from tests.collector import collector, until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Journal:
    """Takes the place of the module's log."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(("info", event))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(("warning", event))


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setattr(tracing, "_EXPORT_S", 0.2)
    journal = Journal()
    monkeypatch.setattr(tracing, "log", journal)
    return journal


@pytest.fixture(scope="module")
def unheard() -> Iterator[Tracing]:
    """Nothing is ended on it, so that nothing is exported."""
    made = Tracing("http://127.0.0.1:9", "null", "run", lambda: 0.0)
    yield made
    made._provider.shutdown()


def trace_id(unheard: Tracing, **headers: list[str]) -> str:
    return unheard.begin("/v1/completions", "http", headers)._id


@pytest.mark.parametrize("flags", ["00", "01", "ff"])
def test_a_clients_trace_goes_on(unheard: Tracing, flags: str) -> None:
    """Sampled or not, its id is the request's, also in the log; a later version may have more fields."""
    for traceparent in (f"00-{TRACE_ID}-{SPAN_ID}-{flags}", f"01-{TRACE_ID}-{SPAN_ID}-{flags}-more"):
        assert trace_id(unheard, traceparent=[traceparent]) == TRACE_ID


parts = st.sampled_from(["00", "ff", TRACE_ID, "0" * 32, SPAN_ID, "0" * 16, "01", "", "zz", TRACE_ID.upper(), "é"])


@given(st.lists(st.lists(parts, max_size=6).map("-".join), max_size=3), st.lists(st.text(max_size=600), max_size=3))
def test_whatever_stands_in_the_headers_there_is_a_trace(unheard: Tracing, parents: list[str], states: list[str]) -> None:
    """Headers come from strangers: one that names no trace begins a new one, and none is an error."""
    found = trace_id(unheard, traceparent=parents, tracestate=states)
    assert re.fullmatch("[0-9a-f]{32}", found)
    assert found != "0" * 32


async def test_a_collector_that_is_away_is_one_line_and_one_more_when_it_is_back(journal: Journal) -> None:
    """Every batch fails, and only the first is told; later spans arrive, and ending waits for the last of them."""
    with collector() as reserved:
        port = reserved.port
    traces = Tracing(f"http://127.0.0.1:{port}/", "null", "run-1", lambda: 0.0)
    for _ in range(3):
        traces.begin("/lost", "http", {}).end(200)
        until(lambda: not traces._provider._active_span_processor._span_processors[0]._batch_processor._queue, "taken")
    until(lambda: traces._exporter.is_away, "the batch failed")
    assert journal.lines == [("warning", "spans are lost: the collector does not take them")]
    with collector(port) as back:
        traces.begin("/found", "http", {}).end(200)
        back.wait_for(lambda spans: any(span.name == "POST /found" for span in spans), "a span after it came back")
        until(lambda: not traces._exporter.is_away, "the answer was read")
        assert journal.lines[1:] == [("info", "the collector takes spans again")]
        traces.begin("/last", "http", {}).end(200)
        await traces.aclose()
        back.wait_for(lambda spans: any(span.name == "POST /last" for span in spans), "what was left at the end")
        assert back.resources[0]["service.name"] == "disagg"
        assert back.resources[0]["service.instance.id"] == "run-1"


def test_without_the_extra_the_setting_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, before anything runs; without the setting nothing is missed."""
    monkeypatch.delitem(sys.modules, "disagg.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = {"model.path": "null", "kv.memory": "4MiB"}
    assert Server(load_config(None, {}, settings)[0], ProcessLauncher()).tracing is None
    config, _ = load_config(None, {}, {**settings, "tracing.otlp_endpoint": "http://127.0.0.1:4318"})
    with pytest.raises(ConfigError, match=r"pip install 'disagg\[otel\]'"):
        Server(config, ProcessLauncher())
