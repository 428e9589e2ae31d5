"""Kill workers with -9 at random tokens, again and again, and compare every stream with an undisturbed one.

    python bench/kills.py [--kills 200] [--model null | smollm2] [--json -]

Each round streams eight completions, half of them greedy and half seeded, and kills the prefill or the decode worker when the
first has received a random number of tokens. Counted: streams whose text differs, streams that ended without [DONE], and errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time

from clients import Streamed, stream
from server import RunningServer, report, running_server

STREAMS = 8


def wait_until_ready(server: RunningServer) -> dict[str, int]:
    """Pids by role, once every worker and pair can serve."""
    while True:
        status = json.loads(server.get("/v1/disagg/status"))
        if all(worker["state"] == "ready" for worker in status["workers"]) and all(pair["verified"] for pair in status["pairs"]):
            return {worker["role"]: worker["pid"] for worker in status["workers"]}
        time.sleep(0.02)


async def streams(
    server: RunningServer, model: str, num_tokens: int, kill: tuple[int, int] | None
) -> list[Streamed | BaseException]:
    """All streams of one round; ``kill`` = (pid, at which token of the first stream)."""

    def on_token(count: int) -> bool:
        if kill is not None and count == kill[1]:
            os.kill(kill[0], signal.SIGKILL)
        return False

    def one(index: int):
        prompt = [40 + (index * 7 + position * 13) % 80 for position in range(20 + 9 * index)]
        drawing = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0}
        watch = on_token if index == 0 else None
        return stream(server.url, prompt, num_tokens, model=model, on_token=watch, keep_text=True, **drawing)

    return await asyncio.gather(*[one(index) for index in range(STREAMS)], return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--model", default="null")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--json", help="file to write, or - for bench/results/kills.json")
    args = parser.parse_args()
    rng = random.Random(1)
    counted = {"streams": 0, "different": 0, "without_done": 0, "errors": 0}
    # A short window, or the backoff between restarts grows to its most and the kills take an hour.
    options = ("--model", args.model, "--restart-window-s", "0.1", "--kv-memory", "64MiB" if args.model == "null" else "512MiB")
    with running_server(*options) as server:
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        expected = [run.text for run in asyncio.run(streams(server, model, args.tokens, None)) if isinstance(run, Streamed)]
        assert len(expected) == STREAMS
        for number in range(args.kills):
            pids = wait_until_ready(server)
            role = ("decode", "prefill")[number % 2]
            at_token = rng.choice([1, 2, 3, 10, 50, rng.randrange(1, args.tokens // 2)])
            for run, text in zip(asyncio.run(streams(server, model, args.tokens, (pids[role], at_token))), expected, strict=True):
                counted["streams"] += 1
                if not isinstance(run, Streamed):
                    counted["errors"] += 1
                    print(f"kill {number} of {role} at token {at_token}: {run}")
                elif run.text != text:
                    counted["different"] += 1
                    print(f"kill {number} of {role} at token {at_token}: the text differs")
                elif not run.is_complete:
                    counted["without_done"] += 1
        restarts = sum(worker["restarts"] for worker in json.loads(server.get("/v1/disagg/status"))["workers"])
    report("kills", {"model": args.model, "kills": args.kills, "restarts": restarts, **counted}, args.json)


if __name__ == "__main__":
    main()
