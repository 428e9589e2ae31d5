"""The same figures by the names that dashboards made for vLLM plot (``--metrics-compat vllm``): nothing is observed twice.

All carry ``model_name``, by which those dashboards select. Sums are over all workers. A queued request is one that no worker
computes yet; a running one is being prefilled, handed over or decoded. Prefix figures are in tokens there, in blocks here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from disagg.distribution import family
from disagg.metrics import Metrics, RouterBooks
from disagg.supervisor import Role, WorkerInfo


class VllmCollector(Collector):
    def __init__(self, metrics: Metrics, workers: list[WorkerInfo], router: RouterBooks, model_name: str) -> None:
        self._metrics = metrics
        self._workers = workers
        self._router = router
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering needs no values."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._distributions()

    def _gauges(self) -> Iterator[Metric]:
        counts = dict(self._router.counts())
        queued = counts.pop("queued", 0)
        usage = self._kv_usage()
        for name, text, value in (
            ("num_requests_running", "Requests that workers compute or hold", sum(counts.values())),
            ("num_requests_waiting", "Requests that no worker computes yet", queued),
            ("kv_cache_usage_perc", "Share of KV blocks in use where tokens are decoded, 0 to 1", usage),
            ("gpu_cache_usage_perc", "The same by its older name", usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        stats = [(worker.settings.block_size, worker.stats) for worker in self._workers if worker.stats is not None]
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens", self._metrics.prompt_lengths.total),
            ("generation_tokens", "Generated tokens", self._router.num_generated_tokens),
            ("num_preemptions", "Sequences that gave their blocks back", sum(each.preemptions for _, each in stats)),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", sum(b * each.prefix_queries for b, each in stats)),
            ("prefix_cache_hits", "Tokens found there", sum(b * each.prefix_hits for b, each in stats)),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        finished = CounterMetricFamily("vllm:request_success", "Choices ended", labels=["model_name", "finished_reason"])
        for reason in {"stop": 0, "length": 0, "abort": 0, **self._metrics.num_finished}:
            finished.add_metric([self._model_name, reason], self._metrics.num_finished.get(reason, 0))
        yield finished

    def _distributions(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, text, distribution in (
            ("time_to_first_token_seconds", "Arrival to first token", metrics.ttft),
            ("inter_token_latency_seconds", "Gap between tokens of one stream", metrics.itl),
            ("time_per_output_token_seconds", "The same by its older name", metrics.itl),
            ("request_time_per_output_token_seconds", "Mean gap of one request", metrics.tpot),
            ("e2e_request_latency_seconds", "Arrival to last token", metrics.e2e),
            ("request_queue_time_seconds", "Waiting for a worker", metrics.stages["queue"]),
            ("request_prefill_time_seconds", "Computing the prompt", metrics.stages["prefill"]),
            ("request_decode_time_seconds", "Generating after the hand-over", metrics.stages["decode"]),
            ("request_prompt_tokens", "Prompt tokens of one request", metrics.prompt_lengths),
            ("request_generation_tokens", "Tokens generated for one request", metrics.answer_lengths),
            ("request_params_max_tokens", "Tokens that one request may generate", metrics.answer_limits),
            (
                "request_max_num_generation_tokens",
                "The same: a choice is a request",
                metrics.answer_lengths,
            ),
        ):
            yield family(f"vllm:{name}", text, "model_name", [(self._model_name, distribution)])

    def _kv_usage(self) -> float:
        """The fullest of the workers that decode: it is the one that will turn requests away."""
        shares = [0.0]
        for worker in self._workers:
            if worker.role is not Role.PREFILL and worker.ready is not None and worker.stats is not None:
                in_use = worker.ready.num_blocks - worker.stats.free - worker.stats.cached
                shares.append(in_use / max(1, worker.ready.num_blocks))
        return max(shares)
