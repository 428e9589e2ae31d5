"""Replay a trace of real requests against any OpenAI-compatible server, and tell how many it served in time (goodput).

    python bench/replay.py TRACE --url URL [--rate 0.1 0.2] [--length 0.1] [--duration 60] [--ttft 2] [--tpot 0.1] [--json -]

Open loop: a request is sent when the trace says so, scaled by --rate, however the server is doing; --length scales prompts and
answers. Prompts are token ids, drawn anew in each run unless --seed says otherwise, so that a second run finds nothing cached;
where the trace tells which prefixes are equal they are equal here, too. Latencies are from the moment of sending; how late
that was is the lag, which is this program's own. With --json also a plot, beside the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import curves
import orjson
from goodput import Limits, Outcome, latencies, summarise
from server import RESULTS, report
from traces import Arrival, Trace, fitted, prompt_tokens, read_trace, scaled

TIMEOUT = aiohttp.ClientTimeout(total=None, sock_read=300)  # a server that says nothing for so long will not
JSON = {"Content-Type": "application/json"}


async def served_model(url: str) -> tuple[str, int | None]:
    """Name of the first model, and its context where the server tells."""
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(f"{url}/v1/models") as answer:
        model = (await answer.json())["data"][0]
    return model["id"], model.get("max_model_len")


async def replay(url: str, model: str, requests: Sequence[tuple[Arrival, list[int]]]) -> list[Outcome]:
    """Send each request when it is due, and wait for all of them."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # servers may close an idle connection just as it is used again
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        begun = time.perf_counter() + 0.1
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_request(session, url, model, begun, *request)) for request in requests]
    return [task.result() for task in tasks]


async def _request(
    session: aiohttp.ClientSession, url: str, model: str, begun: float, arrival: Arrival, prompt: list[int]
) -> Outcome:
    fields = {"model": model, "prompt": prompt, "max_tokens": arrival.num_output, "temperature": 0, "ignore_eos": True}
    body = orjson.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}})
    due = begun + arrival.at_s
    await asyncio.sleep(due - time.perf_counter())
    sent = time.perf_counter()
    first = last = 0.0
    num_events, usage = 0, {}
    try:
        async with session.post(f"{url}/v1/completions", data=body, headers=JSON) as answer:
            if answer.status != 200:
                return Outcome(len(prompt), sent - due, error=f"{answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    return Outcome(len(prompt), sent - due, error=str(event["error"])[:200])
                usage = event.get("usage") or usage
                if event.get("choices"):
                    last = time.perf_counter()
                    first = first or last
                    num_events += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        return Outcome(len(prompt), sent - due, error=repr(error)[:200])
    if not num_events:
        return Outcome(len(prompt), sent - due, error="no token came")
    return Outcome(
        num_prompt=len(prompt),
        lag_s=sent - due,
        ttft_s=first - sent,
        e2e_s=last - sent,
        num_output=usage.get("completion_tokens") or num_events,  # an event may hold several tokens
        num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def plot(trace: Trace, outcomes: dict[float, list[Outcome]], runs: list[dict[str, Any]], limits: Limits, path: Path) -> None:
    """TTFT and TPOT of every rate as cumulative shares with their limits, and with several rates the goodput over them."""
    figure, axes = curves.panels(3 if len(runs) > 1 else 2, f"{trace.name}\n{trace.attribution}")
    for axis, name, limit in ((axes[0], "ttft_s", limits.ttft_s), (axes[1], "tpot_s", limits.tpot_s)):
        for run in runs:
            curves.cumulative(axis, latencies(outcomes[run["rate"]])[name], label=f"{run['offered_per_s']:g} requests/s")
        axis.axvline(limit, color="black", linestyle="--", label=f"limit {limit:g} s")
        axis.set(xlabel=f"{name.removesuffix('_s').upper()} in s", ylabel="share of requests that succeeded", xscale="log")
        axis.legend()
    if len(runs) > 1:
        axes[2].plot([run["offered_per_s"] for run in runs], [run["goodput"] for run in runs], marker="o")
        axes[2].set(xlabel="requests/s offered", ylabel="share of requests within both limits", xlim=(0, None), ylim=(0, 1.05))
    curves.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="an Azure .csv or a Mooncake .jsonl")
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", help="the first that the server names")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.1], help="times the trace's; one run after another")
    parser.add_argument("--length", type=float, default=0.1, help="times the trace's")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds in which requests are sent")
    parser.add_argument("--begin", type=float, default=0.0, help="where in the trace, in seconds of its own")
    parser.add_argument("--max-context", type=int, help="longer requests are cut to it; what the server says, if it does")
    parser.add_argument("--ttft", type=float, default=2.0, help="limit in s")
    parser.add_argument("--tpot", type=float, default=0.1, help="limit in s")
    parser.add_argument(
        "--token-ids", type=int, nargs=2, default=[1000, 32000], help="prompts are drawn from these, the last left out"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--json", help="file to write, or - for bench/results/replay-TRACE.json")
    args = parser.parse_args()
    try:  # where all cores are busy an ordinary client may be starved for seconds, which would be booked as the server's latency
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError as error:
        print(f"no real-time priority ({error}): latencies of a busy machine are not to be trusted", file=sys.stderr)

    trace, url, limits = read_trace(args.trace), args.url.rstrip("/"), Limits(args.ttft, args.tpot)
    model, context = asyncio.run(served_model(url))
    context = args.max_context or context
    outcomes, runs = {}, []
    for index, rate in enumerate(args.rate):
        rng, seed = random.Random(f"{args.seed} {index}"), args.seed + index
        asked = scaled(trace.arrivals, rate=rate, length=args.length, duration_s=args.duration, begin_s=args.begin)
        if not asked:
            raise SystemExit(f"at {rate:g} times its rate the trace has no request in {args.duration:g} s")
        sent = [fitted(arrival, context) for arrival in asked] if context else asked
        requests = [(arrival, prompt_tokens(arrival, range(*args.token_ids), seed, rng)) for arrival in sent]
        outcomes[rate] = asyncio.run(replay(url, args.model or model, requests))
        num_cut = sum(one != other for one, other in zip(asked, sent))
        runs.append({"rate": rate, "cut_to_context": num_cut, **summarise(outcomes[rate], limits, args.duration)})
    result = {
        "trace": trace.name,
        "attribution": trace.attribution,
        "model": args.model or model,
        "length": args.length,
        "begin_s": args.begin,
        "duration_s": args.duration,
        "max_context": context,
        "limits": {"ttft_s": limits.ttft_s, "tpot_s": limits.tpot_s},
        "seed": args.seed,
        "runs": runs,
    }
    report(f"replay-{trace.name}", result, args.json)
    if args.json:
        path = RESULTS / f"replay-{trace.name}.json" if args.json == "-" else Path(args.json)
        plot(trace, outcomes, runs, limits, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
