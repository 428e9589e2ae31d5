"""Every figure that /metrics shows, in one registry in the parent. Seconds and bytes; labels from fixed sets only.

Counters that the parent sees happen are counted here; what workers count themselves (blocks, steps, prefix hits) is read from
their latest Stats when somebody asks. ``vllm_metrics`` shows the same figures under the names of another server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from disagg.distribution import Distribution, family
from disagg.lifetime import FIRST_DECODE, STAGES, last_stage, tpot_s, visits
from disagg.request import FailReason, RequestState
from disagg.stream import RequestStream
from disagg.supervisor import WorkerInfo

_STAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_LAG_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
_RATE_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKEN_BUCKETS = tuple(1 << power for power in range(18))


class Metrics(Collector):
    """Implements what the api and the router observe."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.ttft = Distribution(_STAGE_BUCKETS)
        self.itl = Distribution(_ITL_BUCKETS)
        self.tpot = Distribution(_ITL_BUCKETS)
        self.e2e = Distribution(_STAGE_BUCKETS)
        self.loop_lag = Distribution(_LAG_BUCKETS)
        self.stages = {stage: Distribution(_STAGE_BUCKETS) for stage in (*STAGES.values(), FIRST_DECODE)}
        self.prompt_lengths = Distribution(_TOKEN_BUCKETS)
        self.answer_lengths = Distribution(_TOKEN_BUCKETS)
        self.answer_limits = Distribution(_TOKEN_BUCKETS)
        self.num_finished: dict[str, int] = {}  # choices, by how they ended
        self._transfer_rates: dict[str, Distribution] = {}
        self._requests = Counter("disagg_http_requests", "HTTP requests", ["route", "code"], registry=r)
        self._aborts = Counter("disagg_aborts", "Requests given up by their client, by stage", ["stage"], registry=r)
        self._failures = Counter("disagg_failures", "Requests that could not be finished", ["stage", "reason"], registry=r)
        self._failovers = Counter("disagg_failovers", "Attempts that were lost and begun again", ["reason"], registry=r)
        self._cached_tokens = Counter("disagg_cached_prompt_tokens", "Prompt tokens that prefill found cached", registry=r)
        self._transfer_bytes = Counter("disagg_transfer_bytes", "KV bytes handed over", ["transport"], registry=r)
        self._transfer_seconds = Counter("disagg_transfer_seconds", "Time spent copying KV", ["transport"], registry=r)
        self._corrupted = Counter("disagg_corrupted_blocks", "KV blocks whose digest differed after a hand-over", registry=r)
        # From 0: of a series that begins with its first event, Prometheus shows no rate for that event.
        for stage in STAGES.values():
            self._aborts.labels(stage)
            for reason in FailReason:
                self._failures.labels(stage, reason.value)
        for reason in FailReason:
            self._failovers.labels(reason.value)
        self.observe_ttft: Callable[[float], None] = self.ttft.observe
        self.observe_itl: Callable[[float], None] = self.itl.observe
        self.observe_e2e: Callable[[float], None] = self.e2e.observe
        self.observe_loop_lag: Callable[[float], None] = self.loop_lag.observe
        self.observe_corrupted_block: Callable[[], None] = self._corrupted.inc
        r.register(self)

    # ---------------------------------------------------------------- what the api sees

    def count_request(self, route: str, code: int) -> None:
        self._requests.labels(route, str(code)).inc()

    def count_finished(self, reason: str) -> None:
        self.num_finished[reason] = self.num_finished.get(reason, 0) + 1

    # ---------------------------------------------------------------- what the router sees

    def observe_request(self, stream: RequestStream) -> None:
        for stage, seconds in visits(stream):
            self.stages[stage].observe(seconds)
        if stream.state is RequestState.ABORTED:
            self._aborts.labels(last_stage(stream)).inc()
        elif stream.error is not None:
            self._failures.labels(last_stage(stream), stream.error.reason).inc()
        if (tpot := tpot_s(stream)) is not None:
            self.tpot.observe(tpot)
        self._cached_tokens.inc(stream.num_cached_tokens)
        self.prompt_lengths.observe(len(stream.request.prompt))
        self.answer_lengths.observe(len(stream.tokens))
        self.answer_limits.observe(stream.request.params.max_tokens)

    def observe_failover(self, reason: FailReason) -> None:
        self._failovers.labels(reason.value).inc()

    def observe_transfer(self, transport: str, nbytes: int, seconds: float) -> None:
        self._transfer_bytes.labels(transport).inc(nbytes)
        self._transfer_seconds.labels(transport).inc(seconds)
        if seconds > 0:
            self._transfer_rates.setdefault(transport, Distribution(_RATE_BUCKETS)).observe(nbytes / seconds / 1e9)

    # ---------------------------------------------------------------- what is asked for

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering needs no values."""
        return []

    def collect(self) -> Iterator[Metric]:
        for name, text, distribution in (
            ("disagg_ttft_seconds", "Arrival to first token", self.ttft),
            ("disagg_itl_seconds", "Gap between tokens of one stream", self.itl),
            ("disagg_tpot_seconds", "Mean time per token after the first, of one request", self.tpot),
            ("disagg_e2e_seconds", "Arrival to last token", self.e2e),
            ("disagg_event_loop_lag_seconds", "How late the server's event loop comes to what is due", self.loop_lag),
            ("disagg_request_prompt_tokens", "Prompt tokens of one request", self.prompt_lengths),
            ("disagg_request_generated_tokens", "Tokens generated for one request", self.answer_lengths),
        ):
            yield family(name, text, None, [("", distribution)])
        yield family("disagg_stage_seconds", "Time spent in a stage", "stage", self.stages.items())
        rates = self._transfer_rates.items()
        yield family("disagg_transfer_gb_per_second", "KV copy rate of one hand-over", "transport", rates)
        finished = CounterMetricFamily("disagg_choices_finished", "Choices ended", labels=["finish_reason"])
        for reason, count in self.num_finished.items():
            finished.add_metric([reason], count)
        yield finished
        prompts = int(self.prompt_lengths.total)
        yield CounterMetricFamily("disagg_prompt_tokens", "Prompt tokens of ended requests", prompts)


class RouterBooks(Protocol):
    """What the router counts by itself."""

    num_late_messages: int
    num_generated_tokens: int

    def counts(self) -> dict[str, int]: ...


class WorkerCollector(Collector):
    """The workers' own books and the router's, read when /metrics is asked for."""

    def __init__(self, workers: list[WorkerInfo], router: RouterBooks) -> None:
        self._workers = workers
        self._router = router

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not ask the workers yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        requests = GaugeMetricFamily("disagg_requests", "Requests by state", labels=["stage"])
        for state, count in self._router.counts().items():
            requests.add_metric([state], count)
        yield requests
        yield CounterMetricFamily("disagg_generated_tokens", "Tokens generated", self._router.num_generated_tokens)
        late = CounterMetricFamily("disagg_late_messages", "Messages about dispatches that had ended", labels=["worker"])
        late.add_metric(["router"], self._router.num_late_messages)
        up = GaugeMetricFamily("disagg_worker_up", "1 = ready", labels=["worker", "role"])
        restarts = CounterMetricFamily("disagg_worker_restarts", "Restarts", labels=["worker", "role"])
        blocks = GaugeMetricFamily("disagg_blocks", "KV blocks by state", labels=["worker", "role", "state"])
        sequences = GaugeMetricFamily("disagg_sequences", "Sequences in a worker", labels=["worker", "role", "state"])
        counters = {
            name: CounterMetricFamily(f"disagg_{name}", text, labels=["worker", "role"])
            for name, text in (
                ("steps", "Forward passes"),
                ("decode_prefill_tokens", "Tokens whose KV was computed a second time"),
                ("preemptions", "Sequences that gave their blocks back"),
                ("prefix_queries", "Full prompt blocks looked up in the prefix cache"),
                ("prefix_hits", "Full prompt blocks found there"),
            )
        }
        for worker in self._workers:
            labels = [worker.id, worker.role.value]
            up.add_metric(labels, worker.is_ready)
            restarts.add_metric(labels, worker.restarts)
            if (stats := worker.stats) is None:
                continue
            late.add_metric([worker.id], stats.late_messages)
            for state in ("free", "reserved", "filling", "in_use", "cached"):
                blocks.add_metric([*labels, state], getattr(stats, state))
            for state in ("waiting", "running"):
                sequences.add_metric([*labels, state], getattr(stats, state))
            for name, counter in counters.items():
                counter.add_metric(labels, getattr(stats, name))
        yield from (late, up, restarts, blocks, sequences, *counters.values())
