"""What one client that reads 10 bytes a second costs the others: p99 of the gaps between their tokens, with it and without it.

50 streams on the null engine, in a process of their own, beside one that is hardly read. The rounds alternate: a change of
the host's load meets both. The figure is the median of the rounds. The parent's memory shows what is held for the slow one.

    python bench/slow_reader.py [--streams 50] [--tokens 1000] [--rounds 5] [--json -]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import psutil
from clients import percentile, stream
from server import report, running_server

BYTES_PER_S = 10
TARGET_RATIO = 1.1
SLOW_TOKENS = 100_000  # so many that the slow stream is being generated through a whole round


def normal_clients(url: str, num_streams: int, num_tokens: int, pipe: Connection) -> None:
    """Run the streams to their ends; tell the p99 of all their gaps, in seconds."""

    async def run() -> float:
        rng = random.Random()
        prompts = [[rng.randrange(32, 127) for _ in range(16)] for _ in range(num_streams)]
        runs = await asyncio.gather(*[stream(url, prompt, num_tokens, model="null") for prompt in prompts])
        assert all(run.is_complete for run in runs)
        return percentile([gap for run in runs for gap in run.gaps_s], 0.99)

    pipe.send(asyncio.run(run()))


def slow_client(url: str, pipe: Connection) -> None:
    """Read one stream at BYTES_PER_S until it is ended from outside; tell when its first byte has come."""
    parts = urlsplit(url)
    body = json.dumps({"prompt": "slow", "max_tokens": SLOW_TOKENS, "stream": True, "ignore_eos": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # or the kernel would read for it
        connection.connect((parts.hostname, parts.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(1), "the slow stream was refused"
        pipe.send(None)
        while connection.recv(1):
            time.sleep(1 / BYTES_PER_S)
    raise SystemExit("the server has ended the slow stream")


@contextlib.contextmanager
def slow_reader(url: str) -> Iterator[None]:
    """One slow stream, which must live through all of it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=slow_client, args=(url, theirs))
    process.start()
    theirs.close()  # so that its death ends the waiting below
    try:
        ours.recv()
        yield
        assert process.is_alive(), "the slow stream did not live as long as the others"
    finally:
        process.kill()
        process.join()


def p99_ms(url: str, num_streams: int, num_tokens: int) -> float:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=normal_clients, args=(url, num_streams, num_tokens, theirs))
    process.start()
    theirs.close()
    seconds: float = ours.recv()
    process.join()
    return round(seconds * 1e3, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="file to write, or - for bench/results/slow_reader.json")
    args = parser.parse_args()
    without, beside, grown = [], [], []
    with running_server("--model", "null") as server:
        parent = psutil.Process(server.pid)
        p99_ms(server.url, args.streams, args.tokens)  # warms up
        for _ in range(args.rounds):
            without.append(p99_ms(server.url, args.streams, args.tokens))
            held = parent.memory_info().rss
            with slow_reader(server.url):
                beside.append(p99_ms(server.url, args.streams, args.tokens))
                grown.append(round((parent.memory_info().rss - held) / 2**20, 1))
    figures = {
        "p99_itl_ms": statistics.median(without),
        "p99_itl_beside_slow_ms": statistics.median(beside),
        "ratio": round(statistics.median(beside) / statistics.median(without), 3),
        "target_ratio": TARGET_RATIO,
        "parent_grew_mib": max(grown),
    }
    rounds = [{"without": a, "beside": b} for a, b in zip(without, beside)]
    report("slow_reader", {"streams": args.streams, "tokens": args.tokens, **figures, "rounds": rounds}, args.json)


if __name__ == "__main__":
    main()
