"""From the command to a server that answers, stage by stage, and the memory it holds: at rest and after a burst of requests.

    python bench/startup.py [--repeat 3] [--streams 24] [--prompt 512] [--tokens 32] [--json -] [options of disagg serve]

Times count from the start of the command and are those at which the server's log lines arrive. Memory is the sum of the PSS (a
page that n processes share counts 1/n in each) over all of the server's processes; ``pools`` is the part of it that backs KV
blocks. The burst has more tokens than a pool of automatic size keeps for its prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clients import random_prompt, stream
from footprint import tree
from server import RunningServer, report, running_server

MIB = 1 << 20
REST_S = 3.0  # for what is read after the server is ready: vocabularies of grammars


@contextlib.contextmanager
def timed_server(arguments: list[str]) -> Iterator[tuple[RunningServer, dict[str, float]]]:
    """A server and, in the order in which they were reached, the seconds that its stages took from the command on."""
    stages: dict[str, float] = {}
    began = time.perf_counter()

    def on_record(record: dict[str, Any]) -> None:
        stages[stage(record)] = round(time.perf_counter() - began, 2)

    with running_server(*arguments, on_record=on_record) as server:
        yield server, stages


def stage(record: dict[str, Any]) -> str:
    """What a line of the log stands for; of lines that stand for the same the last counts."""
    name, worker = record["event"], record.get("worker")
    if name == "loading":
        name = "loaded" if record["fraction"] == 1.0 else "loading"
    return f"{name}: {worker}" if worker else name


def memory(server: RunningServer) -> dict[str, Any]:
    """MiB, all processes together and each of them by what it is."""
    by_process = {}
    for process in tree(server.pid):
        words = process.cmdline()
        name = words[words.index("-m") + 1] if "-m" in words else words[0]
        key = f"{name} {process.pid}" if name in by_process else name
        by_process[key] = round(process.memory_full_info().pss / MIB, 1)
    pools = [os.stat(fd) for fd in Path(f"/proc/{server.pid}/fd").iterdir() if "memfd:disagg" in os.readlink(fd)]
    backed = sum(pool.st_blocks * 512 for pool in pools) / MIB
    return {"total": round(sum(by_process.values()), 1), "pools": round(backed, 1), "by_process": by_process}


async def burst(server: RunningServer, args: argparse.Namespace) -> None:
    model = json.loads(server.get("/v1/models"))["data"][0]["id"]
    rng = random.Random()
    prompts = [random_prompt(rng, args.prompt) for _ in range(args.streams)]
    await asyncio.gather(*(stream(server.url, prompt, args.tokens, model=model) for prompt in prompts))


def measure(args: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    with timed_server(arguments) as (server, stages):
        time.sleep(REST_S)
        at_rest = memory(server)
        asyncio.run(burst(server, args))
        return {"ready_s": stages["ready"], "stages_s": stages, "at_rest_mib": at_rest, "after_burst_mib": memory(server)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--json", help="file to write, or - for bench/results/startup.json")
    args, arguments = parser.parse_known_args()
    runs = [measure(args, arguments) for _ in range(args.repeat)]

    def median_mib(when: str) -> dict[str, float]:
        return {part: statistics.median(run[when][part] for run in runs) for part in ("total", "pools")}

    result = {
        "options": arguments,
        "burst": {"streams": args.streams, "prompt_tokens": args.prompt, "tokens": args.tokens},
        "ready_s": statistics.median(run["ready_s"] for run in runs),
        "at_rest_mib": median_mib("at_rest_mib"),
        "after_burst_mib": median_mib("after_burst_mib"),
        "runs": runs,
    }
    report("startup", result, args.json)


if __name__ == "__main__":
    main()
