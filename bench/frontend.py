"""What a streamed token costs the parent process: read the step's message, detokenise, write the event, send it.

256 streams on the null engine (no model: tokens are hashes), clients in a process of their own. The figure is the parent's CPU time
between two moments at which every stream is under way, divided by the tokens that clients received between them.

    python bench/frontend.py [--streams 256] [--tokens 400] [--json -]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
from multiprocessing.connection import Connection

from clients import random_prompt, stream
from server import cpu_seconds, report, running_server

TARGET_US = 40.0


def client_process(url: str, num_streams: int, num_tokens: int, pipe: Connection) -> None:
    """Run the streams; tell the measuring process when all are under way, and how many tokens came until the first one ended."""

    async def run() -> None:
        seen = [0] * num_streams
        started, finished = False, False

        def counter(index: int):  # noqa: ANN202
            def on_token(count: int) -> bool:
                nonlocal started, finished
                seen[index] = count
                if not started and min(seen) >= 5:
                    started = True
                    pipe.send(sum(seen))
                if started and not finished and count >= num_tokens - 5:
                    finished = True
                    pipe.send(sum(seen))
                return False

            return on_token

        rng = random.Random(1)
        await asyncio.gather(
            *[
                stream(url, random_prompt(rng, 16, 1256)[:16], num_tokens, model="null", on_token=counter(index))
                for index in range(num_streams)
            ]
        )

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--json", help="file to write, or - for bench/results/frontend.json")
    args = parser.parse_args()
    costs, rates = [], []
    with running_server("--model", "null", "--max-num-seqs", str(args.streams)) as server:
        for _ in range(3):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=client_process, args=(server.url, args.streams, args.tokens, theirs))
            process.start()
            first = ours.recv()
            cpu, begun = cpu_seconds(server.pid), time.perf_counter()
            last = ours.recv()
            cpu, took = cpu_seconds(server.pid) - cpu, time.perf_counter() - begun
            process.join()
            costs.append(cpu / (last - first) * 1e6)
            rates.append((last - first) / took)
    median = sorted(costs)[1]
    report(
        "frontend",
        {
            "streams": args.streams,
            "parent_us_per_token": round(median, 1),
            "runs_us": [round(cost, 1) for cost in costs],
            "tokens_per_s": round(sorted(rates)[1]),
            "target_us": TARGET_US,
            "met": median <= TARGET_US,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
