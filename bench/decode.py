"""A decode step's time by batch and context, and the bytes it must read against the memory's measured rate.

    python bench/decode.py [--threads 1,2] [--batches 1,4,16] [--contexts 64,1024] [--repeat 10] [--json -]

Bytes of a step: every weight of a matrix product once, as a GGUF file stores it, and the KV of every token of every sequence.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from engine import apart, load
from server import report

from disagg.engine.base import Chunk, Sequence
from disagg.model import ModelFiles, ModelSpec, open_gguf
from disagg.request import SamplingParams


def measure_reading() -> float:
    """GB/s of summing 256 MiB, the best of 5."""
    data = torch.ones(64 << 20)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return data.nbytes / min(times) / 1e9


def weight_nbytes(files: ModelFiles, spec: ModelSpec) -> int:
    """As the file stores them; a tied embedding is read as the output head."""
    skipped = "" if spec.tie_word_embeddings else "token_embd.weight"
    return sum(int(tensor.n_bytes) for tensor in open_gguf(files.path).tensors if tensor.name != skipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--contexts", default="64,1024")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", help="file to write, or - for bench/results/decode.json")
    args = parser.parse_args()

    results = [apart(measure, args, int(text)) for text in args.threads.split(",")]
    report("decode", {"model": args.model, "by_threads": results}, args.json)


def measure(args: argparse.Namespace, num_threads: int) -> dict[str, object]:
    torch.set_num_threads(num_threads)
    reading = measure_reading()
    batches = [int(text) for text in args.batches.split(",")]
    contexts = [int(text) for text in args.contexts.split(",")]
    files, spec, engine = load(args.model, args.block_size)
    layout = engine.layout
    per_sequence = layout.num_blocks(max(contexts))
    pool = bytearray(per_sequence * max(batches) * layout.block_nbytes)
    torch.frombuffer(pool, dtype=torch.float32).normal_(0, 0.1)  # zeros would all lie in one page of the kernel's
    engine.bind(memoryview(pool))

    rng = random.Random(0)
    results = []
    for batch in batches:
        for context in contexts:
            free = rng.sample(range(per_sequence * max(batches)), per_sequence * max(batches))
            chunks = []
            for index in range(batch):
                tokens = rng.choices(range(spec.vocab_size), k=context)
                blocks = [free.pop() for _ in range(layout.num_blocks(context))]
                params = SamplingParams(max_tokens=1, temperature=0.0)
                chunks.append(Chunk(Sequence(index, tokens, params, 1, blocks=blocks), context - 1, 1))
            times = []
            for _ in range(args.repeat + 1):
                started = time.perf_counter()
                engine.step(chunks)
                times.append(time.perf_counter() - started)
            step_s = statistics.median(times[1:])
            nbytes = weight_nbytes(files, spec) + batch * context * layout.block_nbytes // args.block_size
            rate = nbytes / step_s / 1e9
            results.append(
                {
                    "batch": batch,
                    "context": context,
                    "step_ms": round(step_s * 1e3, 2),
                    "best_step_ms": round(min(times) * 1e3, 2),
                    "tokens_per_s": round(batch / step_s, 1),
                    "gb_per_s": round(rate, 1),
                    "share_of_reading": round(rate / reading, 3),
                }
            )
    return {"threads": num_threads, "reading_gb_per_s": round(reading, 1), "steps": results}


if __name__ == "__main__":
    main()
