"""The hand-over of a 2,000-token KV cache: its copy rate against a plain memcpy, and how much of it prefill hides.

    python bench/handoff.py [--tokens 2000] [--json -]

rate    the shm transport pushes the blocks of the built-in model's KV into another pool; the same bytes are copied from one
        array to another by numpy, in turn, on the same core; medians
hidden  the real server prefills prompts with hand-over (2 tokens asked for) and without (1 token: nothing moves), in turn;
        the time from the first token to the last byte is read from the server's own transfer stage
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import select
import statistics
import time

import numpy as np
from clients import random_prompt, stream
from server import report, running_server

from disagg.handoff.host_pool import create_pool
from disagg.handoff.shm import ShmTransport, as_blocks
from disagg.kv import KVLayout
from disagg.model import find_model, kv_layout, read_model_spec


def copy_rate(layout: KVLayout, num_tokens: int, rounds: int = 15) -> dict[str, float]:
    num_blocks = layout.num_blocks(num_tokens)
    pools = [create_pool(num_blocks * layout.block_nbytes, f"bench-{index}") for index in range(2)]
    transport = ShmTransport("prefill-0", layout, memoryview(pools[0][1]))
    transport.connect("decode-0", 1, layout, num_blocks, pools[1][0], b"")
    os.close(pools[0][0])
    as_blocks(memoryview(pools[0][1]), layout)[:] = 1
    source = np.ones(num_blocks * layout.block_nbytes, dtype=np.uint8)
    target = np.zeros_like(source)
    order = list(range(num_blocks))
    shuffled = random.Random(1).sample(order, num_blocks)
    seconds: dict[str, list[float]] = {"memcpy": [], "handoff": [], "handoff_scattered": []}
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        np.copyto(target, source)
        seconds["memcpy"].append(time.perf_counter() - begun)
        for name, blocks in (("handoff", order), ("handoff_scattered", shuffled)):
            begun = time.perf_counter()
            transport.push(1, "decode-0", 1, order, blocks, 0)
            select.select([transport.fileno()], [], [])
            (done,) = transport.completed()
            seconds[name].append(time.perf_counter() - begun)
            assert done.error is None
            assert done.nbytes == source.nbytes
    transport.close()
    rates = {name: source.nbytes / statistics.median(values[1:]) / 1e9 for name, values in seconds.items()}
    return {
        "nbytes": source.nbytes,
        **{f"{name}_gb_per_s": round(rate, 2) for name, rate in rates.items()},
        "handoff_to_memcpy": round(rates["handoff"] / rates["memcpy"], 3),
        "handoff_scattered_to_memcpy": round(rates["handoff_scattered"] / rates["memcpy"], 3),
    }


def hidden(num_tokens: int, rounds: int = 3) -> dict[str, float]:
    rng = random.Random()
    with running_server() as server:
        chunk_tokens = 512

        def ttft(max_tokens: int) -> float:
            return asyncio.run(stream(server.url, random_prompt(rng, num_tokens), max_tokens, model=model)).ttft_s

        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        for _ in range(2):
            ttft(2)  # warm-up
        with_handoff, without, tails = [], [], []
        for _ in range(rounds):
            without.append(ttft(1))
            before = server.metric('disagg_stage_seconds_sum{stage="transfer"}')
            with_handoff.append(ttft(2))
            while server.metric('disagg_stage_seconds_count{stage="transfer"}') < len(with_handoff) + 2:
                time.sleep(0.05)
            tails.append(server.metric('disagg_stage_seconds_sum{stage="transfer"}') - before)
        nbytes = server.metric('disagg_transfer_bytes_total{transport="shm"}') / (rounds + 2)
    last_chunk = (num_tokens % chunk_tokens) or chunk_tokens
    return {
        "ttft_with_handoff_s": round(statistics.median(with_handoff), 3),
        "ttft_without_s": round(statistics.median(without), 3),
        "ttft_ratio": round(statistics.median(with_handoff) / statistics.median(without), 3),
        "after_first_token_ms": round(statistics.median(tails) * 1e3, 2),
        "nbytes": nbytes,
        "last_chunk_share": round(last_chunk / num_tokens, 3),
        "after_first_token_share_of_prefill": round(statistics.median(tails) / statistics.median(without), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--json", help="file to write, or - for bench/results/handoff.json")
    args = parser.parse_args()
    layout = kv_layout(read_model_spec(find_model("smollm2")), "float16", 16)
    rate = copy_rate(layout, args.tokens)
    report("handoff", {"tokens": args.tokens, "rate": rate, "hidden": hidden(args.tokens)}, args.json)


if __name__ == "__main__":
    main()
