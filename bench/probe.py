"""Black-box probe of any OpenAI-compatible streaming server: what disaggregation is about, seen by its clients.

    python bench/probe.py --url http://127.0.0.1:8000 [--phases decode,prefill,interference] [--repeat 3] [--json FILE]

decode        N streams at once. The rate is that of all streams together while every one of them is decoding: from the first
              token of the last to begin until the first one ends. ITL is the gap between two events of a stream.
prefill       one prompt at a time: time to first token (TTFT).
interference  streams decode while long prompts arrive one after another, each when the one before has ended. The window opens
              when every stream is under way and closes with the last long prompt's end; gaps are cut at its borders. A long
              prompt asks for two tokens, so that a server that hands its KV over really does.

Prompts are random token ids: no prefix cache helps, and every server has the same to do. Every request has its own
connection.
The probe asks for real-time priority, because an ordinary client on a machine whose cores are all busy may be starved, which
would be booked as the server's latency; ``lag_max_ms`` is its own worst delay: where that is large, the probe was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
from clients import percentile, random_prompt
from server import report
from streamed import Streamed, common_window

PHASES = ("decode", "prefill", "interference")
SHORT_PROMPT = 32  # tokens
UNDER_WAY = 8  # tokens that a stream has brought when it counts as being under way
ENDLESS = 6000  # tokens: more than a stream makes beside the long prompts
ATTEMPTS = 3
QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Plan:
    """What a run does. Lengths in tokens."""

    phases: tuple[str, ...] = PHASES
    streams: tuple[int, ...] = (1, 4, 16)
    decode_tokens: int = 96
    prompts: tuple[int, ...] = (512, 2000)
    beside: int = 4  # streams that decode while long prompts arrive
    long_prompt: int = 3000
    arrivals: int = 3


class Probe:
    """Requests to one server. ``retries``: connections that it closed before it had answered anything."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url.rstrip("/") + "/v1/completions", model
        self._rng = random.Random()
        self.retries = 0

    async def stream(self, num_prompt: int, max_tokens: int, on_token: Callable[[int], bool] = lambda count: False) -> Streamed:
        """One greedy completion of random ids, to its end or until ``on_token(count)`` says True. Raises RuntimeError."""
        body = {
            "model": self._model,
            "prompt": random_prompt(self._rng, num_prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        async with contextlib.AsyncExitStack() as stack:
            for attempt in range(ATTEMPTS):
                result = Streamed(time.perf_counter())
                try:
                    response = await stack.enter_async_context(self._session.post(self._url, json=body))
                    break
                except aiohttp.ClientConnectionError:
                    self.retries += 1
                    if attempt == ATTEMPTS - 1:
                        raise
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
            async for event in events(response):
                if event["choices"]:
                    result.take(event, time.perf_counter())
                    if result.arrivals and on_token(result.arrivals[-1][1]):
                        return result
                elif event.get("usage"):
                    result.correct(event["usage"]["completion_tokens"])
        if not result.arrivals:
            raise RuntimeError("the stream ended without a token")
        return result

    async def decode(self, num_streams: int, max_tokens: int) -> dict[str, float]:
        runs = await asyncio.gather(*[self.stream(SHORT_PROMPT, max_tokens) for _ in range(num_streams)])
        start, end = common_window(runs)
        gaps = [gap for run in runs for gap in run.gaps_in(start, end)]
        return {
            "tokens_per_s": round(sum(run.tokens_in(start, end) for run in runs) / (end - start), 1),
            "itl_p50_ms": round(statistics.median(gaps) * 1e3, 2),
            "itl_p99_ms": round(percentile(gaps, 0.99) * 1e3, 2),
            "ttft_p50_ms": round(statistics.median(run.ttft_s for run in runs) * 1e3, 1),
            "tokens_per_event": round(max_tokens * num_streams / sum(len(run.arrivals) for run in runs), 3),
        }

    async def prefill(self, num_prompt: int) -> dict[str, float]:
        ttft_s = (await self.stream(num_prompt, 2)).ttft_s
        return {"ttft_s": round(ttft_s, 3), "tokens_per_s": round(num_prompt / ttft_s, 1)}

    async def interference(self, num_streams: int, long_prompt: int, arrivals: int) -> dict[str, object]:
        under_way, end = asyncio.Semaphore(0), math.inf

        async def decode_beside() -> Streamed:
            is_under_way = False

            def on_token(count: int) -> bool:
                nonlocal is_under_way
                if count >= UNDER_WAY and not is_under_way:
                    is_under_way = True
                    under_way.release()
                return time.perf_counter() > end

            run = await self.stream(SHORT_PROMPT, ENDLESS, on_token)
            if run.arrivals[-1][0] < end:
                raise RuntimeError("a stream ended before the last long prompt")
            return run

        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(decode_beside()) for _ in range(num_streams)]
            for _ in range(num_streams):
                await under_way.acquire()
            start = time.perf_counter()
            longs = [await self.stream(long_prompt, 2) for _ in range(arrivals)]
            end = time.perf_counter()
        runs = [task.result() for task in beside]
        gaps = [gap for run in runs for gap in run.gaps_in(start, end)]
        return {
            "itl_p50_ms": round(statistics.median(gaps) * 1e3, 2),
            "itl_p99_ms": round(percentile(gaps, 0.99) * 1e3, 2),
            "itl_max_ms": round(max(gaps) * 1e3, 2),
            "itl_quantiles_ms": {f"{q:g}": round(percentile(gaps, q) * 1e3, 2) for q in QUANTILES},
            "num_gaps": len(gaps),
            "tokens_per_s": round(sum(run.tokens_in(start, end) for run in runs) / (end - start), 1),
            "long_ttft_s": round(statistics.median(run.ttft_s for run in longs), 2),
        }


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream. Raises RuntimeError for an error event."""
    async for line in response.content:
        if line.startswith(b"data:") and b"[DONE]" not in line:
            event: dict[str, Any] = json.loads(line[5:])
            if event.get("error"):
                raise RuntimeError(str(event["error"])[:300])
            yield event


async def watch_own_lag(lags: list[float], every_s: float = 0.01) -> None:
    """How much later than asked for this process is woken."""
    while True:
        asked = time.perf_counter() + every_s
        await asyncio.sleep(every_s)
        lags.append(time.perf_counter() - asked)


async def run(url: str, model: str, plan: Plan) -> dict[str, Any]:
    """One run of the plan's phases, after a short stream that does not count."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        probe, lags = Probe(session, url, model), list[float]()
        watch = asyncio.create_task(watch_own_lag(lags))
        await probe.stream(SHORT_PROMPT, 16)
        result: dict[str, Any] = {}
        if "decode" in plan.phases:
            result["decode"] = {str(n): await probe.decode(n, plan.decode_tokens) for n in plan.streams}
        if "prefill" in plan.phases:
            result["prefill"] = {str(n): await probe.prefill(n) for n in plan.prompts}
        if "interference" in plan.phases:
            result["interference"] = await probe.interference(plan.beside, plan.long_prompt, plan.arrivals)
        watch.cancel()
        return {
            **result,
            "lag_p99_ms": round(percentile(lags, 0.99) * 1e3, 2),
            "lag_max_ms": round(max(lags) * 1e3, 2),
            "retries": probe.retries,
        }


def take_priority() -> None:
    """Real-time priority for this process, not for those it starts."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError as error:
        print(f"no real-time priority ({error}): latencies of a busy machine are not to be trusted", file=sys.stderr)


def served_model(url: str) -> str:
    with urllib.request.urlopen(url.rstrip("/") + "/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", help="default: the first one that the server names")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", help="file to write, or - for bench/results/probe.json")
    args = parser.parse_args()
    take_priority()
    plan, model = Plan(phases=tuple(args.phases.split(","))), args.model or served_model(args.url)
    runs = [asyncio.run(run(args.url, model, plan)) for _ in range(args.repeat)]
    report("probe", {"plan": asdict(plan), "model": model, "runs": runs}, args.json)


if __name__ == "__main__":
    main()
