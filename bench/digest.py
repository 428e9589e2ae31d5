"""What --verify-kv costs: the digests of a 2,000-token KV cache against a plain memcpy, and against the prefill they belong to.

    python bench/digest.py [--tokens 2000] [--json -]

rate    the blocks of the built-in model's KV, in an order such as a used pool gives, are digested on one core; the same bytes
        are copied from one array to another by numpy, in turn; medians. A copy reads and writes every byte, a digest reads it
share   one side's digests against the server's time to the first token of a prompt of that length (one token asked for, so
        that nothing is handed over)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time

import numpy as np
from clients import random_prompt, stream
from server import report, running_server

from disagg.handoff.digest import block_digests
from disagg.kv import KVLayout
from disagg.model import find_model, kv_layout, read_model_spec


def digest_rate(layout: KVLayout, num_tokens: int, rounds: int = 25) -> dict[str, float]:
    num_blocks = layout.num_blocks(num_tokens)
    source = np.frombuffer(random.Random(1).randbytes(num_blocks * layout.block_nbytes), dtype=np.uint8)
    target = np.zeros_like(source)
    order = random.Random(1).sample(range(num_blocks), num_blocks)
    digests = block_digests(memoryview(source), layout)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    seconds: dict[str, list[float]] = {"memcpy": [], "digest": []}
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        np.copyto(target, source)
        copied = time.perf_counter()
        digests(order)
        seconds["memcpy"].append(copied - begun)
        seconds["digest"].append(time.perf_counter() - copied)
    os.sched_setaffinity(0, cores)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "nbytes": source.nbytes,
        "block_nbytes": layout.block_nbytes,
        **{f"{name}_gb_per_s": round(source.nbytes / median / 1e9, 2) for name, median in medians.items()},
        "digest_to_memcpy": round(medians["memcpy"] / medians["digest"], 3),
        "digest_ms": round(medians["digest"] * 1e3, 2),
    }


def prefill_s(num_tokens: int, rounds: int = 3) -> float:
    """Median time to the first token of cold prompts, one at a time."""
    rng = random.Random()
    with running_server() as server:
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        ttfts = [
            asyncio.run(stream(server.url, random_prompt(rng, num_tokens), 1, model=model)).ttft_s for _ in range(rounds + 1)
        ]
    return statistics.median(ttfts[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", help="file to write, or - for bench/results/digest.json")
    args = parser.parse_args()
    layout = kv_layout(read_model_spec(find_model("smollm2")), "float16", 16)
    rate = digest_rate(layout, args.tokens)
    ttft_s = prefill_s(args.tokens)
    share = {"ttft_s": round(ttft_s, 3), "share_of_prefill": round(rate["digest_ms"] / 1e3 / ttft_s, 5)}
    report("digest", {"tokens": args.tokens, "rate": rate, **share}, args.json)


if __name__ == "__main__":
    main()
