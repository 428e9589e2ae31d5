"""How cost grows: over context, streams, prompt tokens beside streams, and workers; and where faster than theory has it.

    python bench/growth.py [--parts context streams prompts workers] [--json -]

context   the engine prefills one prompt of 8,192 tokens: time of each chunk over the context at its end, the sum up to there,
          which is the TTFT without a server around it, and a decode step at that context
streams   a decode step of 1 to 64 streams at a context of 256
prompts   a step of 8 streams with 0 to 512 prompt tokens of another sequence beside them, as a colocated worker runs it
workers   null engine, as many prefill as decode workers, 32 streams for each decode worker: the parent's CPU time per token and
          per event; and with nothing else going on the time from the first token to the last byte handed over

Of several runs of a step the fastest counts: what disturbs a shared machine only adds. ``bends_up_at`` names the points that lie
more than 15% above what those before them promise. With --json also a plot, beside the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from itertools import accumulate
from pathlib import Path

import curves
import torch
from clients import stream
from curves import Curve, Law
from engine import apart, load
from frontend import measure as measure_parent
from server import RESULTS, RunningServer, report, running_server

from disagg.engine.base import Chunk, Sequence
from disagg.request import SamplingParams

BLOCK_SIZE, CHUNK = 16, 512
BESIDE, BESIDE_CONTEXT = 8, 512
STREAMS_CONTEXT = 256
STREAMS_PER_WORKER, STREAM_TOKENS = 32, 300
STEPS_PER_REPEAT = 5  # a decode step is short
HANDOFF_ROUNDS, HANDOFFS, HANDOFF_PROMPT = 5, 40, 256
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


class Bench:
    """An engine whose pool holds ``num_tokens`` tokens of random KV; sequences get blocks scattered over it."""

    def __init__(self, args: argparse.Namespace, num_tokens: int) -> None:
        torch.set_num_threads(args.threads)
        _, spec, self._engine = load(args.model, BLOCK_SIZE)
        self._vocabulary = range(spec.vocab_size)
        num_blocks = self._engine.layout.num_blocks(num_tokens)
        pool = bytearray(num_blocks * self._engine.layout.block_nbytes)
        torch.frombuffer(pool, dtype=torch.float32).normal_(0, 0.1)  # zeros would all lie in one page of the kernel's
        self._engine.bind(memoryview(pool))
        self._rng = random.Random(0)
        self._free = self._rng.sample(range(num_blocks), num_blocks)

    def sequence(self, num_tokens: int) -> Sequence:
        blocks = [self._free.pop() for _ in range(self._engine.layout.num_blocks(num_tokens))]
        return Sequence(0, self._rng.choices(self._vocabulary, k=num_tokens), PARAMS, num_tokens, blocks=blocks)

    def step_ms(self, chunks: list[Chunk], repeat: int) -> float:
        """The fastest of ``repeat`` that all compute the same."""
        times = []
        for _ in range(repeat):
            started = time.perf_counter()
            self._engine.step(chunks)
            times.append(time.perf_counter() - started)
        return min(times) * 1e3


def measure_context(args: argparse.Namespace) -> list[Curve]:
    bench = Bench(args, args.context)
    sequence = bench.sequence(args.context)
    bench.step_ms([Chunk(sequence, 0, CHUNK)], 1)  # warm-up
    ends, chunks_ms, steps_ms = range(CHUNK, args.context + 1, CHUNK), [], []
    for end in ends:
        chunks_ms.append(bench.step_ms([Chunk(sequence, end - CHUNK, CHUNK)], args.repeat))
        decoding = Sequence(0, sequence.tokens[:end], PARAMS, end, blocks=sequence.blocks)
        steps_ms.append(bench.step_ms([Chunk(decoding, end - 1, 1)], args.repeat * STEPS_PER_REPEAT))
    label, xs = "context in tokens", list(map(float, ends))
    attention = "attention reads all that is before"
    sums_s = [ms / 1e3 for ms in accumulate(chunks_ms)]
    return [
        Curve(f"prefill of {CHUNK} tokens", label, "ms", Law.LINE, attention, xs, chunks_ms),
        Curve("TTFT, engine alone", label, "s", Law.OTHER, "linear with a small square part, the sum of the chunks", xs, sums_s),
        Curve("decode step, 1 stream", label, "ms", Law.LINE, attention, xs, steps_ms),
    ]


def measure_streams(args: argparse.Namespace) -> list[Curve]:
    counts = [1, 2, 4, 8, 16, 32, 64]
    bench = Bench(args, max(counts) * STREAMS_CONTEXT)
    chunks = [Chunk(bench.sequence(STREAMS_CONTEXT), STREAMS_CONTEXT - 1, 1) for _ in range(max(counts))]
    times_ms = [bench.step_ms(chunks[:count], args.repeat * STEPS_PER_REPEAT) for count in counts]
    label, theory = f"streams at a context of {STREAMS_CONTEXT}", "few streams share the reading of the weights"
    return [Curve("decode step", label, "ms", Law.PROPORTIONAL, theory, list(map(float, counts)), times_ms)]


def measure_prompts(args: argparse.Namespace) -> list[Curve]:
    counts = [0, 64, 128, 256, 384, 512]
    bench = Bench(args, BESIDE * BESIDE_CONTEXT + CHUNK)
    streams = [Chunk(bench.sequence(BESIDE_CONTEXT), BESIDE_CONTEXT - 1, 1) for _ in range(BESIDE)]
    prompt = bench.sequence(CHUNK)
    batches = [streams + [Chunk(prompt, 0, count)] * (count > 0) for count in counts]
    times_ms = [bench.step_ms(batch, args.repeat) for batch in batches]
    label, theory = f"prompt tokens beside {BESIDE} streams", "from the step without them"
    return [Curve("mixed step", label, "ms", Law.LINE, theory, list(map(float, counts)), times_ms)]


def measure_workers(args: argparse.Namespace) -> list[Curve]:
    totals, token_us, event_us, handoff_ms = [], [], [], []
    for count in args.workers:
        roles = ("--mode", "disagg", "--prefill", str(count), "--decode", str(count))
        with running_server("--model", "null", *roles) as server:
            totals.append(2.0 * count)
            handoff_ms.append(asyncio.run(measure_handoff(server)))
            parent = measure_parent(server, STREAMS_PER_WORKER * count, STREAM_TOKENS)
            token_us.append(float(str(parent["us_per_token"])))
            event_us.append(float(str(parent["us_per_event"])))
    label, load_ = "workers, half of each role", f"{STREAMS_PER_WORKER} streams for each decode worker"
    handoff = f"hand-over of {HANDOFF_PROMPT} tokens, nothing else"
    return [
        Curve(f"parent, {load_}", label, "µs of CPU per token", Law.FLAT, "a step's message holds as many", totals, token_us),
        Curve(
            f"parent, {load_}", label, "µs of CPU per event", Law.OTHER, "the more tokens share it, the more", totals, event_us
        ),
        Curve(handoff, label, "ms", Law.FLAT, "two workers and the parent take part", totals, handoff_ms),
    ]


async def measure_handoff(server: RunningServer) -> float:
    """Mean ms from the first token to the last byte, of requests one after another; the fastest of some rounds."""
    rng = random.Random()
    names = [f'disagg_stage_seconds_{part}{{stage="transfer"}}' for part in ("sum", "count")]
    means = []
    for _ in range(HANDOFF_ROUNDS):
        before = [server.metric(name) for name in names]
        for _ in range(HANDOFFS):
            await stream(server.url, [rng.randrange(32, 127) for _ in range(HANDOFF_PROMPT)], 2, model="null")
        total_s, num = (server.metric(name) - value for name, value in zip(names, before))
        means.append(total_s / num * 1e3)
    return min(means)


PARTS = {"context": measure_context, "streams": measure_streams, "prompts": measure_prompts, "workers": measure_workers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--context", type=int, default=8192, help="the longest")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], help="of each role")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each prefill step")
    parser.add_argument("--json", help="file to write, or - for bench/results/growth.json")
    args = parser.parse_args()
    found: list[Curve] = [curve for part in args.parts for curve in apart(PARTS[part], args)]
    result = {"model": args.model, "threads": args.threads, "curves": [curve.as_dict() for curve in found]}
    report("growth", result, args.json)
    if args.json:
        figure, axes = curves.panels(len(found), f"{args.model}, {args.threads} threads; workers: null engine")
        for axis, curve in zip(axes, found):
            curves.draw(axis, curve)
        curves.save(figure, (RESULTS / "growth.json" if args.json == "-" else Path(args.json)).with_suffix(".png"))


if __name__ == "__main__":
    main()
