"""What a long prefill does to everybody else's stream: the tail of the inter-token latency (ITL) while long prompts are served.

    python bench/interference.py [--streams 4] [--long-prompt 3000] [--url URL | -- SERVE OPTIONS] [--json -]

Streams decode alone, and a long prompt is prefilled alone (undisturbed); then as many streams more, while long prompts arrive one
after another. The window opens when every stream is under way and closes with the last long prompt's first token. Beside them an
ordinary client (bystander.py) streams, and the server observes how late its event loop is. Prompts are random ids, so that no
prefix cache helps. Starts its own server unless --url names one (any OpenAI-compatible server will do).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import time

from bystander import bystander
from clients import percentile, random_prompt, stream
from server import RunningServer, report, running_server

ARRIVALS, SHORT_PROMPT = 3, 32
_LAG = "disagg_event_loop_lag_seconds_bucket"


async def undisturbed(url: str, model: str, rng: random.Random, num_streams: int) -> list[float]:
    runs = await asyncio.gather(*[stream(url, random_prompt(rng, SHORT_PROMPT), 64, model=model) for _ in range(num_streams)])
    return [gap for run in runs for gap in run.gaps_s]


async def disturbed(url: str, model: str, rng: random.Random, num_streams: int, long_prompt: int) -> dict[str, object]:
    warm, window, longs = asyncio.Semaphore(0), [0.0, 0.0], []

    def on_token(count: int) -> bool:
        if count == 5:
            warm.release()
        return window[1] > 0

    async def arrive() -> None:
        for _ in range(num_streams):
            await warm.acquire()
        window[0] = time.perf_counter()
        for _ in range(ARRIVALS):  # two tokens, so that the whole KV cache is handed over as well
            run = await stream(url, random_prompt(rng, long_prompt), 2, model=model)
            longs.append(run.ttft_s)
        window[1] = time.perf_counter()

    streams = [stream(url, random_prompt(rng, SHORT_PROMPT), 6000, model=model, on_token=on_token) for _ in range(num_streams)]
    with bystander(url, model) as bystanders_gaps:
        *runs, _ = await asyncio.gather(*streams, arrive())
    gaps = [
        after - max(before, window[0]) for run in runs for before, after in itertools.pairwise(run.arrivals) if after > window[0]
    ]
    return {
        **spread(gaps),
        "stream_tokens_per_s": round(len(gaps) / (window[1] - window[0]), 1),
        "long_ttft_s": [round(ttft, 2) for ttft in longs],
        "bystander": spread(bystanders_gaps),
    }


def spread(gaps: list[float]) -> dict[str, float]:
    return {
        "itl_p50_ms": round(statistics.median(gaps) * 1e3, 2),
        "itl_p99_ms": round(percentile(gaps, 0.99) * 1e3, 2),
        "itl_max_ms": round(max(gaps) * 1e3, 2),
    }


def lags(server: RunningServer) -> dict[float, float]:
    """How often the event loop's lag was at most each bound in seconds; none from a server that has no such figure."""
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith(_LAG)]
    return {float(line.split('"')[1]): float(line.rsplit(" ", 1)[1]) for line in lines}


def lag_bound(before: dict[float, float], after: dict[float, float], q: float) -> float | None:
    """The least bound in seconds that a share ``q`` of what was observed between the two kept."""
    counts = {bound: after[bound] - before[bound] for bound in after}
    return next((bound for bound, count in counts.items() if count >= q * max(counts.values())), None)


def measure(server: RunningServer, model: str, num_streams: int, long_prompt: int) -> dict[str, object]:
    url, rng = server.url, random.Random()
    asyncio.run(undisturbed(url, model, rng, num_streams))  # warm-up
    alone = asyncio.run(undisturbed(url, model, rng, num_streams))
    prefill = asyncio.run(stream(url, random_prompt(rng, long_prompt), 2, model=model))
    before = lags(server)
    inside = asyncio.run(disturbed(url, model, rng, num_streams, long_prompt))
    after = lags(server)
    p50_ms = statistics.median(alone) * 1e3
    return {
        "undisturbed_itl_p50_ms": round(p50_ms, 2),
        "undisturbed_itl_p99_ms": round(percentile(alone, 0.99) * 1e3, 2),
        "undisturbed_long_ttft_s": round(prefill.ttft_s, 2),
        "window": inside,
        "event_loop_lag_at_most_s": {"p50": lag_bound(before, after, 0.5), "p99": lag_bound(before, after, 0.99)},
        "p99_in_window_to_undisturbed_p50": round(float(str(inside["itl_p99_ms"])) / p50_ms, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--long-prompt", type=int, default=3000, help="tokens")
    parser.add_argument("--json", help="file to write, or - for bench/results/interference.json")
    parser.add_argument("serve_options", nargs="*", help="after --: options for the server that is started")
    args = parser.parse_args()
    try:  # where all cores are busy an ordinary client may be starved for seconds, which would be booked as the server's latency
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError as error:
        print(f"no real-time priority ({error}): latencies of a busy machine are not to be trusted", file=sys.stderr)
    given = contextlib.nullcontext(RunningServer(args.url.rstrip("/"), 0)) if args.url else running_server(*args.serve_options)
    with given as server:
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        results = [measure(server, model, args.streams, args.long_prompt) for _ in range(args.runs)]
    results.sort(key=lambda result: float(str(result["p99_in_window_to_undisturbed_p50"])))
    asked = {"streams": args.streams, "long_prompt": args.long_prompt, "serve_options": args.serve_options}
    report("interference", {**asked, "median": results[len(results) // 2], "runs": results}, args.json)


if __name__ == "__main__":
    main()
