"""How much of its cores prefill uses: useful float operations per second against matrix products measured in the same run.

    python bench/prefill.py [--threads 1,2] [--tokens 2000] [--chunk 512] [--block-size 16] [--repeat 3] [--json -]

Useful: 2 for each weight of a matrix product and token (the output head for the last token only), and 4 * heads * head_dim for
each position a token attends to (causal: itself and all before it). The rate of products is the median, over the model's own
shapes, of the best of several runs: with weights that oneDNN has packed, and with plain ``torch.mm``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from disagg.kernels.linear import linear
from engine import apart, load
from server import report

from disagg.engine.base import Chunk, Sequence
from disagg.model import ModelSpec, find_model, read_model_spec
from disagg.request import SamplingParams


def best_of(count: int, run: Callable[[], object]) -> float:
    """Seconds of the fastest of ``count`` runs, after one that does not count."""
    run()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def matrix_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """(in, out) of the products of one layer."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    c, i = spec.hidden_size, spec.intermediate_size
    return [(c, q + 2 * kv), (q, c), (c, 2 * i), (i, c)]


def measure_products(spec: ModelSpec, rows: int) -> dict[str, float]:
    """GFLOP/s with packed weights and with torch.mm, median over the shapes."""
    packed, plain = [], []
    for size_in, size_out in matrix_shapes(spec):
        x, weight = torch.randn(rows, size_in), torch.randn(size_out, size_in)
        layer, transposed = linear(weight), weight.T.contiguous()
        operations = 2 * rows * size_in * size_out / 1e9
        packed.append(operations / best_of(8, lambda x=x, layer=layer: layer(x)))
        plain.append(operations / best_of(8, lambda x=x, w=transposed: torch.mm(x, w)))
    return {"packed": statistics.median(packed), "torch_mm": statistics.median(plain)}


def useful_operations(spec: ModelSpec, num_tokens: int) -> float:
    per_token = spec.num_layers * sum(size_in * size_out for size_in, size_out in matrix_shapes(spec))
    attended = num_tokens * (num_tokens + 1) / 2
    attention = 4 * spec.num_heads * spec.head_dim * attended * spec.num_layers
    return 2 * per_token * num_tokens + 2 * spec.hidden_size * spec.vocab_size + attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", help="file to write, or - for bench/results/prefill.json")
    args = parser.parse_args()

    results = [apart(measure, args, int(text)) for text in args.threads.split(",")]
    report("prefill", {"model": args.model, "tokens": args.tokens, "chunk": args.chunk, "by_threads": results}, args.json)


def measure(args: argparse.Namespace, num_threads: int) -> dict[str, object]:
    torch.set_num_threads(num_threads)
    products = measure_products(read_model_spec(find_model(args.model)), args.chunk)
    _, spec, engine = load(args.model, args.block_size)
    num_blocks = engine.layout.num_blocks(args.tokens)
    engine.bind(memoryview(bytearray(num_blocks * engine.layout.block_nbytes)))
    rng = random.Random(0)
    blocks = rng.sample(range(num_blocks), num_blocks)
    tokens = rng.choices(range(spec.vocab_size), k=args.tokens)
    sequence = Sequence(1, tokens, SamplingParams(max_tokens=1, temperature=0.0), len(tokens), blocks=blocks)

    def prefill() -> None:
        for start in range(0, args.tokens, args.chunk):
            engine.step([Chunk(sequence, start, min(args.chunk, args.tokens - start))])

    seconds = best_of(args.repeat, prefill)
    gflops = useful_operations(spec, args.tokens) / 1e9 / seconds
    return {
        "threads": num_threads,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(args.tokens / seconds),
        "useful_gflops_per_s": round(gflops, 1),
        "product_gflops_per_s": {name: round(rate, 1) for name, rate in products.items()},
        "share_of_packed": round(gflops / products["packed"], 3),
        "share_of_torch_mm": round(gflops / products["torch_mm"], 3),
    }


if __name__ == "__main__":
    main()
