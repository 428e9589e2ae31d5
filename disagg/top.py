"""``disagg top``: a running server, live: workers, their KV blocks, tokens per second, percentiles of the last seconds.

    ask /v1/disagg/status and /metrics ─▶ Sample ─▶ the difference of two samples (Window) ─▶ one frame ─▶ again, interval_s later

A server that goes away is asked again until it is back; its last frame stays on the screen, with what is wrong above it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disagg.remote import Asked, NoAnswerError, Remote, Worker

WINDOW_S = 30.0
"""Percentiles are over the values of so many seconds."""

_BAR_CELLS = 32
_QUANTILES = (0.5, 0.95, 0.99)
_STATES = {"in_use": ("█", "green"), "filling": ("▓", "yellow"), "reserved": ("▒", "magenta"), "cached": ("░", "blue")}
_LATENCIES = {"TTFT": "disagg_ttft_seconds", "ITL": "disagg_itl_seconds", "E2E": "disagg_e2e_seconds"}

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Value by (sample name, sorted labels)."""


@dataclass(frozen=True)
class Sample:
    """What the server said at one time. ``at``: seconds on this process's clock."""

    at: float
    asked: Asked | None = None
    series: Series = field(default_factory=dict)


@dataclass(frozen=True)
class Window:
    """What happened between two samples."""

    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return max(self.last.at - self.first.at, 1e-9)

    def increase(self, name: str, **labels: str) -> float:
        """By how much the counters with these labels, added up, have grown. One that shrank began again from 0."""
        return sum(
            value - before if value >= (before := self.first.series.get(key, 0.0)) else value
            for key, value in self.last.series.items()
            if key[0] == name and labels.items() <= dict(key[1]).items()
        )

    def rate(self, name: str, **labels: str) -> float:
        return self.increase(name, **labels) / self.seconds

    def quantiles(self, name: str) -> list[float | None]:
        """Seconds at _QUANTILES of a histogram without labels; None where nothing was observed."""
        bounds = {dict(labels)["le"] for key, labels in self.last.series if key == f"{name}_bucket"}
        buckets = sorted((float(le), self.increase(f"{name}_bucket", le=le)) for le in bounds)
        return [quantile(buckets, q) for q in _QUANTILES]


def quantile(buckets: list[tuple[float, float]], q: float) -> float | None:
    """The value below which a share ``q`` lies, from cumulative (bound, count), linear within a bucket as Prometheus does it."""
    if not buckets or not buckets[-1][1]:
        return None
    rank, lower, below = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


def run(server: Remote, *, interval_s: float, once: bool) -> int:
    """Show frames until Ctrl-C, or one, for a pipe too. Returns 0; 2 when there is nothing to show at once."""
    console = Console(highlight=False)
    if once or not console.is_terminal:
        try:
            sample = take_sample(server)
        except NoAnswerError as error:
            sys.stderr.write(f"disagg: error: no answer from {server.url}: {error}\n")
            return 2
        console.print(frame(server.url, [sample], ""))
        return 0
    samples: deque[Sample] = deque()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_next_frame(server, samples), refresh=True)
                time.sleep(interval_s)
        except KeyboardInterrupt:
            return 0


def take_sample(server: Remote) -> Sample:
    """Raises NoAnswerError."""
    asked = server.ask()
    try:
        families = list(text_string_to_metric_families(server.fetch("/metrics").decode()))
    except ValueError as error:  # a bad sample, or no text at all
        raise NoAnswerError(f"/metrics cannot be read: {error}") from error
    series = {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
    return Sample(time.monotonic(), asked, series)


def _next_frame(server: Remote, samples: deque[Sample]) -> RenderableType:
    try:
        sample = take_sample(server)
    except NoAnswerError as error:
        return frame(server.url, list(samples), str(error))
    if samples and _run_id(samples[-1]) != _run_id(sample):  # another server now: its counters have begun anew
        samples.clear()
    samples.append(sample)
    while sample.at - samples[0].at > WINDOW_S:
        samples.popleft()
    return frame(server.url, list(samples), "")


def _run_id(sample: Sample) -> str:
    return sample.asked.status.run_id if sample.asked is not None else ""


def frame(url: str, samples: list[Sample], trouble: str) -> RenderableType:
    """One picture of the newest sample. With a single one, rates and percentiles are over the server's whole life."""
    warning = Text(f"no answer: {trouble}; asking again", style="bold red") if trouble else Text("")
    if not samples or (asked := samples[-1].asked) is None:
        return Group(Text(url, style="bold"), warning)
    last, status = samples[-1], asked.status
    if len(samples) > 1:
        recent, window, span = Window(samples[-2], last), Window(samples[0], last), f"last {last.at - samples[0].at:.0f} s"
    else:
        recent = window = Window(Sample(last.at - status.uptime_s), last)
        span = f"{status.uptime_s:.0f} s since its start"
    state = (
        Text("ready", style="bold green") if asked.is_ready else Text("not ready: " + "; ".join(asked.reasons), style="bold red")
    )
    mode = f"{status.mode}{', degraded' if status.degraded else ''}{', draining' if status.draining else ''}"
    head = Text.assemble((url, "bold"), "  ", state, f"  {status.model}  {mode}  up {status.uptime_s:.0f} s")
    counts = Text("  ".join(f"{name.replace('_', ' ')} {count}" for name, count in status.requests.items()))
    parts: list[RenderableType] = [head, warning if trouble else counts, Text(""), _worker_table(status.workers), _legend()]
    if status.pairs:
        parts += [Text(""), _transfer_line(asked, recent)]
    return Group(*parts, Text(""), _rate_line(recent), Text(""), _latency_table(window, span))


def _worker_table(workers: list[Worker]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("worker", "state", "device"):
        table.add_column(name)
    for name in ("waiting", "running", "restarts"):
        table.add_column(name, justify="right")
    table.add_column("KV blocks", min_width=_BAR_CELLS, no_wrap=True)
    table.add_column("held", justify="right")
    for worker in workers:
        numbers = (worker.requests.get("waiting", 0), worker.requests.get("running", 0), worker.restarts)
        total = worker.blocks.get("total", 0)
        held = sum(worker.blocks.get(name, 0) for name in _STATES if name != "cached")
        table.add_row(
            Text(worker.id),
            Text(worker.state, style="green" if worker.state == "ready" else "red"),
            Text(worker.device),
            *map(str, numbers),
            _bar(worker.blocks),
            f"{held}/{total}",
        )
    return table


def _bar(blocks: dict[str, int]) -> Text:
    """A cell for each part of the pool, never fewer than one for a state that has blocks."""
    total, bar = max(1, blocks.get("total", 0)), Text()
    for name, (cell, style) in _STATES.items():
        if count := blocks.get(name, 0):
            bar.append(cell * min(max(1, round(count / total * _BAR_CELLS)), _BAR_CELLS - len(bar)), style=style)
    return bar.append("·" * (_BAR_CELLS - len(bar)), style="dim")


def _legend() -> Text:
    legend = Text("blocks: ", style="dim")
    for name, (cell, style) in _STATES.items():
        legend.append(cell, style=style).append(f" {name.replace('_', ' ')}  ", style="dim")
    return legend.append("· free", style="dim")


def _transfer_line(asked: Asked, window: Window) -> Text:
    pairs = ", ".join(
        f"{pair.prefill} → {pair.decode} {pair.transport}" + (f" {pair.gb_per_s:.1f} GB/s" if pair.gb_per_s else "")
        for pair in asked.status.pairs
    )
    copied, seconds = window.increase("disagg_transfer_bytes_total"), window.increase("disagg_transfer_seconds_total")
    now = f"{copied / window.seconds / 1e6:.1f} MB/s moved" + (
        f", copied at {copied / seconds / 1e9:.1f} GB/s" if seconds else ""
    )
    return Text.assemble(("hand-over  ", "bold"), f"{now}  (proven: {pairs})")


def _rate_line(window: Window) -> Text:
    tokens, hits = window.rate("disagg_generated_tokens_total"), window.increase("disagg_prefix_hits_total")
    queries = window.increase("disagg_prefix_queries_total")
    hit = f"{hits / queries:.0%}" if queries else "-"
    totals = {"failovers": "disagg_failovers_total", "aborts": "disagg_aborts_total", "preemptions": "disagg_preemptions_total"}
    counts = "   ".join(f"{what} {window.increase(name):.0f}" for what, name in totals.items())
    return Text.assemble((f"{tokens:.1f} tokens/s", "bold cyan"), f"   prefix hits {hit}   {counts}")


def _latency_table(window: Window, span: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column(f"ms, {span}")
    for q in _QUANTILES:
        table.add_column(f"p{q * 100:.0f}", justify="right")
    table.add_column("count", justify="right")
    for what, name in _LATENCIES.items():
        values = ["-" if value is None else f"{value * 1e3:.1f}" for value in window.quantiles(name)]
        table.add_row(what, *values, f"{window.increase(f'{name}_count'):.0f}")
    return table
