"""disagg.top: figures from two samples, a frame that says what is wrong, and a server that comes and goes."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from disagg import cli, top
from disagg.remote import Remote
from disagg.top import Sample, Window, quantile
from tests.unit.test_status import STATUS, Server, server  # noqa: F401  (a fixture)

METRICS = """\
# TYPE disagg_ttft_seconds histogram
disagg_ttft_seconds_bucket{le="0.1"} %(fast)d
disagg_ttft_seconds_bucket{le="0.2"} %(all)d
disagg_ttft_seconds_bucket{le="+Inf"} %(all)d
disagg_ttft_seconds_count %(all)d
disagg_ttft_seconds_sum 1.0
# TYPE disagg_generated_tokens counter
disagg_generated_tokens_total %(tokens)d
# TYPE disagg_failovers counter
disagg_failovers_total{reason="worker_died"} 2.0
disagg_failovers_total{reason="handoff_failed"} 1.0
"""


@pytest.fixture
def metrics(server: Server) -> dict[str, int]:  # noqa: F811
    """What /metrics will say; change it between samples."""
    figures = {"fast": 5, "all": 10, "tokens": 100}

    def text() -> str:
        return METRICS % figures

    server.answers["/metrics"] = (200, text)
    return figures


def shown(renderable: Any) -> str:
    console = Console(width=140, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@given(st.lists(st.floats(0.001, 9.999), min_size=1), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_its_value(values: list[float], q: float) -> None:
    """Whatever was observed, the estimate is within the bounds of the bucket that holds the true quantile."""
    bounds = [1.0, 2.0, 5.0, 10.0]
    buckets = [(bound, float(sum(value <= bound for value in values))) for bound in [*bounds, float("inf")]]
    true = sorted(values)[max(0, -(-q * len(values) // 1).__int__() - 1)]
    upper = next(bound for bound in bounds if true <= bound)
    lower = ([0.0, *bounds])[bounds.index(upper)]
    estimate = quantile(buckets, q)
    assert estimate is not None
    assert lower - 1e-9 <= estimate <= upper + 1e-9


def test_a_quantile_of_nothing_is_nothing() -> None:
    """No buckets, or none that holds a value."""
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.5) is None


def test_a_counter_that_shrank_began_again() -> None:
    """A worker that restarted counts from 0: what it has counted since is the increase, never a negative one."""
    key, other = ("steps_total", (("worker", "a"),)), ("steps_total", (("worker", "b"),))
    window = Window(Sample(0.0, None, {key: 100.0, other: 5.0}), Sample(2.0, None, {key: 30.0, other: 9.0}))
    assert window.increase("steps_total") == 34
    assert window.rate("steps_total", worker="b") == 2


def test_once_prints_one_frame(server: Server, metrics: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Workers, pairs, rates and percentiles over the server's whole life."""
    server.answers["/v1/disagg/status"] = (200, {**STATUS, "uptime_s": 50.0})
    assert cli.main(["top", "--once", "--url", server.url]) == 0
    text = capsys.readouterr().out
    assert "prefill-0 → decode-0 shm 4.1 GB/s" in " ".join(text.split())
    assert "2.0 tokens/s" in text
    assert "failovers 3" in text
    ttft = next(line.split() for line in text.splitlines() if line.startswith("TTFT"))
    assert ttft == ["TTFT", "100.0", "190.0", "198.0", "10"]


def test_a_server_that_goes_away_leaves_its_last_frame(server: Server, metrics: dict[str, int]) -> None:  # noqa: F811
    """What was known stays, with the reason above it; when the server is back, frames go on, and a new run begins anew."""
    samples: deque[Sample] = deque()
    remote = Remote(server.url)
    assert "ready" in shown(top._next_frame(remote, samples))
    metrics.update({"fast": 10, "all": 20, "tokens": 400})
    frame = shown(top._next_frame(remote, samples))
    assert next(line.split()[-1] for line in frame.splitlines() if line.startswith("TTFT")) == "10"
    server.answers["/v1/disagg/status"] = (500, {})
    gone = shown(top._next_frame(remote, samples))
    assert "no answer: HTTP 500" in gone
    assert "prefill-0" in gone
    server.answers["/v1/disagg/status"] = (200, {**STATUS, "run_id": "another"})
    assert "no answer" not in shown(top._next_frame(remote, samples))
    assert len(samples) == 1


def test_nobody_there_is_one_line_and_2(server: Server, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Before the first frame there is nothing to leave on the screen."""
    server.answers["/metrics"] = (401, {})
    assert cli.main(["top", "--once", "--url", server.url]) == 2
    assert "API key" in capsys.readouterr().err


@pytest.mark.parametrize("blocks", [{"total": 0}, {"total": 10_000, "in_use": 1, "cached": 9999}, {"total": 3, "reserved": 3}])
def test_a_bar_shows_each_state_that_has_blocks(blocks: dict[str, int]) -> None:
    """One cell for one block of ten thousand, never more cells than the bar has."""
    bar = top._bar(blocks).plain
    assert len(bar) == 32
    for state, (cell, _) in top._STATES.items():
        assert (cell in bar) == bool(blocks.get(state))
