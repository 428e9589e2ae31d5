"""disagg.metrics: distributions count as Prometheus does, what is observed shows, dashboards ask for what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from disagg.distribution import Distribution, family
from disagg.lifetime import summary, tpot_s, ttft_s, visits
from disagg.messages import VERSION, Configure, Ready, Stats, TokenOutput
from disagg.metrics import Metrics, WorkerCollector
from disagg.request import FailReason, Request, RequestEvent, SamplingParams
from disagg.stream import RequestStream
from disagg.supervisor import Role, WorkerInfo
from disagg.vllm_metrics import VllmCollector
from tests.sim.world import make_layout, worker_settings

ROOT = Path(__file__).resolve().parents[2]
LABELS = {"role", "worker", "route", "code", "finish_reason", "transport", "stage", "state", "reason", "le"}
_PLOTTED = """
num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc prompt_tokens_total generation_tokens_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket time_per_output_token_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
request_success_total prefix_cache_queries_total prefix_cache_hits_total num_preemptions_total request_prompt_tokens_bucket
request_generation_tokens_bucket request_params_max_tokens_bucket request_max_num_generation_tokens_bucket
request_time_per_output_token_seconds_bucket
"""


class FakeRouter:
    num_late_messages = 3
    num_generated_tokens = 40

    def counts(self) -> dict[str, int]:
        return {"queued": 5, "prefilling": 1, "handing_off": 0, "decoding": 2}


def decode_worker() -> WorkerInfo:
    settings: Configure = worker_settings("decode-0", "decode")
    books = {"waiting": 1, "running": 2, "free": 6, "reserved": 1, "filling": 0, "in_use": 1, "cached": 4, "steps": 9}
    stats = Stats(**books, decode_prefill_tokens=0, preemptions=7, prefix_queries=10, prefix_hits=4, late_messages=1)
    ready = Ready(VERSION, make_layout(settings.block_size), 12, "cpu", 1, 0.1)
    return WorkerInfo("decode-0", Role.DECODE, settings, stats=stats, ready=ready, restarts=2)


def ended(*events: tuple[RequestEvent, float], num_tokens: int = 0) -> RequestStream:
    """A stream that arrived at 0 and passed ``events``."""
    request = Request(id="cmpl-1", prompt=[7, 8, 9], params=SamplingParams(max_tokens=16))
    stream = RequestStream(request, lambda stream, event: None, 0.0)
    for token in range(num_tokens):
        stream.deliver(TokenOutput(dispatch=1, token=token))
    for event, now in events:
        if event is RequestEvent.FAIL:
            stream.fail("it broke", FailReason.WORKER_DIED, now)
        else:
            stream.move(event, now)
    return stream


WHOLE = (
    (RequestEvent.RESERVE, 1.0),
    (RequestEvent.PREFILL, 1.5),
    (RequestEvent.FIRST_TOKEN, 3.5),
    (RequestEvent.COMMIT, 3.75),
    (RequestEvent.FINISH, 7.5),
)


def samples(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@given(st.lists(st.floats(0, 20)), st.lists(st.integers(1, 9), min_size=1, unique=True).map(sorted))
def test_a_distribution_counts_as_prometheus_does(values: list[float], bounds: list[int]) -> None:
    """The same buckets, sum and count as prometheus-client's histogram, a value on a bound included."""
    registry, ours = CollectorRegistry(), Distribution(bounds)
    theirs = Histogram("x", "text", buckets=bounds, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (expected,) = theirs.collect()
    expected_samples = {(s.name, s.labels.get("le")): s.value for s in expected.samples if not s.name.endswith("_created")}
    (got,) = [family("x", "text", None, [("", ours)])]
    assert {(s.name, s.labels.get("le")): s.value for s in got.samples} == expected_samples


def test_a_request_leaves_its_time_in_each_stage() -> None:
    """Queue, reserve, prefill, transfer, first decode, decode; TTFT from the first token, TPOT over the rest."""
    stream = ended(*WHOLE, num_tokens=6)
    stream.first_decodes_s.append(0.25)
    expected = {"queue": 1.0, "reserve": 0.5, "prefill": 2.0, "transfer": 0.25, "decode": 3.75, "first_decode": 0.25}
    assert dict(visits(stream)) == expected
    assert (ttft_s(stream), tpot_s(stream)) == (3.5, 0.8)
    metrics = Metrics()
    metrics.observe_request(stream)
    shown = samples(metrics)
    for stage, seconds in expected.items():
        assert shown[f'disagg_stage_seconds_sum{{stage="{stage}"}}'] == seconds
    assert shown["disagg_tpot_seconds_sum"] == 0.8
    assert shown["disagg_prompt_tokens_total"] == 3


def test_where_nothing_is_handed_over_there_is_no_transfer() -> None:
    """A colocated request goes from its first token to decode in no time, and is not counted as a fast hand-over."""
    stream = ended(
        (RequestEvent.PREFILL, 1.0), (RequestEvent.FIRST_TOKEN, 2.0), (RequestEvent.COMMIT, 2.0), (RequestEvent.FINISH, 3.0),
        num_tokens=2,
    )  # fmt: skip
    assert [stage for stage, _ in visits(stream)] == ["queue", "prefill", "decode"]


@pytest.mark.parametrize(
    ("events", "stage"),
    [
        ([], "queue"),
        (WHOLE[:1], "reserve"),
        (WHOLE[:2], "prefill"),
        (WHOLE[:3], "transfer"),
        (WHOLE[:4], "decode"),
    ],
)
def test_an_abort_and_a_failure_name_their_stage(events: list[tuple[RequestEvent, float]], stage: str) -> None:
    """In the counters and in the line that is logged."""
    metrics = Metrics()
    aborted, failed = ended(*events, (RequestEvent.ABORT, 8.0)), ended(*events, (RequestEvent.FAIL, 8.0))
    metrics.observe_request(aborted)
    metrics.observe_request(failed)
    shown = samples(metrics)
    assert shown[f'disagg_aborts_total{{stage="{stage}"}}'] == 1
    assert shown[f'disagg_failures_total{{reason="worker_died",stage="{stage}"}}'] == 1
    assert (summary(aborted)["state"], summary(aborted)["stage"]) == ("aborted", stage)
    assert (summary(failed)["fail_reason"], summary(failed)["cause"]) == ("worker_died", "it broke")


def test_counters_of_the_workers_and_the_router_are_read_when_asked_for() -> None:
    """Blocks by state, sequences, restarts, late messages of the router and of workers, tokens."""
    metrics = Metrics()
    metrics.registry.register(WorkerCollector([decode_worker()], FakeRouter()))
    metrics.observe_failover(FailReason.HANDOFF)
    metrics.observe_transfer("shm", 4_000_000_000, 2.0)
    shown = samples(metrics)
    assert shown['disagg_blocks{role="decode",state="cached",worker="decode-0"}'] == 4
    assert shown['disagg_sequences{role="decode",state="running",worker="decode-0"}'] == 2
    assert shown['disagg_worker_restarts_total{role="decode",worker="decode-0"}'] == 2
    assert shown['disagg_late_messages_total{worker="router"}'] == 3
    assert shown["disagg_generated_tokens_total"] == 40
    assert shown['disagg_failovers_total{reason="handoff_failed"}'] == 1
    assert shown['disagg_transfer_gb_per_second_bucket{le="2.0",transport="shm"}'] == 1
    assert shown['disagg_transfer_seconds_total{transport="shm"}'] == 2


def test_labels_come_from_fixed_sets() -> None:
    """No label of our figures takes a value that a client chose."""
    metrics = Metrics()
    metrics.registry.register(WorkerCollector([decode_worker()], FakeRouter()))
    metrics.count_request("/v1/completions", 200)
    metrics.count_finished("stop")
    metrics.observe_request(ended(*WHOLE, num_tokens=2))
    labels = {label for each in metrics.registry.collect() for sample in each.samples for label in sample.labels}
    assert labels <= LABELS


def test_vllm_dashboards_find_what_they_plot() -> None:
    """Every name is there, under the model's name, with the same figures as ours."""
    metrics, worker = Metrics(), decode_worker()
    metrics.registry.register(WorkerCollector([worker], FakeRouter()))
    metrics.registry.register(VllmCollector(metrics, [worker], FakeRouter(), "org/model"))
    metrics.observe_ttft(0.5)
    metrics.count_finished("length")
    shown = samples(metrics)
    names = {name.partition("{")[0] for name in shown}
    assert {f"vllm:{name}" for name in _PLOTTED.split()} <= names
    assert all('model_name="org/model"' in name for name in shown if name.startswith("vllm:"))
    model = '{model_name="org/model"}'
    assert shown["vllm:num_requests_waiting" + model] == 5
    assert shown["vllm:num_requests_running" + model] == 3
    assert shown["vllm:kv_cache_usage_perc" + model] == 2 / 12, "cached blocks are as good as free"
    assert shown["vllm:generation_tokens_total" + model] == 40
    assert shown["vllm:prefix_cache_hits_total" + model] == 4 * worker.settings.block_size
    assert shown["vllm:time_to_first_token_seconds_sum" + model] == 0.5
    assert shown['vllm:request_success_total{finished_reason="length",model_name="org/model"}'] == 1


def test_what_has_not_gone_wrong_yet_is_zero_and_not_absent() -> None:
    """Of a counter that is not there before its first event no rate shows that event: a dashboard would miss it."""
    names = [sample.name for family in Metrics().registry.collect() for sample in family.samples if sample.value == 0]
    assert names.count("disagg_failovers_total") == len(FailReason)
    assert names.count("disagg_failures_total") == len(FailReason) * names.count("disagg_aborts_total") > 0


def test_the_dashboard_asks_for_figures_that_exist() -> None:
    """Each metric in each query of each panel is a series of ours, with the labels that the query names."""
    metrics = Metrics()
    metrics.registry.register(WorkerCollector([decode_worker()], FakeRouter()))
    metrics.count_request("/v1/completions", 200)
    metrics.count_finished("stop")
    metrics.observe_transfer("shm", 1, 1.0)
    metrics.observe_request(ended(*WHOLE[:1], (RequestEvent.FAIL, 2.0)))
    metrics.observe_request(ended(*WHOLE, num_tokens=2))
    known: dict[str, set[str]] = {}
    for each in metrics.registry.collect():
        for sample in each.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads((ROOT / "dashboards" / "disagg.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) >= 20
    for query in queries:
        names = re.findall(r"\bdisagg_\w+", query)
        assert names, query
        assert set(names) <= known.keys(), query
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        selected = set(re.findall(r"(\w+)=~?\"", query))
        for name in names:
            assert (grouped | selected) - {"le", "instance"} <= known[name], query
    assert {"disagg_blocks", "disagg_failovers_total", "disagg_stage_seconds_bucket"} <= set(
        re.findall(r"\bdisagg_\w+", str(queries))
    )
