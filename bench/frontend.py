"""What a streamed token costs the parent process: read the step's message, detokenise, write the event, send it.

256 and 2,000 streams on the null engine (no model: tokens are hashes), clients in a process of their own. The figure is the
parent's CPU time over the whole run, requests' reading and validation included, divided by the tokens streamed, and the part of
it that is the kernel's. The null engine is faster than the parent, so tokens that wait are sent as one event.

    python bench/frontend.py [--streams 256 2000] [--tokens 400] [--json -]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
from multiprocessing.connection import Connection

from clients import stream
from server import RunningServer, cpu_seconds, report, running_server

TARGET_US = 30.0


def client_process(url: str, num_streams: int, num_tokens: int, pipe: Connection) -> None:
    """Run the streams to their ends; tell how many events came, and how long it took."""

    async def run() -> tuple[int, float]:
        rng = random.Random()
        prompts = [[rng.randrange(32, 127) for _ in range(16)] for _ in range(num_streams)]
        begun = time.perf_counter()
        runs = await asyncio.gather(*[stream(url, prompt, num_tokens, model="null") for prompt in prompts])
        return sum(len(run.arrivals) for run in runs), time.perf_counter() - begun

    pipe.send(asyncio.run(run()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 2000])
    parser.add_argument(
        "--tokens", type=int, default=400, help="of each stream of the first number; the others share as many, 100 each at least"
    )
    parser.add_argument("--json", help="file to write, or - for bench/results/frontend.json")
    args = parser.parse_args()
    most = str(max(args.streams))
    with running_server("--model", "null", "--max-num-seqs", most, "--max-queue", most) as server:
        results = {num: measure(server, num, max(100, args.tokens * args.streams[0] // num)) for num in args.streams}
    report("frontend", {"target_us_per_token": TARGET_US, "streams": results}, args.json)


def measure(server: RunningServer, num_streams: int, num_tokens: int) -> dict[str, object]:
    """The median of three runs, after one that warms up."""
    runs = []
    for _ in range(4):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(target=client_process, args=(server.url, num_streams, num_tokens, theirs))
        user_s, system_s = cpu_seconds(server.pid)
        process.start()
        theirs.close()  # so that its death ends the waiting below
        num_events, took_s = ours.recv()
        user_s, system_s = (after - before for after, before in zip(cpu_seconds(server.pid), (user_s, system_s)))
        process.join()
        runs.append(
            {
                "us_per_token": round((user_s + system_s) / (num_streams * num_tokens) * 1e6, 1),
                "of_it_kernel": round(system_s / (num_streams * num_tokens) * 1e6, 1),
                "us_per_event": round((user_s + system_s) / num_events * 1e6, 1),
                "tokens_per_s": round(num_streams * num_tokens / took_s),
            }
        )
    median = sorted(runs[1:], key=lambda run: run["us_per_token"])[1]
    return {"tokens": num_tokens, **median, "runs": runs}


if __name__ == "__main__":
    main()
