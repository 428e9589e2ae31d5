"""How often a prompt's blocks are found in the prefix cache, on a trace that tells which prefixes are equal.

    python bench/prefix_cache.py TRACE.jsonl [--capacities 4096 16384 65536] [--json -]

Prompts go through the product's own scheduler, block pool and digests, in order of arrival; only the engine is left out. A hash
id of the trace (512 tokens) is one KV block of 16, so lengths are a 32nd. Two figures beside it come from the ids alone: the
ceiling, which is what a cache that forgets nothing finds, and what an ideal LRU cache of as many blocks finds. With --json also
a plot, beside the JSON.

rates          are shares of all the prompts' blocks; a block counts as found when all before it are found, too. Only full blocks
               can be kept, and the last one of a prompt often is not: the ceiling does not know that, the ideal LRU does
one_by_one     each prompt is computed before the next one comes
all_at_once    prompts of one timestamp are queued together: those that share a prefix nobody has computed yet do it twice
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

import curves
from server import RESULTS, report
from traces import HASH_BLOCK_TOKENS, Arrival, prompt_tokens, read_trace, scaled

from disagg.engine.base import Sample
from disagg.engine.base import Sequence as Dispatch
from disagg.engine.blocks import BlockPool
from disagg.engine.scheduler import Scheduler
from disagg.request import SamplingParams

BLOCK_SIZE = 16
TOKEN_IDS = range(1000, 32000)
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


def lru_hits(paths: Iterable[Sequence[Hashable]], capacity: int | None) -> int:
    """Ids that a cache of ``capacity`` ids (None: any number) finds of the leading ids of each path, one path after another.

    The least recently used is forgotten first; within a path that is its end, of which nothing could be found without its head.
    """
    cache: OrderedDict[Hashable, None] = OrderedDict()
    num_hits = 0
    for path in paths:
        num_hits += sum(1 for _ in itertools.takewhile(cache.__contains__, path))
        for hash_id in reversed(path):
            cache[hash_id] = None
            cache.move_to_end(hash_id)
        while capacity is not None and len(cache) > capacity:
            cache.popitem(last=False)
    return num_hits


def pool_hits(groups: Iterable[Iterable[list[int]]], num_blocks: int, chunk_tokens: int = 512) -> int:
    """Blocks that the product finds of prompts, whose groups come one after another, each at once.

    Raises ValueError when a prompt does not fit ``num_blocks``.
    """
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(pool, block_size=BLOCK_SIZE, chunk_tokens=chunk_tokens, max_num_seqs=256, prefix_cache=True)
    numbers = itertools.count()
    for group in groups:
        for prompt in group:
            scheduler.add(Dispatch(next(numbers), list(prompt), FIRST_TOKEN, len(prompt)))
        while scheduler.has_work:
            batch = scheduler.schedule()
            if not batch:
                raise ValueError(f"{num_blocks} blocks do not hold the next prompt: {scheduler!r}")
            scheduler.commit(batch, [Sample(0 if chunk.is_last else None) for chunk in batch])
    return scheduler.num_prefix_hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a Mooncake .jsonl")
    parser.add_argument("--capacities", type=int, nargs="+", default=[1 << n for n in range(10, 18)], help="in blocks")
    parser.add_argument("--requests", type=int, help="only so many of the trace, from its begin")
    parser.add_argument("--json", help="file to write, or - for bench/results/prefix_cache.json")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    length = BLOCK_SIZE / HASH_BLOCK_TOKENS
    arrivals = scaled(trace.arrivals[: args.requests], rate=1, length=length, duration_s=float("inf"))
    paths = [arrival.hash_ids for arrival in arrivals]
    full = [arrival.hash_ids[: arrival.num_prompt // BLOCK_SIZE] for arrival in arrivals]
    prompts = [prompt_tokens(arrival, TOKEN_IDS, 0, random.Random(0)) for arrival in arrivals]
    num_queried, num_different = sum(map(len, paths)), len(set(itertools.chain(*paths)))
    unlimited = num_queried + len(paths)  # nothing is ever evicted, however many run at once

    def rate(num_hits: int) -> float:
        return round(num_hits / num_queried, 4)

    one_by_one = rate(pool_hits(([prompt] for prompt in prompts), unlimited))
    together = [[prompt for _, prompt in group] for _, group in itertools.groupby(zip(arrivals, prompts), _arrived)]
    result = {
        "trace": trace.name,
        "attribution": trace.attribution,
        "length": length,
        "requests": len(paths),
        "blocks": num_queried,
        "different_blocks": num_different,
        "ceiling": rate(lru_hits(paths, None)),
        "hit_rate": {"one_by_one": one_by_one, "all_at_once": rate(pool_hits(together, unlimited))},
        "by_capacity": [
            {
                "blocks": capacity,
                "hit_rate": rate(pool_hits(([prompt] for prompt in prompts), capacity)),
                "ideal_lru": rate(lru_hits(full, capacity)),
            }
            for capacity in args.capacities
        ],
    }
    report("prefix_cache", result, args.json)
    if args.json:
        plot(result, (RESULTS / "prefix_cache.json" if args.json == "-" else Path(args.json)).with_suffix(".png"))


def _arrived(pair: tuple[Arrival, list[int]]) -> float:
    return pair[0].at_s


def plot(result: dict, path: Path) -> None:
    figure, (axis,) = curves.panels(1, f"{result['trace']}\n{result['attribution']}")
    sizes = [row["blocks"] for row in result["by_capacity"]]
    axis.plot(sizes, [row["hit_rate"] for row in result["by_capacity"]], marker="o", label="measured")
    axis.plot(sizes, [row["ideal_lru"] for row in result["by_capacity"]], marker="x", linestyle="--", label="ideal LRU")
    axis.axhline(result["ceiling"], color="black", linestyle=":", label="ceiling of the trace")
    axis.set(xlabel="KV blocks", ylabel="share of the prompts' blocks that were found", xscale="log", ylim=(0, None))
    axis.legend()
    curves.save(figure, path)


if __name__ == "__main__":
    main()
